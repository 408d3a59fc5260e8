"""Is what arrived what was written? Digests of received pages, at arrival and at the end. Pure.

A page that differs is never used again and never shared, and its request ends as suspect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stanchion.disagg.check import Check, Digests, rows_of
from stanchion.engine.loop import Engine
from stanchion.engine.request import Request


@dataclass(frozen=True)
class Arrived:
    """What must still be true of a request's pages when it completes."""

    handoff: int
    writer: str
    first_page: int
    expected: Digests
    generations: tuple[int, ...]  # of the request's pages: others, once it was preempted


@dataclass
class Proofs:
    engine: Engine
    check: Check
    _arrived: dict[str, Arrived] = field(default_factory=dict)  # by request; mode full

    def verify(
        self, request: Request, handoff: int, writer: str, first_page: int, digests: bytes
    ) -> str | None:
        """Evidence that what arrived is not what was written; None if it is, or is not checked."""
        rows = rows_of(request.length, first_page, self.engine.ready.page_tokens)
        places, names = self.check.chosen(handoff, first_page, len(rows)), self.check.names()
        if len(digests) != 8 * len(names) * len(places):
            return f"{writer} gave {len(digests)} bytes of digests for {len(places)} pages"
        if not len(places):
            return None
        expected = np.frombuffer(digests, "<u8").reshape(len(names), len(places))
        generations = tuple(request.generations[first_page:].tolist())
        arrived = Arrived(handoff, writer, first_page, expected.astype(np.uint64), generations)
        if self.check.mode == "full":
            self._arrived[request.name] = arrived
        return self._compare(request, arrived, "when it arrived")

    def inspect(self, request: Request) -> str | None:
        """The same, once more, before the request may complete."""
        arrived = self._arrived.get(request.name)
        if arrived is None:
            return None
        now = request.generations[arrived.first_page :].tolist()
        if tuple(now[: len(arrived.generations)]) != arrived.generations:
            return None  # it was preempted, and has computed its rows itself since
        return self._compare(request, arrived, "at the end")

    def forget(self, name: str) -> None:
        self._arrived.pop(name, None)

    def audit(self) -> list[str]:
        return [f"{name} is to be checked and is gone" for name in self._arrived]

    def _compare(self, request: Request, arrived: Arrived, when: str) -> str | None:
        engine, first = self.engine, arrived.first_page
        rows = rows_of(request.prompt_length, first, engine.ready.page_tokens)
        places = self.check.chosen(arrived.handoff, first, len(rows))
        pages = request.pages[first + places]
        actual = self.check.of_all(pages, rows[places])
        differs = self.check.difference(places, arrived.expected, actual)
        if differs is None:
            return None
        bad = pages[(arrived.expected != actual).any(0)]
        engine.tree.forget(bad)
        engine.pool.quarantine(bad, f"handoff {arrived.handoff} of {request.name}")
        place = first + differs.place
        return (
            f"KV differs {when}: {differs.buffer} of layer {differs.layer}, "
            f"page {request.pages[place]} (prompt page {place}, generation "
            f"{request.generations[place]}), digest {differs.actual:016x} for "
            f"{differs.expected:016x}, written by {arrived.writer} in handoff {arrived.handoff}"
        )
