"""What rank 0 has its other ranks do besides passes: copies between their pools and host memories.

What a tier moves, it moves on every rank, each its own layers. Rank 0 alone decides, and its books
are those of all: page and slot have the same number on every rank. A copy has ended when it has
on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from stanchion.core.errors import Bug
from stanchion.engine.orders import (
    Connected,
    Copied,
    Load,
    Order,
    Report,
    Save,
    Sent,
    decode_report,
    encode,
    said,
)
from stanchion.kv.copies import Copier, Loading, Spill


class Wires(Protocol):
    """To each of the other ranks, known by number from 1 on."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def send(self, rank: int, order: bytes) -> None:
        """Raise RankLost if it hears no more."""

    def heard(self) -> list[tuple[int, bytes]]:
        """What has come since, rank by rank, each one's in order."""

    def wait(self) -> None:
        """Return when something has come. Raise RankLost."""


def _unexpected(rank: int, report: Report) -> None:
    raise Bug(f"rank {rank} reports {report}, and was not asked")


@dataclass
class Others:
    wires: Wires
    on_copied: Callable[[int, Copied], None] = _unexpected
    on_connected: Callable[[int, Connected], None] = _unexpected
    on_sent: Callable[[int, Sent], None] = _unexpected

    @property
    def ranks(self) -> Sequence[int]:
        return self.wires.ranks

    def order(self, rank: int, order: Order) -> None:
        self.wires.send(rank, encode(order))

    def order_all(self, order: Order) -> None:
        self.pass_on(encode(order))

    def pass_on(self, order: bytes) -> None:
        for rank in self.ranks:
            self.wires.send(rank, order)

    def hear(self) -> None:
        for rank, frame in self.wires.heard():
            match report := decode_report(frame):
                case Copied():
                    self.on_copied(rank, report)
                case Connected():
                    self.on_connected(rank, report)
                case Sent():
                    self.on_sent(rank, report)

    def wait(self) -> None:
        self.wires.wait()
        self.hear()


@dataclass
class RankedCopier:
    """All ranks' copiers as one. `mine` is rank 0's."""

    mine: Copier
    others: Others
    _numbers: int = 0
    _lacking: dict[int, int] = field(default_factory=dict)  # copy -> ranks that are not done
    _batches: dict[int, Sequence[Loading]] = field(default_factory=dict)
    _loads: dict[int, int] = field(default_factory=dict)  # id of the load -> copy
    _saves: dict[int, int] = field(default_factory=dict)  # id of the spill -> copy
    _left: dict[int, int] = field(default_factory=dict)  # copy -> loads of it that go on
    _here: dict[int, None] = field(default_factory=dict)  # id of what has ended on rank 0

    def __post_init__(self) -> None:
        self.others.on_copied = self._copied

    def load(self, lifts: Sequence[Loading]) -> None:
        number = self._next()
        slots = np.concatenate([one.slots for one in lifts])
        pages = np.concatenate([one.pages for one in lifts])
        self.others.order_all(Load(number, said(slots, np.int32), said(pages, np.int32)))
        self.mine.load(lifts)
        self._batches[number], self._left[number] = lifts, len(lifts)
        self._loads |= {id(one): number for one in lifts}

    def save(self, spill: Spill) -> None:
        number = self._next()
        pages, slots = said(spill.pages, np.int32), said(spill.slots, np.int32)
        self.others.order_all(Save(number, pages, slots, [one.key for one in spill.records]))
        self.mine.save(spill)
        self._saves[id(spill)] = number

    def loaded(self, lift: Loading) -> bool:
        self.others.hear()
        number = self._loads[id(lift)]
        if not self._over(id(lift), number, lambda: self.mine.loaded(lift)):
            return False
        del self._loads[id(lift)], self._here[id(lift)]
        self._left[number] -= 1
        if not self._left[number]:
            del self._left[number], self._lacking[number], self._batches[number]
        return True

    def saved(self, spill: Spill) -> bool:
        self.others.hear()
        number = self._saves[id(spill)]
        if not self._over(id(spill), number, lambda: self.mine.saved(spill)):
            return False
        del self._saves[id(spill)], self._here[id(spill)], self._lacking[number]
        return True

    def finish(self, spill: Spill) -> None:
        self.mine.finish(spill)
        while self._lacking[self._saves[id(spill)]]:
            self.others.wait()

    @property
    def open(self) -> int:
        return len(self._loads) + len(self._saves)

    def close(self) -> None:
        self.mine.close()

    def _next(self) -> int:
        self._numbers += 1
        self._lacking[self._numbers] = len(self.others.ranks)
        return self._numbers

    def _over(self, handle: int, number: int, mine: Callable[[], bool]) -> bool:
        if handle not in self._here and mine():
            self._here[handle] = None
        return handle in self._here and not self._lacking[number]

    def _copied(self, rank: int, report: Copied) -> None:
        self._lacking[report.number] -= 1
        ends = np.cumsum([len(one.pages) for one in self._batches.get(report.number, ())])
        for place in report.bad:
            at = int(np.searchsorted(ends, place, side="right"))
            lift = self._batches[report.number][at]
            lift.bad.append(place - int(ends[at] - len(lift.pages)))
