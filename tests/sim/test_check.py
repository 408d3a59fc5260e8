"""The checker and the choices, on worlds so small that their answers are plain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stanchion.sim.check import Violation, Way, check
from stanchion.sim.choices import Choices, every, seeded


def count_up(world: int) -> Iterator[Way[int]]:
    if world < 5:
        yield Way("one more", world + 1)
        yield Way("two more", world + 2)


def test_every_state_is_visited_once() -> None:
    assert check(0, count_up, lambda world: None, lambda world: world >= 5) == 7


def test_the_nearest_wrong_state_is_told_with_the_way_to_it() -> None:
    with pytest.raises(Violation) as caught:
        check(0, count_up, lambda world: "four" if world == 4 else None, lambda world: world >= 5)
    assert (caught.value.why, caught.value.trace) == ("four", ["two more", "two more"])


def test_a_loop_that_never_ends_is_found() -> None:
    """Asking again for ever is a way on, but it leads nowhere."""

    def ways(world: str) -> Iterator[Way[str]]:
        yield Way("ask", "asked")
        if world == "start":
            yield Way("answer", "answered")

    with pytest.raises(Violation, match="no way to an end is left after: ask"):
        check("start", ways, lambda world: None, lambda world: world == "answered")


def test_nobody_may_count_on_a_failure() -> None:
    def ways(world: str) -> Iterator[Way[str]]:
        if world == "start":
            yield Way("peer dies", "ended", failure=True)

    with pytest.raises(Violation, match="no way to an end is left after: nothing"):
        check("start", ways, lambda world: None, lambda world: world == "ended")


def test_a_world_that_is_too_large_says_so() -> None:
    with pytest.raises(AssertionError, match="more than 10 states"):
        check(0, lambda n: [Way("on", n + 1)], lambda n: None, lambda n: False, limit=10)


def test_every_run_is_tried_and_a_list_replays_one() -> None:
    runs = [(choices.pick(2), choices.pick(3)) for choices in every(100)]
    assert runs == [(a, b) for a in range(2) for b in range(3)]
    first, second, again = seeded(7), seeded(7), Choices([1, 2])
    assert [first.pick(10) for _ in range(5)] == [second.pick(10) for _ in range(5)]
    assert (again.pick(2), again.pick(3), again.pick(5)) == (1, 2, 0)
    with pytest.raises(AssertionError, match="another scenario"):
        Choices([3]).pick(2)
