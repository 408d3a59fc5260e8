"""`stanchion serve`: the workers as processes of their own, and the gateway in front in this one.

The workers' sockets lie in a private folder, unless others are to join. Workers are told to stop
only after the gateway has drained, and they end by themselves when this process dies.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from stanchion.cli.settings import model_folder
from stanchion.cli.supervisor import Supervisor, wanted
from stanchion.core.config import Config, check
from stanchion.core.errors import ConfigError
from stanchion.core.peerkey import check_address
from stanchion.gateway.serve import run
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.supervise import Watched
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary, load_vocabulary

SOCKET_FOLDER_MAX = 96  # a Unix socket's path has at most 107 characters
WORKER_SILENCE_S = 30.0  # far longer than a flight; a dead process is seen at once


Keys = tuple[str, ...]


def serve(config: Config, api_keys: Keys, peer_key: str = "", admin_keys: Keys = ()) -> int:
    """Return the exit code: 0 when drained, 1 when the workers failed or the drain was cut."""
    check(config)
    if config.upstream.urls or config.upstream.prefill or config.upstream.decode:
        raise ConfigError("upstream.*: servers behind the gateway are for `stanchion gateway`")
    settings = replace(gateway_settings(config, api_keys, peer_key), admin_keys=admin_keys)
    settings.check()
    vocabulary = read_vocabulary(config)
    _check_failpoints(config)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stanchion-") as folder:
        if len(folder) > SOCKET_FOLDER_MAX:
            raise ConfigError(f"TMPDIR is too long for a Unix socket ({folder}); set a shorter one")
        join = config.cluster.join or f"ipc://{folder}/join"
        check_address("cluster.join", join, peer_key)
        if not wanted(config.cluster):
            print(f"waiting for workers to join at {join}", file=sys.stderr)
        environment = worker_environment(config, peer_key)

        def supervise(fleet: Watched) -> AbstractAsyncContextManager[None]:
            return Supervisor(config, f"ipc://{folder}", environment, fleet).running()

        ending = run(
            settings,
            join,
            vocabulary,
            on_started=lambda url: _welcome(url, config, began),
            supervise=supervise,
        )
    if ending == "drained":
        print("drained; everything that was accepted has ended", file=sys.stderr)
        return 0
    print(f"stopped: {ending.replace('_', ' ')}", file=sys.stderr)
    return 1


def _list(said: str) -> tuple[str, ...]:
    return tuple(filter(None, (one.strip() for one in said.split(","))))


def gateway_settings(config: Config, api_keys: Keys, peer_key: str) -> GatewaySettings:
    gateway, cluster = config.gateway, config.cluster
    # Were there nobody else, a worker in a long step would be better than none.
    alone = len(wanted(cluster)) == 1 and not cluster.join
    return GatewaySettings(
        host=gateway.host,
        port=gateway.port,
        api_keys=api_keys,
        served_model_name=gateway.served_model_name,
        tool_call_parser=gateway.tool_call_parser,
        reasoning_parser=gateway.reasoning_parser,
        requests_per_minute=gateway.requests_per_minute,
        tokens_per_minute=gateway.tokens_per_minute,
        quotas=_list(gateway.quotas),
        priorities=_list(gateway.priorities),
        priority_best=gateway.priority_best,
        breaker_faults=gateway.breaker_faults,
        breaker_rest_s=gateway.breaker_rest_s,
        breaker_probes=gateway.breaker_probes,
        confirmed_max=gateway.confirmed_max,
        confirmed_window_s=gateway.confirmed_window_s,
        prefix_blocks_max=gateway.prefix_blocks_max,
        in_flight_max=gateway.in_flight_max,
        waiting_max=gateway.waiting_max,
        waiting_s=gateway.waiting_s,
        drain_s=gateway.drain_s,
        worker_silence_s=max(WORKER_SILENCE_S, cluster.silence_s),
        suspect_s=max(cluster.suspect_s, cluster.silence_s) if alone else cluster.suspect_s,
        peer_key=peer_key,
        integrity=gateway.integrity,
        hold_tokens=gateway.hold_tokens,
        witness_tokens_max=gateway.witness_tokens_max,
        witness_share=gateway.witness_share,
        retries_share=gateway.retries_share,
        retries_spare=gateway.retries_spare,
        baselines=gateway.baselines,
        record=gateway.record,
        record_content=gateway.record_content,
        record_max_gib=gateway.record_max_gib,
    )


def read_vocabulary(config: Config) -> Vocabulary:
    if config.model.path == "hashed":
        return byte_vocabulary()
    return load_vocabulary(model_folder(config.model.path))


def worker_environment(config: Config, peer_key: str) -> dict[str, str]:
    """Threads and the secret go by environment: a command line can be read by others."""
    threads = str(config.engine.threads)
    added = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if peer_key:
        added["STANCHION_PEER_KEY"] = peer_key
    return {**os.environ, **added}


def _check_failpoints(config: Config) -> None:
    ours = wanted(config.cluster)
    for one in config.lab.failpoints.split(","):
        worker = one.partition("@")[2]
        if worker and ours and worker not in ours:
            raise ConfigError(f"lab.failpoints: no worker {worker}; there are: {', '.join(ours)}")
    if config.lab.failpoints:
        print(f"WARNING: failpoints are armed: {config.lab.failpoints}", file=sys.stderr)
        print("WARNING: answers may be wrong; this is for the lab only", file=sys.stderr)


def _welcome(url: str, config: Config, began: float) -> None:
    name = config.gateway.served_model_name or Path(config.model.path).name
    print(f"\nstanchion serves {name} at {url} (ready in {time.monotonic() - began:.1f} s)\n")
    print(f"  curl {url}/v1/completions -H 'content-type: application/json' \\")
    print(f"""    -d '{{"model": "{name}", "prompt": "def main(", "max_tokens": 60}}'""")
    called = sys.argv[0] if sys.argv[0].endswith("stanchion") else "stanchion"
    print(f"\n  {called} chat --url {url}\n", flush=True)
