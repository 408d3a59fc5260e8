"""Peers of the load generator, over the traces and against the stub of `stanchion bench replay`.

`runs/replay_peers.sh` makes their environments and calls this. How late requests reach the server
is by the stub's clock, for them as for us. What a request costs is a difference quotient: the CPU
time of all of a tool's processes in a long run less that in a short one, over the requests between.
A tool that does not send all requests of a trace is told so, and has no figure for that rate.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stanchion.cli.bench import stub
from stanchion.cli.bench.replay import RATES, lateness_p99, serving
from stanchion.core.errors import ConfigError

START_S, PATIENCE = 180.0, 5.0  # a tool that takes longer than so many times the trace hangs
SHORT = 4  # the short run is a so many-th of the long one
Row = dict[str, object]


@dataclass(frozen=True)
class Peer:
    """`row`: a request of the trace as this tool wants it. `command`: of (its folder, URL, trace,
    where to put what it writes)."""

    name: str
    row: Callable[[Row], Row]
    command: Callable[[Path, str, Path, Path], Sequence[str]]


def _aiperf(home: Path, url: str, trace: Path, out: Path) -> Sequence[str]:
    return [
        str(home / "aiperf/bin/aiperf"), "profile", "-m", stub.MODEL, "--url", url,
        "--endpoint-type", "completions", "--streaming", "--input-file", str(trace),
        "--custom-dataset-type", "mooncake_trace", "--fixed-schedule",
        "--fixed-schedule-auto-offset", "--tokenizer", "local/tiny", "--artifact-dir", str(out),
        "--ui", "none",
    ]  # fmt: skip


def _guidellm(home: Path, url: str, trace: Path, out: Path) -> Sequence[str]:
    data = {
        "kind": "mooncake",
        "source": {"kind": "json_file", "path": str(trace)},
        "hash_id_block_size": stub.BLOCK,
    }
    backend = {"kind": "openai_http", "target": url, "model": stub.MODEL}
    return [
        str(home / "guidellm/bin/guidellm"), "run", "--backend", json.dumps(backend),
        "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": "local/tiny"}),
        "--profile", "kind=replay,schedule_turn=timestamp", "--data", json.dumps(data),
        "--output", json.dumps({"kind": "json", "path": str(out / "out.json")}),
        "--disable-console",
    ]  # fmt: skip


def _in_seconds(row: Row) -> Row:
    return row | {"timestamp": float(str(row["timestamp"])) / 1000}


PEERS = (
    Peer("aiperf 0.13.0", lambda row: row, _aiperf),
    Peer("guidellm 0.8.1", _in_seconds, _guidellm),
)


def measure(peer: Peer, home: Path, rate: int, seconds: float) -> tuple[float, float, int]:
    """Lateness (p99), CPU seconds and requests of one run. Raise ConfigError where it did not send
    what it was to send."""
    rows = stub.trace(rate, seconds)
    program = Path(peer.command(home, "", Path(), Path())[0])
    if not program.exists():
        raise ConfigError(f"{program} is not there; runs/replay_peers.sh installs it")
    with tempfile.TemporaryDirectory(prefix="stanchion-peers-") as folder, serving() as url:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("\n".join(json.dumps(peer.row(row)) for row in rows) + "\n")
        command = peer.command(home, url, trace, Path(folder))
        offline = {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        before = _cpu_s()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **offline},
                cwd=folder,
                capture_output=True,
                check=False,
                timeout=START_S + PATIENCE * seconds,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{peer.name} did not end") from None
        spent = _cpu_s() - before
        with urllib.request.urlopen(f"{url}/arrivals", timeout=60) as reply:
            arrivals = json.loads(reply.read())
        if done.returncode:
            said = (done.stderr or done.stdout)[-2000:].decode("utf-8", "replace")
            raise ConfigError(f"{peer.name} ended with {done.returncode}: {said}")
    wanted = [float(row["timestamp"]) / 1000 for row in rows]
    return lateness_p99(arrivals, wanted), spent, len(rows)


def _cpu_s() -> float:
    """Of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="where the environments are")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rates", type=int, nargs="*", default=RATES)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    told: dict[str, dict[str, dict[str, list[float]]]] = {}
    for peer in PEERS:
        for rate in asked.rates:
            figures = told.setdefault(peer.name, {}).setdefault(str(rate), {})
            try:
                for _ in range(asked.runs):
                    late, long, many = measure(peer, asked.home, rate, asked.seconds)
                    _, short, few = measure(peer, asked.home, rate, asked.seconds / SHORT)
                    cost = (long - short) / (many - few)
                    figures.setdefault("lateness_p99_s", []).append(late)
                    figures.setdefault("cpu_s", []).append(cost)
                    print(f"{peer.name}, {rate}/s: {1000 * late:.1f} ms late, {cost:.5f} CPU s")
            except ConfigError as error:
                figures.clear()
                print(f"{peer.name}, {rate}/s: no figure: {error}", file=sys.stderr)
            asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
