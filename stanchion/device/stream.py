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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug

T = TypeVar("T")
U = TypeVar("U")
Mark = int  # a place in one stream's order
Pages = NDArray[np.int32]
CROWD = 8


class Queue(Protocol):
    """What a device offers: a queue of work. CPU threads, CUDA, transfers and the simulator do."""

    def mark(self) -> Mark: ...

    def wait(self, other: Queue, mark: Mark) -> None:
        """What comes next here begins after all that `other` was given before `mark`."""

    def passed(self, mark: Mark) -> bool:
        """Is what was begun right before `mark` over? Where work may end in any order, that says
        nothing of what was begun earlier."""

    def finish(self, mark: Mark) -> None:
        """Return when `mark` has passed. A Bug where whoever calls could wait for ever."""


class JobQueue(Queue, Protocol):
    """A queue to which Python gives its work, job by job, each begun when the last has ended."""

    def submit(self, job: Callable[[], None]) -> Mark:
        """Returns at once, with the mark that passes when the job is over."""

    def close(self) -> None:
        """What has not begun never does; what has begun ends first."""


@dataclass(frozen=True, eq=False)
class Access:
    """One stream's use of some pages, over once the stream passes `mark`."""

    stream: Stream
    pages: Pages
    mark: Mark


@dataclass(eq=False, slots=True)
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
        self._crowded = CROWD  # accesses from which on it is worth to drop those that are over


class View(Generic[T]):
    """What a door hands out: the value, until the door closes."""

    __slots__ = ("_held", "_name")

    def __init__(self, name: str, value: T) -> None:
        self._name = name
        self._held: T | None = value

    @property
    def rows(self) -> T:
        if self._held is None:
            raise Bug(f"a view of {self._name} was used after its door closed")
        return self._held

    def part(self, choose: Callable[[T], U]) -> View[U]:
        """A view of some of it; whoever asked for it closes it."""
        return View(self._name, choose(self.rows))

    def close(self) -> None:
        self._held = None


class Passage(Generic[T]):
    """A door, open from `with` to its end. Steady decoding opens dozens a flight: keep it light."""

    __slots__ = ("_opened", "_value", "_view")

    def __init__(self, value: Guarded[T], opened: Opened) -> None:
        self._value = value
        self._opened = opened
        self._view = View(value.name, value._value)

    def __enter__(self) -> View[T]:
        value, opened = self._value, self._opened
        for other in value._open:
            if (opened.writes or other.writes) and _overlap(opened.pages, other.pages):
                raise Bug(f"a door of {value.name} was opened inside a conflicting one")
        opened.stream.follow(value._writes, opened.pages)
        if opened.writes:
            opened.stream.follow(value._reads, opened.pages)
        value._open.append(opened)
        return self._view

    def __exit__(self, *_: object) -> None:
        value, opened = self._value, self._opened
        self._view.close()
        value._open.remove(opened)
        accesses = value._writes if opened.writes else value._reads
        if len(accesses) >= value._crowded:
            accesses[:] = [one for one in accesses if not one.stream.queue.passed(one.mark)]
            value._crowded = 2 * len(accesses) + CROWD
        queue = opened.stream.queue
        mark = queue.mark()
        if not queue.passed(mark):
            accesses.append(Access(opened.stream, opened.pages, mark))


@dataclass(eq=False)
class Stream:
    name: str
    queue: Queue
    _followed: dict[str, Mark] = field(default_factory=dict)

    def reading(self, value: Guarded[T], pages: Pages) -> Passage[T]:
        return Passage(value, Opened(self, pages, writes=False))

    def writing(self, value: Guarded[T], pages: Pages) -> Passage[T]:
        return Passage(value, Opened(self, pages, writes=True))

    def follow(self, accesses: list[Access], pages: Pages) -> None:
        """Wait, on this stream, for what other streams still do to any of these pages."""
        for one in accesses:
            # A later mark than this one says nothing of it: there are queues that keep no order.
            if one.stream is self or self._followed.get(one.stream.name) == one.mark:
                continue
            if not one.stream.queue.passed(one.mark) and _overlap(pages, one.pages):
                self.queue.wait(one.stream.queue, one.mark)
                self._followed[one.stream.name] = one.mark


def _overlap(first: Pages, second: Pages) -> bool:
    return bool(np.isin(first, second).any())
