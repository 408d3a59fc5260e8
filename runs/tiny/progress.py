"""What a step says while it works: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


def report(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Meter:
    """Knows one number, the share of the work that is done, and one line of text."""

    def __init__(self, title: str, bar: Progress | None, task: TaskID | None) -> None:
        self._title = title
        self._bar = bar
        self._task = task

    def show(self, share: float, line: str, log: bool) -> None:
        """`log` says whether a plain log gets this line too; a bar always moves."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=share, description=f"{self._title} {line}")
        elif log:
            report(f"{self._title} {share:4.0%} {line}")

    def note(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            report(line)


@contextmanager
def meter(title: str) -> Iterator[Meter]:
    if not sys.stdout.isatty():
        yield Meter(title, None, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console()) as bar:
        yield Meter(title, bar, bar.add_task(title, total=1.0))
