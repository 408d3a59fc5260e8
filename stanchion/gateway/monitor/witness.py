"""The second witness: the log-probabilities an answer was logged with, beside those that another
worker gives the same tokens from cold KV. Pure.

Where the KV was right the two agree to rounding; where it was damaged they part, and the place
where they part is the onset. The statistic is a CUSUM of |logged - cold| less a drift; the onset is
where the excursion that passed the threshold began, so all before it is what a clean run allows.

A fluent answer to somebody else's prompt has fine log-probabilities of its own: they were logged
under the wrong context and differ here. That is what a look at acceptance or text cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

GAP_MAX = 4.0  # one token alone counts for no more: a near tie of a noisy machine is no proof
FLOOR = 1e-4  # drift where clean runs show no difference at all


@dataclass(frozen=True)
class Scale:
    """In nats. `drift` a token is what a clean run may differ by on average, `threshold` what it
    may add up to beyond that. `runs`: clean runs that it was learnt from; 0: nobody measured."""

    drift: float = 0.1
    threshold: float = 2.0
    runs: int = 0


@dataclass(frozen=True)
class Clean:
    pass


@dataclass(frozen=True)
class Confirmed:
    """Token number `onset` of the answer is the first that is not clean; those before it are."""

    onset: int
    evidence: str


@dataclass(frozen=True)
class Unwitnessed:
    """Nobody looked, or nobody could: never the same as clean."""

    why: str


Verdict = Clean | Confirmed | Unwitnessed


def judge(logged: Sequence[float], cold: Sequence[float], scale: Scale) -> Verdict:
    """Of one answer, token by token. The two must be of the same length."""
    if len(logged) != len(cold):
        return Unwitnessed(f"{len(cold)} scores for {len(logged)} tokens")
    total, onset = 0.0, 0
    for at, (was, now) in enumerate(zip(logged, cold)):
        if isnan(now):
            return Unwitnessed("a cold score is no number")
        total = max(0.0, total + gap(was, now) - scale.drift)
        if total == 0.0:
            onset = at + 1
        if total > scale.threshold:
            said = f"{total:.3g} nats apart over {at + 1 - onset} tokens"
            return Confirmed(onset, said)
    return Clean()


def gap(logged: float, cold: float) -> float:
    """Equal infinities do not differ; a logged score that is no number differs from all."""
    return 0.0 if logged == cold else min(GAP_MAX, _distance(logged, cold))


def _distance(logged: float, cold: float) -> float:
    return GAP_MAX if isnan(logged) else abs(logged - cold)


def calibrate(runs: Sequence[Sequence[float]]) -> Scale:
    """From the gaps of clean runs: a drift of twice their mean, and a threshold of twice the most
    that any run adds up to beyond it. A new clean run passes that with a probability of at most
    1 / (runs + 1), if it is of their kind, and twice leaves room besides."""
    gaps = [one for run in runs for one in run]
    drift = max(FLOOR, 2 * sum(gaps) / max(len(gaps), 1))
    most = max((_highest(run, drift) for run in runs), default=0.0)
    return Scale(drift, max(10 * drift, 2 * most), len(runs))


def _highest(gaps: Sequence[float], drift: float) -> float:
    total = highest = 0.0
    for one in gaps:
        total = max(0.0, total + one - drift)
        highest = max(highest, total)
    return highest
