"""CPU queues: the engine's own thread, and a thread that works beside it.

`InlineQueue` is the engine thread itself: work is over when the call returns, and to wait is to
stand still. `ThreadQueue` does its jobs on a thread of its own: while they copy without the
interpreter's lock, the engine computes, and what it reads too early is really not there yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from stanchion.core.errors import Bug
from stanchion.device.stream import Mark, Queue

Job = Callable[[], None]
CLOSE_S = 5.0  # a job that hangs, on a disk that does, must not keep a process from its end


class InlineQueue:
    """The caller's own thread. Its marks have always passed."""

    def mark(self) -> Mark:
        return 0

    def wait(self, other: Queue, mark: Mark) -> None:
        other.finish(mark)

    def passed(self, mark: Mark) -> bool:
        return True

    def finish(self, mark: Mark) -> None:
        return


class ThreadQueue:
    """Jobs, first in, first out, on one thread. A job that raises is a Bug for whoever waits."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._submitted: Mark = 0
        self._done: Mark = 0
        self._waiting = 0  # who stands still for a mark
        self._broken: BaseException | None = None
        self._closed = False
        # A daemon: when the engine dies of a Bug, its process must not wait for this thread.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Mark:
        with self._changed:
            if self._closed:
                raise Bug("a job for a queue that is closed")
            self._jobs.append(job)
            self._submitted += 1
            self._changed.notify_all()
            return self._submitted

    def mark(self) -> Mark:
        return self._submitted

    def wait(self, other: Queue, mark: Mark) -> None:
        if not other.passed(mark):
            self.submit(partial(other.finish, mark))

    def passed(self, mark: Mark) -> bool:
        self._check()
        return self._done >= mark

    def finish(self, mark: Mark) -> None:
        if mark > self._submitted:
            raise Bug(f"mark {mark} is of work that was never submitted")
        with self._changed:
            self._waiting += 1  # before the mark is looked at: see `_work`
            self._changed.wait_for(lambda: self._done >= mark or self._broken or self._closed)
            self._waiting -= 1
        self._check()
        if self._done < mark:
            raise Bug("a queue was closed while somebody waited for its work")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _check(self) -> None:
        if self._broken is not None:
            raise Bug(f"a job of a queue failed: {self._broken!r}") from self._broken

    def _work(self) -> None:
        """Between two jobs as little as can be: who computes meanwhile wants the interpreter."""
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
            while self._jobs and not self._closed:
                try:
                    self._jobs.popleft()()
                except BaseException as error:  # noqa: BLE001  the edge of a thread
                    with self._changed:
                        self._broken = error
                        self._changed.notify_all()
                    return
                self._done += 1  # this thread's alone; whoever began to wait before looks at it
                if self._waiting:
                    with self._changed:
                        self._changed.notify_all()
