"""Simulated clusters by the thousand: `python runs/hunt.py --requests 1000000 [--seed N]`.

Prints what was met, seeds a minute, and the first runs that went wrong. One process a core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from functools import partial

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stanchion.sim.cluster import Plan
from stanchion.sim.hunt import Report, hunt

SEEDS_A_BATCH = 20


def batch(size: int, first: int) -> Report:
    return hunt(range(first, first + SEEDS_A_BATCH), Plan(requests=size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="simulated requests")
    parser.add_argument("--size", type=int, default=Plan().requests, help="requests a cluster")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    asked = parser.parse_args()
    batches = -(-asked.requests // (asked.size * SEEDS_A_BATCH))
    firsts = range(asked.seed, asked.seed + batches * SEEDS_A_BATCH, SEEDS_A_BATCH)
    whole, began = Report(), time.monotonic()
    columns = (TextColumn("{task.completed:,} requests"), BarColumn(), TimeRemainingColumn())
    with multiprocessing.Pool(os.cpu_count()) as pool, Progress(*columns) as progress:
        task = progress.add_task("", total=asked.requests)
        for report in pool.imap_unordered(partial(batch, asked.size), firsts):
            whole.add(report)
            progress.update(task, completed=whole.requests)
    minutes = (time.monotonic() - began) / 60
    print(f"{whole.requests:,} requests in {whole.runs:,} clusters, {minutes:.1f} minutes")
    print(
        f"{whole.runs / minutes:,.0f} seeds and {whole.requests / minutes:,.0f} requests a minute"
    )
    for what, count in sorted(whole.counts.items()):
        print(f"  {count:>10,} {what}")
    for line in whole.wrong[:20]:
        print(f"WRONG {line}")
    print("no violation" if not whole.wrong else f"{len(whole.wrong)} violations")
    return 1 if whole.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
