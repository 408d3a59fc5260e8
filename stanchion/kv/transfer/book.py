"""Which writes of one source are open, in the order in which they were submitted. No I/O here.

Any backend's engine-thread side: what makes it a device queue, and each write end exactly once.
What a backend has to do for a write is `work`, which the book keeps until it may begin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from stanchion.core.errors import Bug
from stanchion.device.stream import Mark, Queue
from stanchion.kv.transfer.words import WriteEnded

T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    mark: Mark
    peer: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Held(Generic[T]):
    """A write that may not begin before others have done their work."""

    number: int
    work: T
    after: tuple[tuple[Queue, Mark], ...]


class Book(Generic[T]):
    def __init__(self) -> None:
        self.submitted: Mark = 0
        self.bytes_sent = 0
        self._open: dict[int, Opened] = {}  # by number, in order of submission
        self._marks: dict[Mark, None] = {}  # of those
        self._ended: list[WriteEnded] = []
        self._after: list[tuple[Queue, Mark]] = []
        self._held: deque[Held[T]] = deque()

    def wait(self, other: Queue, mark: Mark) -> None:
        """Writes submitted from now on begin after that."""
        if not other.passed(mark):
            self._after.append((other, mark))

    def open(self, number: int, peer: int, size: int, work: T) -> None:
        if number in self._open:
            raise Bug(f"write {number} was submitted twice")
        self._open[number] = Opened(self.submitted, peer, size)
        self._marks[self.submitted] = None
        self.submitted += 1
        self._held.append(Held(number, work, tuple(self._after)))

    def ready(self) -> list[T]:
        """Those that may begin now. They begin in the order in which they were submitted."""
        self._after = [(queue, mark) for queue, mark in self._after if not queue.passed(mark)]
        said = []
        while self._held and all(queue.passed(mark) for queue, mark in self._held[0].after):
            said.append(self._held.popleft().work)
        return said

    def withdraw(self, number: int) -> bool:
        """Is it held back here, and so has not begun? Then it never will."""
        for held in self._held:
            if held.number == number:
                self._held.remove(held)
                return True
        return False

    def end(self, ended: WriteEnded) -> None:
        if ended.number not in self._open:
            raise Bug(f"write {ended.number} ended, but is not open")
        opened = self._open.pop(ended.number)
        del self._marks[opened.mark]
        self.bytes_sent += opened.bytes if ended.whole else 0
        self._ended.append(ended)

    def take(self) -> list[WriteEnded]:
        """What has ended since, each once."""
        said, self._ended = self._ended, []
        return said

    def passed(self, mark: Mark) -> bool:
        """Has the last write before that mark ended? Writes end in any order: an older one that is
        slow must not make pages seem to be read that nobody reads."""
        return mark - 1 not in self._marks

    def check_none_open(self, peer: int) -> None:
        numbers = [number for number, opened in self._open.items() if opened.peer == peer]
        if numbers:
            raise Bug(f"peer {peer} was disconnected while writes to it are open: {numbers}")
