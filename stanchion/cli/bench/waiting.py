"""How long the engine's thread stands at doors."""

from __future__ import annotations

import time

from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Guarded, Mark, Pages, Passage, Queue, Stream, T
from stanchion.kv.schema import DOORS, Door


class Waiting(InlineQueue):
    """The engine's thread, with a clock at its doors."""

    def __init__(self) -> None:
        self.at: Door = "attend"
        self.reset()

    def reset(self) -> None:
        self.by_door: dict[Door, float] = dict.fromkeys(DOORS, 0.0)

    @property
    def seconds(self) -> float:
        return sum(self.by_door.values())

    def wait(self, other: Queue, mark: Mark) -> None:
        began = time.perf_counter()
        super().wait(other, mark)
        self.by_door[self.at] += time.perf_counter() - began


def watch(stream: Stream) -> Waiting:
    """Put a clock at the doors that this stream reads through."""
    waiting, reading = Waiting(), stream.reading

    def watched(value: Guarded[T], pages: Pages) -> Passage[T]:
        waiting.at = next(door for door in DOORS if door in value.name)
        return reading(value, pages)

    stream.queue, stream.reading = waiting, watched  # type: ignore[method-assign]
    return waiting
