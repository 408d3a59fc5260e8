"""Exact statistics of rare events: intervals, tests, sample sizes, percentiles. Pure.

A rate here is events among trials. Nothing is approximated where an exact form is affordable: the
intervals are Clopper and Pearson's, the two-by-two test is Fisher's. Trials of one session depend
on each other, which neither knows of: `stats_sessions` has what does.

The incomplete beta function is worked out here (a continued fraction, Lentz's way), since scipy is
a hundred times the size of all else that the lab needs; the tests hold it against scipy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, inf, isfinite, lgamma, log, log1p, sqrt
from statistics import NormalDist

from stanchion.core.errors import ConfigError

LEVEL = 0.95
POWER = 0.8
PER = 10_000  # rates are told per so many
PERCENTILE_METHOD = "linear between closest ranks (Hyndman and Fan's type 7)"
FRACTION_TERMS_MAX = 10_000
HALVINGS = 200
TIE = 1 + 1e-9  # tables are as likely as the one seen if they differ by rounding alone


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Rate:
    """`events` of `trials`. Without trials there is no rate: `value` is None, never 0."""

    events: int
    trials: int

    def __post_init__(self) -> None:
        if not 0 <= self.events <= self.trials:
            raise ConfigError(f"{self.events} events of {self.trials} trials is no rate")

    @property
    def value(self) -> float | None:
        return self.events / self.trials if self.trials else None

    def interval(self, level: float = LEVEL) -> Interval:
        """Clopper and Pearson's: it covers the true rate at least so often, whatever it is."""
        tail = (1 - checked_share("level", level)) / 2
        events, rest = self.events, self.trials - self.events
        low = 0.0 if events == 0 else beta_quantile(tail, events, rest + 1)
        high = 1.0 if rest == 0 else beta_quantile(1 - tail, events + 1, rest)
        return Interval(low, high)

    def words(self, level: float = LEVEL) -> str:
        if self.value is None:
            return "no trials"
        bounds = self.interval(level)
        told = f"{PER * self.value:.2f} ({PER * bounds.low:.2f} to {PER * bounds.high:.2f})"
        return f"{told} per {PER:,}; {self.events:,} of {self.trials:,}"


def checked_share(name: str, value: float) -> float:
    """Raise ConfigError unless it is strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ConfigError(f"{name} is {value}; it must be between 0 and 1")
    return value


# ---- the incomplete beta function -----------------------------------------------------------


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), a and b above 0."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    # The fraction converges fast on this side of the mean; the other side is its mirror.
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_part(1.0 - x, b, a)
    return _beta_part(x, a, b)


def _beta_part(x: float, a: float, b: float) -> float:
    front = lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)
    return exp(front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)) of DLMF 8.17.22, by Lentz's recurrence."""
    tiny = 1e-300
    value = upper = 1.0
    lower = 0.0
    for term in range(1, FRACTION_TERMS_MAX):
        half = term // 2
        if term % 2:
            step = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            step = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1.0 / (1.0 + step * lower or tiny)
        upper = 1.0 + step / upper or tiny
        value *= upper * lower
        if abs(upper * lower - 1.0) < 1e-15:
            return value
    raise ConfigError(f"the beta function of {x}, {a}, {b} did not converge")


def beta_quantile(share: float, a: float, b: float) -> float:
    """Where `beta_cdf` reaches `share`, by halving; as near as floats are."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if beta_cdf(middle, a, b) < share else (low, middle)
    return (low + high) / 2


# ---- tests ----------------------------------------------------------------------------------


def fisher(first: Rate, second: Rate) -> float:
    """Fisher's exact test, two-sided: the probability of all tables with these margins that are no
    more likely than the one seen."""
    events, trials = first.events + second.events, first.trials + second.trials
    least, most = max(0, events - second.trials), min(first.trials, events)
    base = _choices(trials, events)
    weights = [
        exp(_choices(first.trials, at) + _choices(second.trials, events - at) - base)
        for at in range(least, most + 1)
    ]
    seen = weights[first.events - least] * TIE
    return min(1.0, sum(one for one in weights if one <= seen))


def _choices(total: int, some: int) -> float:
    """The logarithm of the ways to choose some of a total."""
    return lgamma(total + 1) - lgamma(some + 1) - lgamma(total - some + 1)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values, in the order given."""
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted = [0.0] * len(values)
    highest = 0.0
    for place, at in enumerate(order):
        highest = max(highest, min(1.0, values[at] * (len(values) - place)))
        adjusted[at] = highest
    return adjusted


def trials_needed(first: float, second: float, power: float = POWER, level: float = LEVEL) -> int:
    """How many trials an arm needs for a two-sided test of two proportions to tell these rates
    apart with this power (the normal approximation with pooled variance under no difference).

    Raise ConfigError where the rates are equal or no rates.
    """
    for name, rate in (("first rate", first), ("second rate", second)):
        if not (isfinite(rate) and 0.0 <= rate <= 1.0):
            raise ConfigError(f"{name} is {rate}; it must be from 0 to 1")
    if first == second:
        raise ConfigError(f"both rates are {first}: no number of trials tells them apart")
    quantile = NormalDist().inv_cdf
    miss = quantile(checked_share("power", power))
    alarm = quantile((1 + checked_share("level", level)) / 2)
    pooled = (first + second) / 2
    spread = first * (1 - first) + second * (1 - second)
    root = alarm * sqrt(2 * pooled * (1 - pooled)) + miss * sqrt(spread)
    return ceil((root / (first - second)) ** 2)


# ---- percentiles ----------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between closest ranks; `share` from 0 to 1. None of nothing."""
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"a percentile's share is {share}; it must be from 0 to 1")
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    if ordered[below] == ordered[above] or inf in (ordered[above], -ordered[below]):
        return ordered[below] if place == below else ordered[above]
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Summary:
    """Of one set of measurements; all None of nothing."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    most: float | None


def summary(values: Sequence[float]) -> Summary:
    mean = sum(values) / len(values) if values else None
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return Summary(len(values), mean, p50, p90, p99, max(values) if values else None)
