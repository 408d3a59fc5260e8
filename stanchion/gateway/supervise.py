"""What the gateway and whoever keeps the workers' processes need of each other.

The gateway knows workers by what they say; a supervisor knows them as processes. It is handed the
fleet as `Watched`, runs inside the gateway's loop, and is left after the gateway has drained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from stanchion.core.messages import Hello, Suspected
from stanchion.gateway.members import Connect


class Watched(Protocol):
    on_suspected: Callable[[Suspected], None]

    @property
    def join(self) -> str:
        """Where workers join."""

    @property
    def draining(self) -> bool:
        """No worker that ends now needs a successor."""

    def expect(self, names: Sequence[str]) -> None:
        """The gateway has started once all of these have joined."""

    def seat(self, hello: Hello, connect: Connect) -> list[str]:
        """Take in a server that does not join by itself, in place of its life before. Why not, if
        it does not fit."""

    def who_is(self, name: str) -> Hello | None:
        """The life of that name that joined last, unless it is known to have ended."""

    def heard_at(self, name: str) -> float:
        """When it last said anything of itself, by the loop's clock."""

    def ended(self, name: str, pid: int, why: str) -> None:
        """That process is gone."""

    def give_up(self, why: str) -> None:
        """There will be no more workers: the gateway is to stop."""


Supervise = Callable[[Watched], AbstractAsyncContextManager[object]]
