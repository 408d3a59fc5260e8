"""How long the engine's thread stands at doors."""

from __future__ import annotations

import time

from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Mark, Queue


class Waiting(InlineQueue):
    """The engine's thread, with a clock at its doors."""

    seconds = 0.0

    def wait(self, other: Queue, mark: Mark) -> None:
        began = time.perf_counter()
        super().wait(other, mark)
        self.seconds += time.perf_counter() - began
