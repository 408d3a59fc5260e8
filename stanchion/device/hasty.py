"""A stream that forgets to wait at some doors, as engines have done. For the lab alone.

It reads what is behind the doors named at once, whether it is there yet or not. All its other doors
are as they should be.
"""

from __future__ import annotations

from typing import TypeVar

from stanchion.device.stream import Access, Guarded, Opened, Pages, Passage, Queue, Stream

T = TypeVar("T")


class Hasty(Stream):
    """`blind`: the names of the values that are read without waiting."""

    def __init__(self, name: str, queue: Queue, blind: frozenset[str]) -> None:
        super().__init__(name, queue)
        self._blind = blind

    def reading(self, value: Guarded[T], pages: Pages) -> Passage[T]:
        if value.name not in self._blind:
            return super().reading(value, pages)
        return Passage(value, Opened(_NeverWaits(self.name, self.queue), pages, writes=False))


class _NeverWaits(Stream):
    def follow(self, accesses: list[Access], pages: Pages) -> None:
        return
