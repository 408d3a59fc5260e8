"""Each integrity mode before workers that are sick. `python runs/integrity_modes.py [--json F]`

`stanchion serve` with the embedded model, in one of two ways:

* `--way pair` (default): two prefill and two decode workers. On one decode worker, `decode-1`, the
  failpoint foreign_write puts another request's KV over that of a share of the requests, 2 in 100.
  Pages stay as damaged as they are until they are evicted or dropped, for whoever shares them.
* `--way load`: two workers that do both, a device too small for the traffic's prefixes and a host
  that has them. The failpoint makes the index doors forget to wait for a load (the report's fault
  2), and each layer's index rows are held back by a declared delay. Both workers are armed: what is
  made again comes from cold KV, and loads nothing.

Requests are streamed, greedy, some at once; an answer is right if its text is the one that the same
server gives without the failpoint.

For each mode: how many clients had a whole right text, a whole wrong text, or a typed error, how
many of those errors came behind a right prefix, what was witnessed and made again, and the time to
the first text and to the end. Rates have exact 95 % intervals (Clopper and Pearson).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from fault1 import interval
from streams import Reply, counted, replies, server

from stanchion.cli.settings import model_folder
from stanchion.core.recording import Recorded
from stanchion.lab.corpus import corpus
from stanchion.lab.formats.own import read

PREFIXES, TAILS, PREFIX_TOKENS = 12, 5, 512
LAYERS = 6  # of the embedded model, its draft layer included
SICK = "decode-1"
PAIR = ["--prefill", "2", "--decode", "2"]
LOAD = ["--both", "2"]
SMALL = ["kv.memory_gib=0.0025", "kv.host_cache_gib=0.1", "engine.running_max=4"]
COUNTED = (
    "witness_verdicts", "quality_retries", "output_anomalies", "witness_tokens", "routed",
    "quarantines", "kv_pages_dropped", "pages_quarantined", "workers_taken_out",
)  # fmt: skip


@dataclass
class Told:
    """Of one mode."""

    mode: str
    right: int = 0
    wrong: int = 0
    errors: int = 0
    errors_behind_right_text: int = 0
    first_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
    attempts: int = 0
    retries: int = 0  # a worker got a request that another had, or the same
    retries_to_the_same: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def replies(self) -> int:
        return self.right + self.wrong + self.errors

    def add(self, reply: Reply, expected: str) -> None:
        if not reply.done:
            self.errors += 1
            self.errors_behind_right_text += expected.startswith(reply.text)
            return
        self.right += reply.text == expected
        self.wrong += reply.text != expected
        self.all_s.append(reply.all_s)
        if reply.first_s is not None:
            self.first_s.append(reply.first_s)

    def add_attempts(self, recorded: Recorded) -> None:
        workers = [one.worker for one in recorded.attempts]
        self.attempts += len(workers)
        self.retries += len(workers[1:])
        self.retries_to_the_same += sum(before == after for before, after in pairwise(workers))

    def shown(self) -> dict[str, object]:
        times = {"first_s": self.first_s, "all_s": self.all_s}
        return vars(self) | {name: [round(at, 3) for at in every] for name, every in times.items()}

    def row(self) -> str:
        low, high = interval(self.wrong, max(self.replies, 1))
        cells = [
            self.mode,
            f"{self.right}",
            f"{self.wrong} of {self.replies} ({100 * low:.1f} to {100 * high:.1f} %)",
            f"{self.errors} ({self.errors_behind_right_text})",
            f"{self.retries} ({self.retries_to_the_same})",
            f"{1000 * statistics.median(self.first_s or [0.0]):.0f}",
            f"{1000 * statistics.median(self.all_s or [0.0]):.0f}",
            ", ".join(f"{name} {value:g}" for name, value in self.metrics.items() if value),
        ]
        return "| " + " | ".join(cells) + " |"


def prompts(text: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    made = []
    for _ in range(PREFIXES):
        first = int(rng.integers(len(text) - 2 * PREFIX_TOKENS))
        for tail in range(TAILS):
            more = first + PREFIX_TOKENS + 16 * tail
            made.append([*text[first : first + PREFIX_TOKENS], *text[more : more + 8 + tail]])
    return made


def settings(asked: argparse.Namespace, sick: bool) -> list[str]:
    if asked.way == "pair":
        fault, sets = f"foreign_write@{SICK}", [f"lab.foreign_share={asked.share}"]
        words = PAIR
    else:
        slow = ",".join(f"{layer}/index:{asked.delay_ms}" for layer in range(LAYERS))
        fault, sets = "index_read_before_ready", [*SMALL, f"lab.slow_load={slow}"]
        words = LOAD
    sets += [f"lab.failpoints={fault}"] if sick else []
    return words + [part for one in sets for part in ("--set", one)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="streams, in each mode")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--together", type=int, default=8, help="streams at once")
    parser.add_argument("--way", choices=("pair", "load"), default="pair")
    parser.add_argument("--share", type=float, default=0.02, help="of the requests, harmed (pair)")
    parser.add_argument(
        "--delay-ms", type=float, default=0.3, help="of each layer's index rows (load)"
    )
    parser.add_argument("--mode", action="append", help="these alone")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    every = prompts(corpus(model_folder("tiny")))
    with server("--integrity", "off", *settings(asked, sick=False)) as right_one:
        right = replies(right_one.url, every, range(len(every)), asked.together, asked.tokens)
    assert all(one.done for one in right)
    order = np.random.default_rng(9).integers(len(every), size=asked.requests).tolist()
    print(
        "| mode | right | wrong | errors (behind right text) | retries (to the same worker) |"
        " first text, ms | all, ms | |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    told = []
    for mode in asked.mode or ("off", "report", "balanced", "guarded", "strict"):
        one = Told(mode)
        with tempfile.TemporaryDirectory() as folder:
            recording = Path(folder) / "recording"
            words = ["--integrity", mode, "--record", str(recording)]
            with server(*words, *settings(asked, sick=True)) as sick:
                for reply in replies(sick.url, every, order, asked.together, asked.tokens):
                    one.add(reply, right[reply.prompt].text)
                one.metrics = counted(sick.url, COUNTED)
            for recorded in read(recording):
                one.add_attempts(recorded)
        told.append(one)
        print(one.row(), flush=True)
    if asked.json:
        rows = {"settings": vars(asked), "modes": [one.shown() for one in told]}
        Path(asked.json).write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
