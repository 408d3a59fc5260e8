"""What a run will cost, before it is run: the real engine, over a device that counts its work.

Hits, evictions and chunks are the engine's own, to the page; what a flight costs is fitted to a few
measured requests. So a benchmark's outcome can be written down before its first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stanchion.core.errors import Bug
from stanchion.core.messages import Ended, Start, Tokens
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.engine.bounds import Served
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits, Piece
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.prefix import PrefixTree
from stanchion.kv.ready import Ready
from stanchion.sim.device import LAYERS, VOCABULARY, Device, Flown, Memory


@dataclass(frozen=True)
class Work:
    """`pairs`: each token with each position before it."""

    flights: int = 0
    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flights + other.flights, self.tokens + other.tokens, self.pairs + other.pairs
        )


def work_of(pieces: Sequence[Piece]) -> Work:
    """Of one flight."""
    tokens = sum(one.count for one in pieces)
    pairs = sum(one.count * one.first + one.count * (one.count + 1) // 2 for one in pieces)
    return Work(1, tokens, pairs)


@dataclass(frozen=True)
class Cost:
    flight_s: float
    token_s: float
    pair_s: float

    @classmethod
    def fitted(cls, works: Sequence[Work], seconds: Sequence[float]) -> Cost:
        """By least squares, in parts of what each took; nothing costs less than nothing."""
        rows = np.array([[one.flights, one.tokens, one.pairs] for one in works], float)
        scaled = rows / np.array(seconds)[:, None]
        kept = [0, 1, 2]
        while True:
            found = np.linalg.lstsq(scaled[:, kept], np.ones(len(rows)), rcond=None)[0]
            if (found >= 0).all():
                costs = np.zeros(3)
                costs[kept] = found
                return cls(*costs.tolist())
            kept.pop(int(np.argmin(found)))

    def seconds(self, work: Work) -> float:
        return self.flight_s * work.flights + self.token_s * work.tokens + self.pair_s * work.pairs


@dataclass
class Simulated:
    """One engine of so many pages, asked one prompt after the other."""

    pages: int
    page_tokens: int
    chunk_tokens: int
    work: Work = field(default_factory=Work)
    _asked: int = 0

    def __post_init__(self) -> None:
        pool = PagePool(self.pages)
        ready = Ready(self.pages, LAYERS - 1, LAYERS, self.page_tokens)
        device = Device(Memory(self.pages, self.page_tokens), pool, ready, lambda: False)

        def launch(pieces: Sequence[Piece], pins: list[Pin]) -> Flown:
            self.work += work_of(pieces)
            return device.launch(pieces, pins)

        served = Served("simulated", "", "", VOCABULARY, 1 << 20, ())
        limits = Limits(chunk_tokens=self.chunk_tokens, draft_tokens=0)
        tree = PrefixTree(pool, self.page_tokens)
        self._engine = Engine(served, limits, pool, tree, ready, launch)

    def ask(self, prompt: Sequence[int]) -> int:
        """Answer it with one token. Return how many of its tokens were found."""
        self._asked += 1
        sampling = Sampling(max_tokens=1, temperature=0.0)
        heard = [Start(request=f"{self._asked}", tokens=list(prompt), sampling=sampling)]
        found = 0
        while heard or self._engine.busy:
            for one in self._engine.step(heard):
                if isinstance(one, Ended) and not isinstance(one.outcome, Completed):
                    raise Bug(f"a prompt of {len(prompt)} tokens ended as {one.outcome}")
                if isinstance(one, Tokens):
                    found = one.cached_tokens
            heard = []
        return found
