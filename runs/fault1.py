"""Fault 1 on real processes: dose and response. `python runs/fault1.py [--requests N] [--json F]`

Two prefill workers and one decode worker run the hash model. Every KV write is held back by a
declared 30 ms, and a request whose prompt is not there after 60 ms is cut off. The dose is the
load: how many clients ask at once. With the failpoint, decode gives an aborted request's pages to
the next one at once, as the report describes; without it, it waits until the writer has drained.

A rate is wrong answers among whole ones, per 10,000, with its exact 95 % interval (Clopper and
Pearson).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.stats import beta

from stanchion.cli.plan import Asked
from stanchion.cli.verify import Report, run
from stanchion.core.config import Config, load

LOADS = (1, 4, 8, 16, 24, 32, 48)
FAULT = "release_before_drained"
SETTINGS = [
    "cluster.prefill=2",
    "cluster.decode=1",
    "cluster.prefill_deadline_s=0.06",
    "lab.slow_transfer_ms=30",
    "kv.memory_gib=0.001",
]
TRAFFIC = Asked(seed=1, context=600, variety=1000, abort_one_in=8)


@dataclass(frozen=True)
class Rate:
    wrong: int
    whole: int

    def words(self) -> str:
        low, high = interval(self.wrong, self.whole)
        rate = 1e4 * self.wrong / max(self.whole, 1)
        return f"{self.wrong} of {self.whole} = {rate:.1f} ({1e4 * low:.1f} to {1e4 * high:.1f})"


def interval(count: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson: it covers at least so often, whatever the rate is."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, total - count + 1))
    high = 1.0 if count == total else float(beta.ppf(1 - tail, count + 1, total - count))
    return low, high


def rate_of(report: Report) -> Rate:
    whole = sum(count for what, count in report.outcomes.items() if what.startswith("completed"))
    return Rate(report.wrong_count, whole)


def one(config: Config, load_: int, requests: int, failpoint: str) -> Report:
    armed = replace(config, lab=replace(config.lab, failpoints=failpoint))
    return run(armed, replace(TRAFFIC, requests=requests, concurrency=load_), quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000, help="for each load and arm")
    parser.add_argument("--loads", type=int, nargs="*", default=LOADS, help="clients at once")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    config = load(Config(), "", SETTINGS)
    rows = []
    print("| clients | with the failpoint, per 10,000 | without it | cut off | requests/s |")
    print("|---|---|---|---|---|")
    for clients in asked.loads:
        faulty = one(config, clients, asked.requests, FAULT)
        right = one(config, clients, asked.requests, "")
        cut_off = 1e2 * right.deadlines / right.requests
        speed = right.requests / right.seconds
        said = [rate_of(faulty).words(), rate_of(right).words(), f"{cut_off:.0f} %", f"{speed:.0f}"]
        print(f"| {clients} | " + " | ".join(said) + " |", flush=True)
        for arm, report in ((FAULT, faulty), ("", right)):
            row = vars(rate_of(report)) | {"clients": clients, "failpoint": arm}
            rows.append(row | {"outcomes": dict(report.outcomes), "lost": report.lost})
    if asked.json:
        Path(asked.json).write_text(
            json.dumps({"settings": SETTINGS, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
