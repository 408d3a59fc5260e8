"""D01: nobody reads what is not there yet, whichever buffer comes last; and a door taken out shows.

A load is held back right before the rows of one (layer, door), and everything before it is in
place. So exactly the readers of that door would find what the page held before: poison.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stanchion.engine.tierplan import Place, TierPlan
from stanchion.kv.schema import DOORS
from stanchion.model.hashed import schema
from tests.engine.rig import solo
from tests.tiers.rig import asks, cached, prompt, push_out, run_all, still_engine, tiers_of

SCHEMA = schema(16, draft=True)
PLACES: list[Place] = [
    (layer, door) for layer in range(SCHEMA.layers) for door in DOORS if SCHEMA.behind(layer, door)
]
HOST = TierPlan(slots=800)
VISITS = 8


def later_visits_are_right(plan: TierPlan, top_k: int | None, stalls: bool = True) -> bool:
    """A prefix of 4 pages leaves the device, and comes back with another question; again and again,
    since a draft that is not as it should be shows in one pass of several alone."""
    engine, still = still_engine(plan, top_k=top_k)
    shared = prompt(1, 70)
    run_all(engine, still, [asks("first", shared)])
    right = True
    for visit in range(VISITS):
        push_out(engine, still, 3, first=10_000 + 100 * visit)
        engine.tree.evict(engine.tree.evictable)  # what came back stays longer by itself
        again = asks(f"visit {visit}", shared + prompt(2000 + visit, 9))
        heard = run_all(engine, still, [again])[again.request]
        assert cached(heard) == 64, "the host had it, and it was used"
        right = right and heard.answer == solo(again, 3, top_k).answer
    assert bool(still.made["load"].stalls) == stalls
    assert engine.audit() == []
    assert tiers_of(engine).counters.lifted == 4 * VISITS
    return right


@pytest.mark.parametrize("top_k", [None, 48])
@pytest.mark.parametrize("late", PLACES, ids=str)
def test_whatever_comes_last_is_waited_for(late: Place, top_k: int | None) -> None:
    assert later_visits_are_right(replace(HOST, delays_s={late: 0.05}), top_k)


@pytest.mark.parametrize("late", PLACES, ids=str)
def test_a_door_that_is_taken_out_is_missed_where_its_rows_are_late(late: Place) -> None:
    for removed in PLACES:
        plan = replace(
            HOST, delays_s={late: 0.05}, removed=removed, failpoints=frozenset({"door_removed"})
        )
        assert later_visits_are_right(plan, None) == (removed != late), f"{removed} taken out"


@pytest.mark.parametrize("door", DOORS)
def test_the_fault_of_the_report_is_caught(door: str) -> None:
    """Fault 2: the index doors wait for no load. And the same of the attend doors."""
    late: Place = (1, "index" if door == "index" else "attend")
    failpoint = frozenset({f"{door}_read_before_ready"})
    plan = replace(HOST, delays_s={late: 0.05}, failpoints=failpoint)
    assert not later_visits_are_right(plan, None)
    assert later_visits_are_right(replace(plan, delays_s={}), None, stalls=False), "it is a race"
