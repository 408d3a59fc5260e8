"""Whole simulated clusters: the right one has no bad run, and each old machine is found."""

from __future__ import annotations

import pytest

from stanchion.sim.choices import Choices, seeded
from stanchion.sim.cluster import Plan, run
from stanchion.sim.device import answer
from stanchion.sim.hunt import hunt


def test_no_run_goes_wrong() -> None:
    report = hunt(range(60))
    print(report.requests, "requests", dict(report.counts))
    assert report.wrong == []
    for met in ("Completed", "Cancelled", "PeerLost", "kills", "stops", "frames lost", "suspected"):
        assert report.counts[met] > 0, f"no {met} was met"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_runs_do_not_go_wrong() -> None:
    report = hunt(range(10_000, 12_000))
    print(report.requests, "requests", dict(report.counts))
    assert report.wrong == []


@pytest.mark.parametrize(
    "old",
    [Plan(failpoints=("release_before_drained",)), Plan(time_is_evidence=True)],
    ids=["pages released before the writes are drained", "a silent peer counts as ended"],
)
def test_an_old_machine_is_found(old: Plan) -> None:
    found = hunt(range(60), old).wrong
    print(len(found), found[:3])
    assert any("got another text than alone" in line for line in found)


def test_a_seed_or_its_picks_replay_a_run() -> None:
    plan = Plan(requests=20)
    first = run(plan, choices := seeded(5))
    picks = Choices([pick for pick, _ in choices.taken])
    for again in (run(plan, seeded(5)), run(plan, picks)):
        assert again.counts == first.counts and again.now == first.now
        assert {name: one.tokens for name, one in again.asked.items()} == {
            name: one.tokens for name, one in first.asked.items()
        }


def test_the_simulated_answer_depends_on_every_token() -> None:
    whole = answer([1, 2, 3, 4], 6)
    for place in range(4):
        changed = [1, 2, 3, 4]
        changed[place] += 1
        assert answer(changed, 6)[0] != whole[0]
