"""Device order, stated where memory is touched.

A `Guarded` value keeps its tensors to itself. `stream.reading(value, pages)` and
`stream.writing(value, pages)` are the only doors to them, and each makes its stream wait for
whoever must come first on any of those pages:

    read  after every write to them
    write after every write to them and every read of them

So a consumer cannot forget to wait: to forget the wait is to not have the tensors. There is no
"no wait" value. A mark belongs to a run of pages, never to the whole pool, and costs nothing once
its stream has passed it. Opening a door inside a conflicting one is a Bug; a view dies with its
door.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug

T = TypeVar("T")
Mark = int  # a place in one stream's order
Pages = NDArray[np.int32]


class Queue(Protocol):
    """What a device offers: an ordered queue of work. CPU threads, CUDA and the simulator do."""

    def mark(self) -> Mark: ...
    def wait(self, other: Queue, mark: Mark) -> None: ...
    def passed(self, mark: Mark) -> bool: ...


@dataclass(frozen=True, eq=False)
class Access:
    """One stream's use of some pages, over once the stream passes `mark`."""

    stream: Stream
    pages: Pages
    mark: Mark


@dataclass(eq=False)
class Opened:
    stream: Stream
    pages: Pages
    writes: bool


class Guarded(Generic[T]):
    """A value of which each page has its own order. Only doors reach it."""

    def __init__(self, name: str, value: T) -> None:
        self.name = name
        self._value = value
        self._writes: list[Access] = []
        self._reads: list[Access] = []
        self._open: list[Opened] = []


class View(Generic[T]):
    """What a door hands out: the value, until the door closes."""

    def __init__(self, name: str, value: T) -> None:
        self._name = name
        self._held: T | None = value

    @property
    def rows(self) -> T:
        if self._held is None:
            raise Bug(f"a view of {self._name} was used after its door closed")
        return self._held

    def close(self) -> None:
        self._held = None


@dataclass(eq=False)
class Stream:
    name: str
    queue: Queue
    _followed: dict[str, Mark] = field(default_factory=dict)

    @contextmanager
    def reading(self, value: Guarded[T], pages: Pages) -> Iterator[View[T]]:
        self._follow(value._writes, pages)
        yield from self._pass(value, pages, writes=False)

    @contextmanager
    def writing(self, value: Guarded[T], pages: Pages) -> Iterator[View[T]]:
        self._follow(value._writes, pages)
        self._follow(value._reads, pages)
        yield from self._pass(value, pages, writes=True)

    def _pass(self, value: Guarded[T], pages: Pages, writes: bool) -> Iterator[View[T]]:
        opened = Opened(self, pages, writes)
        for other in value._open:
            if (writes or other.writes) and _overlap(pages, other.pages):
                raise Bug(f"a door of {value.name} was opened inside a conflicting one")
        value._open.append(opened)
        view = View(value.name, value._value)
        try:
            yield view
        finally:
            view.close()
            value._open.remove(opened)
            accesses = value._writes if writes else value._reads
            accesses[:] = [one for one in accesses if not one.stream.queue.passed(one.mark)]
            mark = self.queue.mark()
            if not self.queue.passed(mark):
                accesses.append(Access(self, pages, mark))

    def _follow(self, accesses: list[Access], pages: Pages) -> None:
        for one in accesses:
            if one.stream is self or self._followed.get(one.stream.name, -1) >= one.mark:
                continue
            if not one.stream.queue.passed(one.mark) and _overlap(pages, one.pages):
                self.queue.wait(one.stream.queue, one.mark)
                self._followed[one.stream.name] = one.mark


def _overlap(first: Pages, second: Pages) -> bool:
    return bool(np.isin(first, second).any())
