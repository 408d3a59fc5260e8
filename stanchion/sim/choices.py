"""Every choice that a simulated run leaves open is one `pick`.

So a run is the list of its picks: try all of them, draw them from a seed, or replay one list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Choices:
    given: list[int] = field(default_factory=list)
    rest: Callable[[int], int] = lambda options: 0
    taken: list[tuple[int, int]] = field(default_factory=list)  # (pick, options)

    def pick(self, options: int) -> int:
        """A whole number from 0 to options - 1."""
        assert options > 0
        at = len(self.taken)
        pick = self.given[at] if at < len(self.given) else self.rest(options)
        assert 0 <= pick < options, "this list of picks is from another scenario"
        self.taken.append((pick, options))
        return pick


def seeded(seed: int) -> Choices:
    return Choices(rest=random.Random(seed).randrange)


def every(limit: int) -> Iterator[Choices]:
    """Yield one Choices per possible run. Use each to the end before asking for the next."""
    given: list[int] | None = []
    for _ in range(limit):
        if given is None:
            return
        yield (choices := Choices(given))
        given = _next(choices.taken)
    raise AssertionError(f"more than {limit} runs: make the scenario smaller")


def _next(taken: list[tuple[int, int]]) -> list[int] | None:
    for at in reversed(range(len(taken))):
        pick, options = taken[at]
        if pick + 1 < options:
            return [earlier for earlier, _ in taken[:at]] + [pick + 1]
    return None
