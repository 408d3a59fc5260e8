"""`stanchion gateway`: the gateway alone, in front of servers that somebody else has started.

It needs no torch and no model, only the model's tokenizer; and not even that where text is handed
through.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from stanchion.cli.serve import gateway_settings
from stanchion.core.config import Config, check
from stanchion.core.errors import ConfigError
from stanchion.gateway.serve import run
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import load_vocabulary
from stanchion.gateway.upstream.client import Patience
from stanchion.gateway.upstream.passage import text_vocabulary
from stanchion.gateway.upstream.place import Place, places
from stanchion.gateway.upstream.watch import Upstreams, Wanted

LOOKS_MISSED = 6  # so many and a server gets nothing new, where others could take it
WATCHED = ("balanced", "guarded", "strict")  # the modes whose witness wants log-probabilities


def front(
    config: Config,
    api_keys: tuple[str, ...],
    upstream_key: str = "",
    admin_keys: tuple[str, ...] = (),
) -> int:
    """Return the exit code: 0 when drained, 1 when a server did not fit or the drain was cut."""
    check(config)
    upstream = config.upstream
    servers = places(upstream.urls, upstream.prefill, upstream.decode)
    settings = front_settings(config, api_keys, admin_keys, servers)
    settings.check()
    vocabulary = load_vocabulary(_folder(upstream.tokenizer)) if upstream.tokenizer else None
    wanted = Wanted(
        vocabulary=vocabulary or text_vocabulary(),
        text=vocabulary is None,
        watched=settings.integrity in WATCHED,
        model=upstream.model,
        key=upstream_key,
        patience=Patience(upstream.connect_s, upstream.read_s, upstream.poll_s),
    )
    upstreams = Upstreams(servers, wanted)
    print(f"waiting for {', '.join(one.url for one in servers)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="stanchion-") as folder:
        ending = run(
            settings,
            f"ipc://{folder}/join",
            wanted.vocabulary,
            on_started=lambda url: _welcome(url, servers),
            supervise=upstreams.running,
        )
    if upstreams.refused:
        raise ConfigError(upstreams.refused)
    if ending == "drained":
        print("drained; everything that was accepted has ended", file=sys.stderr)
        return 0
    print(f"stopped: {ending.replace('_', ' ')}", file=sys.stderr)
    return 1


def front_settings(
    config: Config, api_keys: tuple[str, ...], admin_keys: tuple[str, ...], servers: list[Place]
) -> GatewaySettings:
    settings = gateway_settings(config, api_keys, "")
    patient = max(config.cluster.suspect_s, LOOKS_MISSED * config.upstream.poll_s)
    # Were there nobody else, a server in a long step would be better than none.
    suspect_s = settings.worker_silence_s if len(servers) == 1 else patient
    # Nothing tells how far a server is with a prompt: it may take as long as it may be silent.
    stall_s = max(settings.stall_s, config.upstream.read_s)
    return replace(settings, suspect_s=suspect_s, stall_s=stall_s, admin_keys=admin_keys)


def _folder(said: str) -> Path:
    folder = Path(said)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"upstream.tokenizer {said!r} must be a folder with tokenizer.json")
    return folder


def _welcome(url: str, servers: list[Place]) -> None:
    print(f"\nstanchion is at {url}, in front of {', '.join(one.url for one in servers)}\n")
    print(f"  curl {url}/v1/models\n", flush=True)
