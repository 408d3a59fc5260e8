"""Work for a transfer thread, first in, first out. `take` is where a write begins."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Errand(Generic[T]):
    """One write, as a thread knows it. It begins no earlier than `due_s`."""

    number: int
    work: T
    due_s: float


class Inbox(Generic[T]):
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._errands: dict[int, Errand[T]] = {}
        self._closed = False

    def put(self, errand: Errand[T]) -> None:
        with self._changed:
            self._errands[errand.number] = errand
            self._changed.notify()

    def withdraw(self, number: int) -> bool:
        """It will not begin, if it has not."""
        with self._changed:
            return self._errands.pop(number, None) is not None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._errands.clear()
            self._changed.notify()

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed

    def take(self, wait_s: float | None) -> Errand[T] | None:
        """The next errand that is due, within `wait_s`. None: there was none, or the box closed."""
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                first = next(iter(self._errands.values()), None)
                due_s = math.inf if first is None else first.due_s
                if first is not None and due_s <= now_s:
                    return self._errands.pop(first.number)
                if until_s <= now_s:
                    return None
                soonest_s = min(until_s, due_s)
                self._changed.wait(None if soonest_s == math.inf else soonest_s - now_s)
            return None
