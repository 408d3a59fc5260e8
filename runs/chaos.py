"""Workers that are killed, stopped and slowed while clients stream. `python runs/chaos.py`

`stanchion serve` with the embedded model, as `--way pair` (two prefill and two decode workers) or
`--way both` (three that do both). Every few seconds one worker, by turns:

* is killed (SIGKILL);
* is stopped (SIGSTOP) and never goes on by itself: the supervisor has to find out;
* is slow: it is stopped and goes on, 50 ms each, for two seconds.

One client in eight leaves at a moment of its stream. What must hold, and is counted:

* each stream that its client did not leave has one ending: [DONE], or one error that is typed;
* a whole text is the one that an undisturbed server gives, any other is a beginning of it;
* a whole answer says one finish reason and its usage once, with the tokens that it has;
* of each attempt that its worker ended, the worker counts as many tokens as the gateway;
* when all is over nothing is in flight, and the server drains and ends with 0.

Exits with 1 if one of these does not hold. The troubles' moments are drawn from `--seed`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fault1 import interval
from integrity_modes import prompts
from streams import Reply, Stay, counted, replies, server

from stanchion.cli.settings import model_folder
from stanchion.lab.corpus import corpus

WAYS = {"pair": ["--prefill", "2", "--decode", "2"], "both": ["--both", "3"]}
KINDS = ("kill", "stop", "slow")
WORKER = b"stanchion.cli.worker"
SLOW_S, BURST_S = 2.0, 0.05
COUNTED = (
    "miscounted_attempts", "attempt_tokens", "requests_in_flight", "worker_lost",
    "unknown_messages", "retries", "requests_ended",
)  # fmt: skip


def workers_of(pid: int) -> list[int]:
    """The worker processes that this server has started, by its kernel's word."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            try:
                if WORKER in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
            except FileNotFoundError:
                pass  # it has just ended
    return sorted(found)


@dataclass
class Troubles:
    """From `begin` until `end`, every `every_s` seconds on average."""

    pid: int
    every_s: float
    chance: random.Random
    made: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Troubles:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self.over.wait(self.chance.uniform(0.5, 1.5) * self.every_s):
            alive = workers_of(self.pid)
            if not alive:
                continue
            kind, worker = KINDS[number % len(KINDS)], self.chance.choice(alive)
            number += 1
            try:
                self._one(kind, worker)
            except ProcessLookupError:
                continue  # it was ended meanwhile, by its supervisor
            self.made[kind] += 1

    def _one(self, kind: str, worker: int) -> None:
        if kind != "slow":
            os.kill(worker, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            return
        until = time.monotonic() + SLOW_S
        while time.monotonic() < until:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(worker, number)
                self.over.wait(BURST_S)


@dataclass
class Found:
    whole: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    left: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, reply: Reply, expected: str, tokens: int) -> None:
        if not expected.startswith(reply.text):
            self.wrong.append(f"prompt {reply.prompt}: text is not a beginning of the right one")
        if reply.left:
            self.left += 1
            return
        if len(reply.endings) != 1:
            self.wrong.append(f"prompt {reply.prompt}: its endings are {reply.endings}")
        elif not reply.done:
            self.errors[reply.endings[0]] += 1
        else:
            self.whole += 1
            counts = [one["completion_tokens"] for one in reply.usages]
            if reply.text != expected:
                self.wrong.append(f"prompt {reply.prompt}: [DONE] behind a part of the text")
            if reply.finishes != 1 or counts != [tokens]:
                self.wrong.append(f"prompt {reply.prompt}: finished {reply.finishes}, {counts}")


def leaves(chance: random.Random, characters: int) -> Stay:
    """One in eight does, somewhere within its text."""
    most = chance.randrange(characters) if chance.randrange(8) == 0 else None
    return lambda reply: most is None or len(reply.text) <= most


def settled(url: str) -> dict[str, float]:
    """The metrics, as soon as nothing is in flight, or after a minute."""
    until = time.monotonic() + 60
    while True:
        metrics = counted(url, COUNTED)
        held = sum(value for name, value in metrics.items() if name.startswith("requests_in_fl"))
        if not held or time.monotonic() > until:
            return metrics
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--together", type=int, default=16, help="streams at once")
    parser.add_argument("--way", choices=WAYS, default="pair")
    parser.add_argument("--every-s", type=float, default=6.0, help="between troubles, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    every = prompts(corpus(model_folder("tiny")))
    words = [*WAYS[asked.way], "--set", "cluster.restarts_max=1000"]
    with server(*words) as calm:
        right = replies(calm.url, every, range(len(every)), asked.together, asked.tokens)
    assert all(one.done for one in right)
    texts = [one.text for one in right]
    chance = random.Random(asked.seed)
    order = np.random.default_rng(asked.seed).integers(len(every), size=asked.requests).tolist()
    stays = [leaves(chance, len(texts[at])) for at in order]
    found = Found()
    with server(*words) as tried:
        began = time.monotonic()
        with Troubles(tried.pid, asked.every_s, chance) as troubles:
            for reply in replies(
                tried.url, every, order, asked.together, asked.tokens, stays.__getitem__
            ):
                found.add(reply, texts[reply.prompt], asked.tokens)
        seconds = time.monotonic() - began
        metrics = settled(tried.url)
    for name, value in metrics.items():
        if value and name.startswith(("miscounted_attempts", "requests_in_flight")):
            found.wrong.append(f"{name} is {value:g}")
    low, high = interval(len(found.wrong), asked.requests)
    errors = ", ".join(f"{count} {code}" for code, count in sorted(found.errors.items()))
    print(f"{asked.requests} streams in {seconds:.0f} s; {dict(troubles.made)}")
    print(f"{found.whole} whole, {found.left} left by their client, errors: {errors or 'none'}")
    print(f"{len(found.wrong)} things wrong ({1e4 * low:.1f} to {1e4 * high:.1f} per 10,000)")
    print(", ".join(f"{name} {value:g}" for name, value in metrics.items() if value))
    for line in found.wrong[:20]:
        print(f"WRONG  {line}")
    if asked.json:
        told = {
            "settings": vars(asked), "seconds": seconds, "troubles": troubles.made,
            "whole": found.whole, "left": found.left, "errors": found.errors,
            "wrong": found.wrong, "metrics": metrics,
        }  # fmt: skip
        Path(asked.json).write_text(json.dumps(told, indent=1) + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
