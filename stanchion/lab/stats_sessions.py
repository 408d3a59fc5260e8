"""Statistics that know of sessions, and of detectors that err. Pure, seeded.

Requests of one session share a prefix, so one bad page is met by many turns: events come in
clusters, and an interval or a test that takes requests for independent is too sure of itself. Here
a session is drawn, or changes sides, as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import ConfigError
from stanchion.lab.stats import LEVEL, Interval, Rate, checked_share

DRAWS = 10_000
DRAWS_AT_ONCE = 256
EXACT_SESSIONS_MAX = 12  # pairs: 4,096 ways to swap them are all tried
SEED = 7
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Sessions:
    """(events, trials) by session. `total` forgets whose they were."""

    counts: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, outcomes: Iterable[tuple[str, bool]]) -> Sessions:
        """From (session, was it an event?) of each trial."""
        counts: dict[str, tuple[int, int]] = {}
        for session, event in outcomes:
            events, trials = counts.get(session, (0, 0))
            counts[session] = events + event, trials + 1
        return cls(counts)

    @property
    def total(self) -> Rate:
        values = self.counts.values()
        return Rate(sum(one for one, _ in values), sum(two for _, two in values))

    def table(self, names: Iterable[str]) -> tuple[Counts, Counts]:
        """Events and trials in this order of sessions."""
        rows = [self.counts[name] for name in names]
        both = np.array(rows, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


def bootstrap(
    sessions: Sessions, level: float = LEVEL, draws: int = DRAWS, seed: int = SEED
) -> Interval | None:
    """The percentile interval of the rate when sessions are drawn with replacement.

    None where it says nothing: fewer than two sessions, or no event (or nothing but events), where
    every draw is alike. The exact interval stands in those cases.
    """
    tail = (1 - checked_share("level", level)) / 2
    rate = sessions.total
    if len(sessions.counts) < 2 or rate.events in (0, rate.trials):
        return None
    events, trials = sessions.table(sorted(sessions.counts))
    rng = np.random.default_rng(seed)
    rates = []
    for first in range(0, draws, DRAWS_AT_ONCE):
        size = (min(DRAWS_AT_ONCE, draws - first), len(events))
        picks = rng.integers(len(events), size=size)
        rates.append(events[picks].sum(1) / trials[picks].sum(1))
    low, high = np.quantile(np.concatenate(rates), (tail, 1 - tail))
    return Interval(float(low), float(high))


def permutation(first: Sessions, second: Sessions, draws: int = DRAWS, seed: int = SEED) -> float:
    """Two-sided p-value of "the arm makes no difference", for the difference of rates.

    Where both arms replayed the same sessions, the two runs of a session are swapped (a paired
    test; all ways to do so if there are few). Otherwise sessions change arms as a whole. With draws
    the p-value is (1 + as extreme) / (1 + draws): never 0, and valid as it is.
    """
    if not first.counts or not second.counts:
        raise ConfigError("a permutation test wants sessions in both arms")
    if first.counts.keys() == second.counts.keys():
        return _paired(first, second, draws, seed)
    return _unpaired(first, second, draws, seed)


def _paired(first: Sessions, second: Sessions, draws: int, seed: int) -> float:
    names = sorted(first.counts)
    (events_a, trials_a), (events_b, trials_b) = first.table(names), second.table(names)
    seen = abs(_difference(events_a.sum(), trials_a.sum(), events_b.sum(), trials_b.sum()))
    # Sessions whose two runs are alike change nothing when they are swapped.
    mixed = (events_a != events_b) | (trials_a != trials_b)
    exact = int(mixed.sum()) <= EXACT_SESSIONS_MAX
    extreme = total = 0
    for swapped in _swaps(int(mixed.sum()), draws, seed, exact):
        events = swapped @ (events_b - events_a)[mixed]
        trials = swapped @ (trials_b - trials_a)[mixed]
        after = _difference(
            events_a.sum() + events, trials_a.sum() + trials,
            events_b.sum() - events, trials_b.sum() - trials,
        )  # fmt: skip
        extreme += int((np.abs(after) >= seen - 1e-12).sum())
        total += len(swapped)
    return extreme / total if exact else (1 + extreme) / (1 + total)


def _swaps(sessions: int, draws: int, seed: int, exact: bool) -> Iterable[Counts]:
    """Rows of 0 and 1: who is swapped."""
    if exact:
        ways = np.arange(2**sessions, dtype=np.int64)[:, None]
        yield (ways >> np.arange(sessions)) & 1
        return
    rng = np.random.default_rng(seed)
    for first in range(0, draws, DRAWS_AT_ONCE):
        yield rng.integers(2, size=(min(DRAWS_AT_ONCE, draws - first), sessions))


def _unpaired(first: Sessions, second: Sessions, draws: int, seed: int) -> float:
    (events_a, trials_a), (events_b, trials_b) = (
        one.table(sorted(one.counts)) for one in (first, second)
    )
    seen = abs(_difference(events_a.sum(), trials_a.sum(), events_b.sum(), trials_b.sum()))
    events = np.concatenate([events_a, events_b])
    trials = np.concatenate([trials_a, trials_b])
    rng = np.random.default_rng(seed)
    extreme = 0
    for _ in range(draws):
        here = rng.permutation(len(events))[: len(events_a)]
        mine, of = events[here].sum(), trials[here].sum()
        after = _difference(mine, of, events.sum() - mine, trials.sum() - of)
        extreme += int(abs(after) >= seen - 1e-12)
    return (1 + extreme) / (1 + draws)


def _difference(
    events: NDArray[np.float64] | Counts | np.int64,
    trials: Counts | np.int64,
    others: Counts | np.int64,
    of: Counts | np.int64,
) -> NDArray[np.float64]:
    """Of two rates; a side without trials has none, and counts as 0."""
    return np.asarray(events / np.maximum(trials, 1) - others / np.maximum(of, 1), np.float64)


def design_effect(sessions: Sessions) -> float | None:
    """By how much sessions widen the variance of the rate: what a number of requests, worked out
    for independent ones, is to be multiplied by. None where there is nothing to see."""
    rate = sessions.total
    if rate.value is None or rate.events in (0, rate.trials) or len(sessions.counts) < 2:
        return None
    events, trials = sessions.table(sorted(sessions.counts))
    count = len(events)
    residuals = events - rate.value * trials
    clustered = float((residuals**2).sum()) * count / (count - 1) / rate.trials**2
    independent = rate.value * (1 - rate.value) / rate.trials
    return clustered / independent


# ---- detectors that err ---------------------------------------------------------------------


@dataclass(frozen=True)
class Corrected:
    """`value` and `bounds` are of the true rate. `low` below 0 was cut to 0, above 1 to 1."""

    value: float
    bounds: Interval


def corrected(
    observed: Rate,
    true_positives: Rate,
    false_positives: Rate,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = SEED,
) -> Corrected:
    """Rogan and Gladen's estimate, (observed - FPR) / (TPR - FPR), with what is not known of all
    three carried along: each is drawn from its Jeffreys posterior, and the interval is of the
    estimates that come of it.

    `true_positives`: found among those known to be sick (faults put in on purpose);
    `false_positives`: found among those known to be healthy. Raise ConfigError where the detector
    finds no more among the sick than among the healthy: then nothing can be said.
    """
    tail = (1 - checked_share("level", level)) / 2
    seen, recall, alarm = observed.value, true_positives.value, false_positives.value
    if seen is None or recall is None or alarm is None:
        raise ConfigError("a correction wants trials of all three rates")
    if recall <= alarm:
        raise ConfigError(
            f"the detector finds {recall:.4f} of the sick and {alarm:.4f} of the healthy: "
            "its counts say nothing of how many are sick"
        )
    rng = np.random.default_rng(seed)
    drawn = [
        rng.beta(one.events + 0.5, one.trials - one.events + 0.5, draws)
        for one in (observed, true_positives, false_positives)
    ]
    gap = drawn[1] - drawn[2]
    # Where the draws themselves cannot tell sick from healthy, any rate is possible.
    estimates = np.where(gap > 0, (drawn[0] - drawn[2]) / np.where(gap > 0, gap, 1.0), np.nan)
    low = float(np.quantile(np.where(np.isnan(estimates), 0.0, estimates), tail))
    high = float(np.quantile(np.where(np.isnan(estimates), 1.0, estimates), 1 - tail))
    value = (seen - alarm) / (recall - alarm)
    return Corrected(_share(value), Interval(_share(low), _share(high)))


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
