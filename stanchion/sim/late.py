"""A queue of a device that is as late as it may be: jobs are done when the choices say, or when
somebody stands still for them. Whoever forgets to wait finds that nothing is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stanchion.core.errors import Bug
from stanchion.device.stream import Mark, Queue
from stanchion.sim.choices import Choices


@dataclass
class LateQueue:
    """`turn` may do some of the jobs; without choices it does none."""

    choices: Choices | None = None
    jobs: deque[Callable[[], None]] = field(default_factory=deque)
    done: Mark = 0

    def submit(self, job: Callable[[], None]) -> Mark:
        self.jobs.append(job)
        return self.mark()

    def mark(self) -> Mark:
        return self.done + len(self.jobs)

    def wait(self, other: Queue, mark: Mark) -> None:
        if not other.passed(mark):
            self.submit(lambda: other.finish(mark))

    def passed(self, mark: Mark) -> bool:
        return self.done >= mark

    def finish(self, mark: Mark) -> None:
        if mark > self.mark():
            raise Bug(f"mark {mark} is of work that was never submitted")
        while self.done < mark:
            self._do()

    def turn(self) -> None:
        if self.choices is not None:
            for _ in range(self.choices.pick(len(self.jobs) + 1)):
                self._do()

    def close(self) -> None:
        self.jobs.clear()

    def _do(self) -> None:
        self.jobs.popleft()()
        self.done += 1
