"""Visit every state that a small world can reach, nearest first, and ask two things of it.

* Nothing wrong is reachable: `wrong(state)` says what is wrong with a state, or None.
* From every reachable state `done` can still be reached without any further failure. "Not stuck"
  would not do: a message that is sent again for ever is a way on that leads nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

World = TypeVar("World", bound=Hashable)


@dataclass(frozen=True)
class Way(Generic[World]):
    """One thing that may happen. A failure may happen, but nobody may count on it."""

    label: str
    world: World
    failure: bool = False


class Violation(AssertionError):
    """The shortest way to a state that breaks a promise."""

    def __init__(self, why: str, trace: list[str]) -> None:
        super().__init__(f"{why} after: {', '.join(trace) or 'nothing'}")
        self.why = why
        self.trace = trace


def check(
    start: World,
    ways: Callable[[World], Iterable[Way[World]]],
    wrong: Callable[[World], str | None],
    done: Callable[[World], bool],
    limit: int = 2_000_000,
) -> int:
    """Return how many states there are. Raise the nearest Violation, if there is one."""
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    sound_from: dict[World, list[World]] = {}  # state -> states that lead to it without a failure
    ends: list[World] = []
    queue = deque([start])
    while queue:
        world = queue.popleft()
        if why := wrong(world):
            raise Violation(why, _trace(came_from, world))
        if done(world):
            ends.append(world)
        for way in ways(world):
            if not way.failure:
                sound_from.setdefault(way.world, []).append(world)
            if way.world not in came_from:
                came_from[way.world] = world, way.label
                queue.append(way.world)
        if len(came_from) > limit:
            raise AssertionError(f"more than {limit} states: make the world smaller")
    _all_can_end(came_from, sound_from, ends)
    return len(came_from)


def _all_can_end(
    came_from: dict[World, tuple[World, str] | None],
    sound_from: dict[World, list[World]],
    ends: list[World],
) -> None:
    hopeful = dict.fromkeys(ends)
    queue = deque(ends)
    while queue:
        for before in sound_from.get(queue.popleft(), ()):
            if before not in hopeful:
                hopeful[before] = None
                queue.append(before)
    for world in came_from:  # in order of distance
        if world not in hopeful:
            raise Violation("no way to an end is left", _trace(came_from, world))


def _trace(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return labels[::-1]
