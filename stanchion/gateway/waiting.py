"""The line of requests that wait for room, most urgent first.

Promises: the line has a bound and so has the time in it; beyond either a client gets the 429 that
it would have got without a line. Of two that wait, the one of lower priority is earlier, unless the
other came so many arrivals before it that it is its turn (`core.request.rank`): so nobody waits for
more than a stated number of those that came later. Whoever leaves is out of the line at once.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from stanchion.core.errors import Overloaded
from stanchion.core.request import rank
from stanchion.gateway.web import Call, Gone

LOOK_S = 0.1  # workers free what they have without a word to this


@dataclass(eq=False)
class Place:
    rank: int


class Line:
    """Who is first. Pure."""

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self._places: list[Place] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def full(self) -> bool:
        return len(self._places) >= self._places_max

    def enter(self, priority: int) -> Place:
        self._arrivals += 1
        place = Place(rank(self._arrivals, priority))
        insort(self._places, place, key=lambda one: one.rank)
        return place

    def first(self, place: Place) -> bool:
        return self._places[0] is place

    def leave(self, place: Place) -> None:
        self._places.remove(place)


class Waiting:
    """`longest_s` in the line, of `places_max` at most; with no places nobody waits."""

    def __init__(self, places_max: int, longest_s: float) -> None:
        self.line = Line(places_max)
        self._longest_s = longest_s
        self._news = asyncio.Event()

    def ring(self) -> None:
        """There may be room."""
        self._news.set()

    async def turn(self, call: Call, priority: int, admit: Callable[[], None]) -> None:
        """Returns once `admit` lets it in. Raise what that raises where it cannot wait, or has
        waited for too long; Gone if its client left."""
        if not len(self.line):
            refused = self._refused(admit)
            if refused is None:
                return
            if self.line.full:
                raise refused
        elif self.line.full:
            raise Overloaded(f"{len(self.line)} requests are waiting already")
        place = self.line.enter(priority)
        try:
            await _unless_gone(call, self._first(place, admit))
        finally:
            self.line.leave(place)
            self.ring()  # another one is first now

    async def _first(self, place: Place, admit: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._longest_s
        while True:
            refused = self._refused(admit) if self.line.first(place) else None
            if self.line.first(place) and refused is None:
                return
            if loop.time() >= until:
                raise refused or Overloaded(f"no room within {self._longest_s:g} s")
            await self._look_again()

    async def _look_again(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._news.wait()
        except TimeoutError:
            return
        await asyncio.sleep(0)  # all that wait hear of it
        self._news.clear()

    @staticmethod
    def _refused(admit: Callable[[], None]) -> Overloaded | None:
        try:
            admit()
        except Overloaded as error:
            return error
        return None


async def _unless_gone(call: Call, waits: Coroutine[None, None, None]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_left(call))
            await waits
            watch.cancel()
    except BaseExceptionGroup as every:
        raise every.exceptions[0] from None


async def _left(call: Call) -> None:
    await call.gone()
    raise Gone
