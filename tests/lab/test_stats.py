"""Statistics, held against scipy and against a table that was worked out elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference
from scipy.special import betainc

from stanchion.core.errors import ConfigError
from stanchion.lab.stats import (
    PER,
    Interval,
    Rate,
    beta_cdf,
    fisher,
    holm,
    percentile,
    summary,
    trials_needed,
)
from stanchion.lab.stats_sessions import Sessions, bootstrap, corrected, design_effect, permutation

counts = st.integers(0, 3000).flatmap(
    lambda trials: st.tuples(st.integers(0, trials), st.just(trials))
)


# ---- exact ----------------------------------------------------------------------------------

TABLE = [  # events, trials, interval per 10,000 as printed to so many digits
    (4, 10_000, 1.1, 10.2), (1, 10_000, 0.03, 5.6), (0, 10_000, 0, 3.7),
    (12, 30_000, 2.1, 7.0), (3, 30_000, 0.2, 2.9), (0, 30_000, 0, 1.2),
    (40, 100_000, 2.9, 5.5), (10, 100_000, 0.5, 1.8), (0, 100_000, 0, 0.37),
    (80, 200_000, 3.2, 5.0), (20, 200_000, 0.6, 1.5), (0, 200_000, 0, 0.18),
]  # fmt: skip


@pytest.mark.parametrize("events, trials, low, high", TABLE)
def test_intervals_are_those_of_the_published_table(
    events: int, trials: int, low: float, high: float
) -> None:
    bounds = Rate(events, trials).interval()
    for found, said in ((bounds.low, low), (bounds.high, high)):
        digits = len(str(said).partition(".")[2])
        # One end of the table was rounded twice (5.446 to 5.45 to 5.5).
        assert PER * found == pytest.approx(said, abs=0.56 * 10**-digits)


@given(counts)
@settings(max_examples=150, deadline=None)
def test_intervals_are_scipys(pair: tuple[int, int]) -> None:
    events, trials = pair
    if trials == 0:
        assert Rate(events, trials).value is None
        return
    expected = reference.binomtest(events, trials).proportion_ci(0.95, "exact")
    bounds = Rate(events, trials).interval()
    assert bounds.low == pytest.approx(expected.low, rel=1e-9, abs=1e-15)
    assert bounds.high == pytest.approx(expected.high, rel=1e-9, abs=1e-15)


@given(st.floats(0.0, 1.0), st.floats(0.5, 1e5), st.floats(0.5, 1e5))
@settings(max_examples=200, deadline=None)
def test_the_beta_function_is_scipys(x: float, a: float, b: float) -> None:
    assert beta_cdf(x, a, b) == pytest.approx(float(betainc(a, b, x)), abs=1e-9)


@given(counts, counts)
@settings(max_examples=100, deadline=None)
def test_fisher_is_scipys(one: tuple[int, int], two: tuple[int, int]) -> None:
    table = [[one[0], one[1] - one[0]], [two[0], two[1] - two[0]]]
    expected = reference.fisher_exact(table)[1]
    assert fisher(Rate(*one), Rate(*two)) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_fisher_of_a_published_fix() -> None:
    """vLLM #47324: 4.3 % garbled before and none after was told as p about 5e-41; here, a table of
    that size whose p-value scipy gives."""
    before, after = Rate(129, 3000), Rate(0, 3000)
    expected = reference.fisher_exact([[129, 2871], [0, 3000]])[1]
    assert fisher(before, after) == pytest.approx(expected, rel=1e-6)
    assert expected < 1e-38


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


SIZES = [(4, 0, 19.6), (4, 1, 43.6), (4, 2, 118), (4, 3, 549), (10, 3, 20.8), (100, 10, 1.1)]


@pytest.mark.parametrize("first, second, thousands", SIZES)
def test_sample_sizes_are_those_of_the_published_table(
    first: int, second: int, thousands: float
) -> None:
    needed = trials_needed(first / PER, second / PER) / 1000
    assert needed == pytest.approx(thousands, rel=0.01, abs=0.05)


def test_that_many_trials_have_that_power() -> None:
    """Simulated: the size for 4 % against 1 % finds the difference four times of five."""
    needed = trials_needed(0.04, 0.01)
    rng = np.random.default_rng(3)
    found = sum(
        fisher(Rate(int(a), needed), Rate(int(b), needed)) < 0.05
        for a, b in zip(rng.binomial(needed, 0.04, 400), rng.binomial(needed, 0.01, 400))
    )
    assert 0.70 < found / 400 < 0.88  # Fisher's test is a little conservative


def test_sizes_refuse_what_no_number_answers() -> None:
    with pytest.raises(ConfigError, match="tells them apart"):
        trials_needed(0.1, 0.1)
    with pytest.raises(ConfigError, match="second rate is"):
        trials_needed(0.1, 1.2)
    with pytest.raises(ConfigError, match="power is 1"):
        trials_needed(0.1, 0.2, power=1.0)
    with pytest.raises(ConfigError, match="5 events of 4"):
        Rate(5, 4)


@pytest.mark.parametrize("count", [1, 2, 10, 101])
def test_percentiles_are_numpys_default(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count).tolist()
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        expected = float(np.quantile(values, share))
        assert percentile(values, share) == pytest.approx(expected, rel=1e-12)


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) is None
    assert summary([]).mean is None and summary([]).p99 is None and summary([]).count == 0
    with pytest.raises(ConfigError, match="share is 99"):
        percentile([1.0], 99)


# ---- sessions -------------------------------------------------------------------------------


def arm(*sessions: tuple[int, int], prefix: str = "s") -> Sessions:
    return Sessions({f"{prefix}{at}": one for at, one in enumerate(sessions)})


def test_sessions_are_counted() -> None:
    told = Sessions.of([("a", True), ("a", False), ("b", False)])
    assert told.counts == {"a": (1, 2), "b": (0, 1)}
    assert told.total == Rate(1, 3)


def test_events_in_clusters_widen_the_interval() -> None:
    """The same 40 events of 2,000: in 40 sessions one each, or all in two sessions."""
    spread = arm(*[(1, 20)] * 40, *[(0, 20)] * 60)
    lumped = arm(*[(20, 20)] * 2, *[(0, 20)] * 98)
    wide, narrow = bootstrap(lumped), bootstrap(spread)
    assert wide is not None and narrow is not None
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert bootstrap(lumped) == wide  # one seed, one answer
    effects = design_effect(spread), design_effect(lumped)
    assert effects[0] is not None and effects[1] is not None
    assert effects[0] < 1.1 and effects[1] > 15


def test_a_bootstrap_of_nothing_is_nothing() -> None:
    """No event in any session: every draw would be 0, which is no interval."""
    assert bootstrap(arm((0, 20), (0, 20))) is None
    assert bootstrap(arm((3, 20))) is None
    assert design_effect(arm((0, 20), (0, 20))) is None


def test_the_bootstrap_covers() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for at in range(120):
        rates = rng.beta(0.5, 4.5, 80)  # of sessions: mean 0.1
        bounds = bootstrap(
            arm(*[(int(rng.binomial(20, one)), 20) for one in rates]), draws=400, seed=at
        )
        covered += bounds is not None and bounds.low <= 0.1 <= bounds.high
    assert covered / 120 > 0.88


def test_permutation_by_hand() -> None:
    """Two sessions, each with one event in the first arm and none in the second: of the four ways
    to swap, two are as extreme."""
    assert permutation(arm((1, 1), (1, 1)), arm((0, 1), (0, 1))) == 0.5
    assert permutation(arm((1, 2), (1, 2)), arm((1, 2), (1, 2))) == 1.0


def test_permutation_is_not_fooled_by_one_sick_session() -> None:
    """Ten events of one session: Fisher calls it a difference, sessions do not."""
    sick, well = arm((10, 20), *[(0, 20)] * 19), arm(*[(0, 20)] * 20)
    assert fisher(sick.total, well.total) < 0.01
    assert permutation(sick, well) > 0.4


def test_permutation_finds_what_is_there_and_agrees_with_the_paired_test() -> None:
    sick = arm(*[(2, 20)] * 15, *[(0, 20)] * 5)
    well = arm(*[(0, 20)] * 20)
    value = permutation(sick, well)
    # By hand: 15 sessions must all stay or all swap, of 2**15 ways; drawn, so never exactly that.
    assert value < 0.002
    assert value == permutation(sick, well)


def test_permutation_of_other_sessions_moves_them_whole() -> None:
    first, second = arm((1, 1), (1, 1), prefix="a"), arm((0, 1), (0, 1), prefix="b")
    # 4 sessions, 2 in each arm: of 6 ways, the one seen and its mirror are as extreme.
    assert permutation(first, second) == pytest.approx(2 / 6, abs=0.03)
    with pytest.raises(ConfigError, match="sessions in both arms"):
        permutation(first, Sessions({}))


def test_permutation_holds_its_level() -> None:
    rng = np.random.default_rng(11)
    low = 0
    for at in range(150):
        rates = rng.beta(0.3, 2.7, 30)
        arms = [arm(*[(int(rng.binomial(10, one)), 10) for one in rates]) for _ in range(2)]
        low += permutation(*arms, draws=400, seed=at) <= 0.05
    assert low / 150 < 0.10


# ---- detectors that err ---------------------------------------------------------------------


def test_the_correction_by_hand() -> None:
    """10 % found, with 80 % of the sick and 5 % of the healthy: (0.10 - 0.05) / 0.75."""
    told = corrected(Rate(1000, 10_000), Rate(800, 1000), Rate(50, 1000))
    assert told.value == pytest.approx(0.05 / 0.75)
    assert told.bounds.low < told.value < told.bounds.high


def test_a_detector_known_poorly_gives_a_wider_interval() -> None:
    well = corrected(Rate(1000, 10_000), Rate(800, 1000), Rate(50, 1000))
    poorly = corrected(Rate(1000, 10_000), Rate(16, 20), Rate(1, 20))

    def width(bounds: Interval) -> float:
        return bounds.high - bounds.low

    assert width(poorly.bounds) > 2 * width(well.bounds)


def test_false_alarms_can_explain_all_that_is_seen() -> None:
    told = corrected(Rate(4, 10_000), Rate(95, 100), Rate(5, 10_000))
    assert told.value == 0.0 and told.bounds.low == 0.0


def test_a_blind_detector_gives_no_rate() -> None:
    with pytest.raises(ConfigError, match="say nothing"):
        corrected(Rate(4, 100), Rate(5, 100), Rate(5, 100))
    with pytest.raises(ConfigError, match="all three"):
        corrected(Rate(4, 100), Rate(0, 0), Rate(5, 100))


def test_the_correction_covers() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for at in range(150):
        sick = rng.binomial(4000, 0.03)
        found = rng.binomial(sick, 0.8) + rng.binomial(4000 - sick, 0.02)
        told = corrected(
            Rate(int(found), 4000),
            Rate(int(rng.binomial(300, 0.8)), 300),
            Rate(int(rng.binomial(2000, 0.02)), 2000),
            draws=2000,
            seed=at,
        )
        covered += told.bounds.low <= 0.03 <= told.bounds.high
    assert covered / 150 > 0.90


def test_words_say_the_counts() -> None:
    assert Rate(4, 10_000).words() == "4.00 (1.09 to 10.24) per 10,000; 4 of 10,000"
    assert Rate(0, 0).words() == "no trials"
    assert math.isclose(Rate(1, 4).value or 0.0, 0.25)
