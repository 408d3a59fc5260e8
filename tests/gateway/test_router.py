"""Who gets a request: permits are exact, the fewest come first, and nobody is half chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.errors import Bug
from stanchion.core.outcome import (
    Cancelled,
    Completed,
    OutputSuspect,
    Overloaded,
    PeerLost,
    Rejected,
)
from stanchion.gateway.router import Life, Route, Router, Standing, reason_to_retry

SUSPECT_S = 1.5


def standing(name: str, ready: bool = True, silent_s: float = 0.0, incarnation: int = 1):
    role = name.split("-")[0]
    return Standing((name, incarnation), role, ready, silent_s)  # type: ignore[arg-type]


def fleet(*names: str) -> list[Standing]:
    return [standing(name) for name in names]


STANDINGS = st.lists(
    st.builds(
        standing,
        st.sampled_from([f"{role}-{at}" for role in ("both", "prefill", "decode") for at in "012"]),
        st.booleans(),
        st.sampled_from([0.0, 1.4, 1.6, 99.0, float("inf")]),
    ),
    unique_by=lambda one: one.life,
    max_size=9,
)


@settings(deadline=None)
@given(st.lists(st.tuples(STANDINGS, st.booleans(), st.integers(0, 99)), max_size=40))
def test_permits_are_counted_on_every_worker_of_a_route_from_take_to_release(steps):
    router, open_routes, minted = Router(SUSPECT_S), {}, 0
    for standings, ends, which in steps:
        if ends and open_routes:
            request = sorted(open_routes)[which % len(open_routes)]
            router.release(request)
            del open_routes[request]
            with pytest.raises(Bug):
                router.release(request)
        elif (route := router.choose(standings)) is not None:
            minted += 1
            router.take(f"r{minted}", route)
            open_routes[f"r{minted}"] = route
            with pytest.raises(Bug):
                router.take(f"r{minted}", route)
        counted = Counter(life for route in open_routes.values() for life in route.lives)
        lives = {one.life for one in standings} | set(counted)
        assert {life: router.permits(life) for life in lives} == {
            life: counted[life] for life in lives
        }


def choose_well(router: Router, standings: list[Standing]) -> None:
    """The eligible alone are chosen, whole, and of them those with the fewest permits."""
    able = {one.life: one for one in standings if one.ready and one.silent_s <= SUSPECT_S}
    by_role = {
        role: [life for life, one in able.items() if one.role == role]
        for role in ("both", "prefill", "decode")
    }
    route = router.choose(standings)
    if route is None:
        assert not by_role["both"] and not (by_role["prefill"] and by_role["decode"])
        return
    assert set(route.lives) <= set(able), route
    roles = [able[life].role for life in route.lives]
    assert roles in (["both"], ["decode", "prefill"])
    for life, role in zip(route.lives, roles):
        assert router.permits(life) == min(map(router.permits, by_role[role]))


@settings(deadline=None)
@given(STANDINGS, st.lists(STANDINGS, max_size=12))
def test_only_the_eligible_are_chosen_whole_and_of_them_those_with_the_fewest(standings, before):
    router = Router(SUSPECT_S)
    for number, earlier in enumerate(before):
        if (route := router.choose(earlier)) is not None:
            router.take(str(number), route)
    choose_well(router, standings)


class TwoUnits(Router):
    """The wrong variant (D25): decode is admitted, and whether its prefill worker is there is
    found out later."""

    def choose(
        self,
        standings: Sequence[Standing],
        used: Collection[Life] = (),
        another: bool = False,
        barred: Collection[Life] = (),
    ) -> Route | None:
        return super().choose(self._believed(standings), used, another, barred)

    def able(self, standings: Sequence[Standing], barred: Collection[Life] = ()) -> bool:
        return super().able(self._believed(standings), barred)

    @staticmethod
    def _believed(standings: Sequence[Standing]) -> list[Standing]:
        return [
            replace(one, ready=True, silent_s=0.0) if one.role == "prefill" else one
            for one in standings
        ]


@pytest.mark.parametrize(("ready", "silent_s"), [(False, 0.0), (True, 99.0)])
def test_a_pair_admitted_as_two_units_is_caught(ready: bool, silent_s: float):
    router, decode = TwoUnits(SUSPECT_S), standing("decode-0")
    choose_well(router, [standing("prefill-0"), decode])
    with pytest.raises(AssertionError, match="prefill-0"):
        choose_well(router, [standing("prefill-0", ready, silent_s), decode])


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_equals_take_turns(both, prefill, decode):
    names = [f"both-{at}" for at in range(both)]
    names += [f"prefill-{at}" for at in range(prefill)] + [f"decode-{at}" for at in range(decode)]
    router, seen = Router(SUSPECT_S), Counter[Route]()
    singles, pairs = both, min(prefill, decode)
    if not singles + pairs:
        assert router.choose(fleet(*names)) is None
        return
    rounds = max(1, prefill * decode)
    for number in range(rounds * (singles + pairs)):
        route = router.choose(fleet(*names))
        assert route is not None
        router.take(str(number), route)
        router.release(str(number))
        seen[route] += 1
    expected = both + (prefill * decode if pairs else 0)
    assert len(seen) == expected, "some worker or pair never had its turn"


def test_two_pairs_at_once_share_no_worker():
    router = Router(SUSPECT_S)
    standings = fleet("prefill-0", "prefill-1", "decode-0", "decode-1")
    for round_ in range(6):
        first = router.choose(standings)
        router.take(f"{round_}a", first)
        second = router.choose(standings)
        router.take(f"{round_}b", second)
        assert not set(first.lives) & set(second.lives)
        router.release(f"{round_}a")
        router.release(f"{round_}b")


def test_a_loaded_worker_waits_for_its_turn_however_often_asked():
    router = Router(SUSPECT_S)
    router.take("long", Route(("both-0", 1)))
    for number in range(10):
        assert router.choose(fleet("both-0", "both-1")) == Route(("both-1", 1))
        router.take(str(number), Route(("both-1", 1)))
        router.release(str(number))


def test_used_workers_come_last_and_never_where_another_is_needed():
    router = Router(SUSPECT_S)
    pair = fleet("prefill-0", "decode-0")
    used = Route(("decode-0", 1), ("prefill-0", 1)).lives
    assert router.choose(pair, used) is not None
    assert router.choose(pair, used, another=True) is None
    other = router.choose([*pair, standing("decode-1")], used, another=True)
    assert other == Route(("decode-1", 1), ("prefill-0", 1))
    assert router.choose([*pair, standing("both-0")], used) == Route(("both-0", 1))
    only = router.choose(fleet("both-0"), [("both-0", 1)])
    assert only == Route(("both-0", 1))
    assert router.choose(fleet("both-0"), [("both-0", 1)], another=True) is None


@settings(deadline=None)
@given(STANDINGS, st.sets(st.integers(0, 8)))
def test_who_is_asked_whether_there_is_a_route_says_what_a_choice_would(standings, at):
    router, barred = Router(SUSPECT_S), [standings[one].life for one in at if one < len(standings)]
    chosen = router.choose(standings, barred=barred)
    assert router.able(standings, barred) is (chosen is not None)


def test_the_barred_are_out_of_question():
    router = Router(SUSPECT_S)
    assert router.choose(fleet("both-0"), barred=[("both-0", 1)]) is None


def test_a_new_life_of_a_worker_owes_nothing_of_the_old_one():
    router = Router(SUSPECT_S)
    router.take("r", Route(("both-0", 1)))
    assert router.permits(("both-0", 2)) == 0
    router.release("r")
    assert router.permits(("both-0", 1)) == 0


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Completed("stop"), None),
        (Cancelled("client"), None),
        (Cancelled("monitor"), None),
        (Cancelled("drain"), None),
        (Cancelled("stop_string"), None),
        (Cancelled("deadline"), "deadline"),
        (Rejected("prompt", "x"), None),
        (Overloaded("x", 1.0), "overloaded"),
        (PeerLost("x"), "peer_lost"),
        (OutputSuspect("x"), "output_suspect"),
    ],
)
def test_what_may_be_tried_again(ended, reason):
    assert reason_to_retry(ended) == reason
