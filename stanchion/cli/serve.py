"""`stanchion serve`: one engine process, and the gateway in front of it in this process.

The engine is a child that nobody else talks to: a Unix socket in a private folder. It is told to
stop only after the gateway has drained, and it ends by itself when this process dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from stanchion.cli.settings import model_folder
from stanchion.core.config import Config, check
from stanchion.core.errors import ConfigError
from stanchion.gateway.serve import run
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary, load_vocabulary

WORKER_STOP_S = 30.0
SOCKET_FOLDER_MAX = 96  # a Unix socket's path has at most 107 characters
WORKER_SILENCE_S = 30.0  # far longer than a flight; a dead process is seen at once


def serve(config: Config, api_keys: tuple[str, ...]) -> int:
    """Return the process's exit code: 0 when drained, 1 when the worker died or drain was cut."""
    check(config)
    settings = gateway_settings(config, api_keys)
    settings.check()
    vocabulary = read_vocabulary(config)
    _warn_of_failpoints(config)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stanchion-") as folder:
        if len(folder) > SOCKET_FOLDER_MAX:
            raise ConfigError(f"TMPDIR is too long for a Unix socket ({folder}); set a shorter one")
        address = f"ipc://{folder}/worker"
        worker = spawn_worker(config, address)
        sentinel = os.pidfd_open(worker.pid)
        try:
            ending = run(
                settings,
                address,
                vocabulary,
                on_started=lambda url: _welcome(url, config, began),
                worker_sentinel=sentinel,
            )
        finally:
            os.close(sentinel)
            _stop(worker)
    if ending == "drained":
        print("drained; everything that was accepted has ended", file=sys.stderr)
        return 0
    print(f"stopped: {ending.replace('_', ' ')}", file=sys.stderr)
    return 1


def gateway_settings(config: Config, api_keys: tuple[str, ...]) -> GatewaySettings:
    gateway = config.gateway
    return GatewaySettings(
        host=gateway.host,
        port=gateway.port,
        api_keys=api_keys,
        served_model_name=gateway.served_model_name,
        in_flight_max=gateway.in_flight_max,
        drain_s=gateway.drain_s,
        worker_silence_s=WORKER_SILENCE_S,
    )


def read_vocabulary(config: Config) -> Vocabulary:
    if config.model.path == "hashed":
        return byte_vocabulary()
    return load_vocabulary(model_folder(config.model.path))


def spawn_worker(config: Config, address: str) -> subprocess.Popen[bytes]:
    """Start the engine process. It gets its settings as JSON, its threads by environment."""
    threads = str(config.engine.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    settings = msgspec.json.encode(config).decode()
    command = [sys.executable, "-m", "stanchion.cli.worker", address, settings, str(os.getpid())]
    # A session of its own: the terminal's Ctrl-C reaches this process, which drains first.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(WORKER_STOP_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def _warn_of_failpoints(config: Config) -> None:
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
