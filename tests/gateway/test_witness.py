"""The second witness: where logged and cold scores part; what witnesses and retries may cost."""

from __future__ import annotations

import math
import random

import pytest

from stanchion.gateway.monitor.budget import Allowance, DraftFaults, RetryBudget
from stanchion.gateway.monitor.witness import (
    Clean,
    Confirmed,
    Scale,
    Unwitnessed,
    calibrate,
    gap,
    judge,
)

RNG = random.Random(3)
COLD = [-RNG.expovariate(1.0) for _ in range(400)]


def noisy(sigma: float, seed: int, onset: int | None = None, shift: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [
        one + rng.gauss(0.0, sigma) - (shift if onset is not None and at >= onset else 0.0)
        for at, one in enumerate(COLD)
    ]


@pytest.mark.parametrize("sigma", [0.0, 0.02, 0.05])
def test_clean_runs_are_clean_on_machines_of_any_noise(sigma: float) -> None:
    runs = [[gap(a, b) for a, b in zip(noisy(sigma, seed), COLD)] for seed in range(50)]
    scale = calibrate(runs)
    assert scale.runs == 50
    assert all(judge(noisy(sigma, 100 + seed), COLD, scale) == Clean() for seed in range(100))


@pytest.mark.parametrize("sigma", [0.0, 0.05])
@pytest.mark.parametrize("onset", [0, 1, 150, 390])
def test_the_onset_is_where_they_part(sigma: float, onset: int) -> None:
    runs = [[gap(a, b) for a, b in zip(noisy(sigma, seed), COLD)] for seed in range(50)]
    said = judge(noisy(sigma, 999, onset), COLD, calibrate(runs))
    assert isinstance(said, Confirmed)
    # Noise just before the damage may join its excursion: the onset is then a little early, and
    # only a clean token is made again.
    assert onset - (3 if sigma else 0) <= said.onset <= onset


def test_a_verdict_that_looks_at_the_mean_alone_is_caught() -> None:
    """The wrong variant: damage at the end of a long answer drowns in its mean."""
    logged = noisy(0.02, 1, 390)
    mean = sum(gap(a, b) for a, b in zip(logged, COLD)) / len(COLD)
    assert mean < 0.1 == Scale().drift
    assert isinstance(judge(logged, COLD, Scale()), Confirmed)


def test_no_verdict_without_scores_of_every_token() -> None:
    assert judge([-1.0] * 3, [-1.0] * 2, Scale()) == Unwitnessed("2 scores for 3 tokens")
    assert isinstance(judge([-1.0], [math.nan], Scale()), Unwitnessed)


def test_infinities_and_what_is_no_number() -> None:
    assert gap(-math.inf, -math.inf) == 0.0
    assert gap(-1.0, -math.inf) == gap(math.nan, -1.0) == 4.0
    assert judge([math.nan], [-1.0], Scale()) == Confirmed(0, "3.9 nats apart over 1 tokens")


def test_the_allowance_is_of_a_sliding_minute() -> None:
    allowance = Allowance(100)
    assert allowance.take(60, 0.0) and allowance.take(40, 30.0)
    assert not allowance.take(1, 59.0)
    assert allowance.take(60, 61.0) and not allowance.take(1, 62.0)
    assert not Allowance(0).take(1, 0.0)


def _storm(budget: RetryBudget, requests: int, tenants: int) -> tuple[int, dict[str, int]]:
    """Every request wants a retry, and every retry another: who gets one?"""
    got: dict[str, int] = {}
    for at in range(requests):
        tenant = f"tenant {at % tenants}"
        budget.request(tenant, at / 100)
        for _ in range(2):
            got[tenant] = got.get(tenant, 0) + budget.retry(tenant, at / 100)
    return sum(got.values()), got


def test_attempts_are_at_most_a_tenth_more_than_requests() -> None:
    requests = 3000
    total, of = _storm(RetryBudget(0.1, 0), requests, 3)
    assert requests * 0.09 < total <= requests * 0.1
    assert all(count <= requests / 3 * 0.1 for count in of.values())


def test_little_traffic_has_some_retries_and_a_flood_no_more() -> None:
    total, _ = _storm(RetryBudget(0.1, 10), 5, 1)
    assert total == 10
    total, _ = _storm(RetryBudget(0.1, 10), 1000, 1)
    assert total <= 1000 * 0.1 + 10


def test_one_tenants_faults_do_not_spend_what_is_anothers() -> None:
    budget = RetryBudget(0.5, 0)
    for at in range(100):
        budget.request("loud", at / 100)
        budget.request("quiet", at / 100)
    while budget.retry("loud", 1.0):
        pass
    assert budget.retry("quiet", 1.0)


def test_a_budget_without_a_window_is_caught() -> None:
    """What was spent is given back when its minute is over, and not before."""
    budget = RetryBudget(0.1, 0)
    for _ in range(10):
        budget.request("t", 0.0)
    assert budget.retry("t", 1.0) and not budget.retry("t", 2.0)
    for _ in range(10):
        budget.request("t", 62.0)
    assert budget.retry("t", 62.0) and not budget.retry("t", 62.5)


def test_three_cleared_suspicions_in_a_row_are_a_draft_fault() -> None:
    faults, worker = DraftFaults(), ("w", 1)
    low = "low_acceptance"
    assert [faults.found(worker, low, "clean") for _ in range(4)] == [False, False, True, False]
    assert worker in faults and ("w", 2) not in faults


def test_a_confirmed_one_or_another_kind_is_none() -> None:
    faults, worker = DraftFaults(), ("w", 1)
    for finding in ("clean", "clean", "confirmed", "clean", "clean"):
        assert not faults.found(worker, "low_acceptance", finding)  # type: ignore[arg-type]
    for _ in range(5):
        assert not faults.found(worker, "loop", "clean")
        assert not faults.found(worker, "high_acceptance", "unwitnessed")
    assert worker not in faults
