"""Is each historic fault seen from outside? `python runs/burnin_failpoints.py [--json F]`

`stanchion serve` with one failpoint after another, and `stanchion verify --url` in front of it,
which knows nothing of what is armed. Beside each fault the same server without it. Integrity modes
are off: what is asked here is whether the burn-in sees, not whether the gateway helps.

Faults of the tiers: a device too small for the storm, a host behind it, a declared delay before the
loads that the fault does not wait for. A lost draft layer leaves the text right, so it is looked
for with the hash model, whose drafts are wrong without it; the embedded model's hardly change. The
handoff's: two prefill workers and one decode worker with the hash model, writes held back by 30 ms,
and requests cut off after 300 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stanchion.cli.arms import serving

LAYERS = 6  # of the embedded model, its draft layer included
BURN_S = 3600.0


@dataclass(frozen=True)
class Arm:
    """`also`: settings that come with the failpoint alone."""

    failpoint: str
    model: str
    sets: tuple[str, ...]
    also: tuple[str, ...] = ()
    concurrency: int = 16


def slow(door: str, milliseconds: float) -> str:
    return "lab.slow_load=" + ",".join(f"{at}/{door}:{milliseconds:g}" for at in range(LAYERS))


SMALL = ("cluster.both=1", "kv.memory_gib=0.005", "kv.host_cache_gib=0.2")
TIGHT = ("cluster.both=1", "kv.memory_gib=0.005", "kv.host_cache_gib=0.004")
HASHED = ("cluster.both=1", "kv.memory_gib=0.001", "kv.host_cache_gib=0.02")
PAIR = (
    "cluster.prefill=2",
    "cluster.decode=1",
    "cluster.prefill_deadline_s=0.3",
    "lab.slow_transfer_ms=30",
    "kv.memory_gib=0.002",
)
ARMS = (
    Arm("release_before_drained", "hashed", PAIR, concurrency=32),
    Arm("index_read_before_ready", "tiny", (*SMALL, slow("index", 1))),
    Arm("attend_read_before_ready", "tiny", (*SMALL, slow("attend", 1))),
    Arm("door_removed", "tiny", (*SMALL, slow("index", 1)), ("lab.removed_door=2/index",)),
    Arm("restore_without_draft", "hashed", HASHED),
    Arm("restore_without_index", "tiny", SMALL),
    Arm("evict_source_in_flight", "tiny", (*TIGHT, slow("attend", 3))),
    Arm("publish_before_complete", "tiny", (*TIGHT, slow("attend", 3))),
)


def flags(arm: Arm, armed: bool) -> list[str]:
    """Of `stanchion serve`."""
    sets = [*arm.sets, "gateway.integrity=off"]
    if armed:
        sets += [f"lab.failpoints={arm.failpoint}", *arm.also]
    return [arm.model, *(part for one in sets for part in ("--set", one))]


def burn(url: str, requests: int, concurrency: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "stanchion.cli.main", "verify", "--url", url]
        command += ["--requests", f"{requests}", "--concurrency", f"{concurrency}"]
        done = subprocess.run(
            [*command, "--json", str(path)], capture_output=True, text=True, timeout=BURN_S
        )
        if not path.exists():
            raise SystemExit(done.stderr)
        found: dict[str, Any] = json.loads(path.read_text())
        return found | {"exit_code": done.returncode}


def row(arm: Arm, armed: bool, found: dict[str, Any]) -> str:
    rate = found["confirmed"]
    confirmed = f"{rate['events']} of {rate['of']}"
    if rate["of"]:
        confirmed += f" = {rate['per_10000']:.0f} ({rate['low']:.0f} to {rate['high']:.0f})"
    cells = [
        arm.failpoint,
        "armed" if armed else "not armed",
        confirmed,
        f"{found['parted']['events']} of {found['parted']['of']}",
        found["acceptance"] or "",
        f"{found['exit_code']}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="of each storm")
    parser.add_argument("--arm", action="append", help="these failpoints alone")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--log", type=Path, default=Path("servers.log"), help="what servers say")
    asked = parser.parse_args(argv)
    print("| failpoint | | confirmed, per 10,000 | other text than alone | acceptance | exit |")
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for arm in ARMS:
        if asked.arm and arm.failpoint not in asked.arm:
            continue
        for armed in (True, False):
            with serving(flags(arm, armed), asked.log) as url:
                found = burn(url, asked.requests, arm.concurrency)
            found.pop("worst")
            rows.append({"failpoint": arm.failpoint, "armed": armed, "found": found})
            print(row(arm, armed, found), flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
