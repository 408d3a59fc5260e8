"""What the tests of transfers share."""

from __future__ import annotations

import select
from dataclasses import dataclass

import msgspec
import numpy as np

from stanchion.device.stream import Pages, Queue
from stanchion.kv.transfer.words import (
    Invitation,
    Transfer,
    WriteEnded,
)

PATIENCE_S = 60.0


def answers(transfer: Transfer, count: int, more: bool = False) -> list[WriteEnded]:
    """The next `count` ends; no more of them come at once, unless they may."""
    said: list[WriteEnded] = []
    while len(said) < count:
        ready, _, _ = select.select([transfer.fileno()], [], [], PATIENCE_S)
        assert ready, "a write never ended"
        said += transfer.poll()
    assert len(said) == count or more
    return said


def pages(*numbers: int) -> Pages:
    return np.array(numbers, np.int32)


def replace_struct(one: Invitation, **changes: object) -> Invitation:
    return msgspec.structs.replace(one, **changes)


@dataclass
class Gate:
    """A queue that has passed what the test says, and remembers what it was made to wait for."""

    at: int = 0

    def __post_init__(self) -> None:
        self.waits: list[tuple[Queue, int]] = []

    def mark(self) -> int:
        return 1

    def wait(self, other: Queue, mark: int) -> None:
        self.waits.append((other, mark))

    def passed(self, mark: int) -> bool:
        return self.at >= mark

    def finish(self, mark: int) -> None:
        raise AssertionError("nobody waits for this queue by standing still")
