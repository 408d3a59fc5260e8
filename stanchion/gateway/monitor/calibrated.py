"""A sequential test of acceptance against what healthy answers of the same model show. Pure.

The baseline is a histogram: verify steps by drafts accepted. Its exponential tilts,
p_t(a) ~ p(a) e^(t a), give a distribution for every mean; healthy answers have means from `low` to
`high`. The test is Page's CUSUM of the log-likelihood ratio, once towards half of `low`, once
towards half of the rejections of `high`. Between tilts the ratio is linear in (drafts accepted,
verify steps), so counters that come in batches lose nothing but the reset at 0 inside a batch:
coarser batches can only make it slower, never falser.

False alarms: an answer is suspected in error with probability at most `FALSE_ALARM`, if its steps
are independent with a mean between `low` and `high` and there are at most `STEPS_MAX` of them. The
CUSUM passes h only if the ratio from one of its starts passes e^h, which each does with probability
at most e^-h (Ville's inequality); so h = ln(2 STEPS_MAX / FALSE_ALARM) for both sides together.
Steps of real answers depend on each other: what that comes to is for `bench monitor` to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log

from stanchion.core.messages import Spec
from stanchion.gateway.monitor.baseline import Baseline
from stanchion.gateway.monitor.report import NOTHING, gained
from stanchion.gateway.monitor.words import Kind, Suspicion

FALSE_ALARM = 1e-4
STEPS_MAX = 1 << 14
SMOOTHING = 0.5  # counted to every bin: what was not seen yet is not impossible
TILT_MAX = 60.0


@dataclass(frozen=True)
class Tilts:
    """The distributions that a histogram gives by tilting."""

    weights: tuple[float, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Tilts:
        total = sum(counts) + SMOOTHING * len(counts)
        return cls(tuple((count + SMOOTHING) / total for count in counts))

    def tilted(self, tilt: float) -> tuple[float, ...]:
        norm = self.log_norm(tilt)
        return tuple(weight * exp(tilt * at - norm) for at, weight in enumerate(self.weights))

    def log_norm(self, tilt: float) -> float:
        top = max(0.0, tilt * (len(self.weights) - 1))
        inside = sum(weight * exp(tilt * at - top) for at, weight in enumerate(self.weights))
        return top + log(inside)

    def mean(self, tilt: float) -> float:
        return sum(at * weight for at, weight in enumerate(self.tilted(tilt)))

    def tilt(self, mean: float) -> float:
        """The tilt with this mean, by halving: the mean grows with the tilt."""
        below, above = -TILT_MAX, TILT_MAX
        for _ in range(80):
            middle = (below + above) / 2
            below, above = (middle, above) if self.mean(middle) < mean else (below, middle)
        return (below + above) / 2


@dataclass(frozen=True)
class Direction:
    """log p1 / p0 of `accepted` drafts in `steps`: gain * accepted - cost * steps."""

    kind: Kind
    gain: float
    cost: float

    @classmethod
    def between(cls, kind: Kind, tilts: Tilts, healthy: float, sick: float) -> Direction:
        usual, other = tilts.tilt(healthy), tilts.tilt(sick)
        return cls(kind, other - usual, tilts.log_norm(other) - tilts.log_norm(usual))

    def ratio(self, accepted: int, steps: int) -> float:
        return self.gain * accepted - self.cost * steps


@cache
def directions(baseline: Baseline) -> tuple[Direction, ...]:
    """Where healthy answers reach an acceptance of 1 or 0, no test looks beyond."""
    tilts, most = Tilts.of(baseline.accepted), baseline.draft_tokens
    made = []
    if baseline.low > 0.0:
        made.append(Direction.between("low_acceptance", tilts, baseline.low, baseline.low / 2))
    if baseline.high < most:
        sick = most - (most - baseline.high) / 2
        made.append(Direction.between("high_acceptance", tilts, baseline.high, sick))
    return tuple(made)


def threshold(false_alarm: float = FALSE_ALARM, steps_max: int = STEPS_MAX) -> float:
    return log(2 * steps_max / false_alarm)


class Calibrated:
    """One answer's test. A side that has spoken begins again at 0."""

    def __init__(self, baseline: Baseline, threshold: float) -> None:
        self._drafts = baseline.draft_tokens
        self._threshold = threshold
        self._directions = directions(baseline)
        self._sums = [0.0] * len(self._directions)
        self._seen = NOTHING

    def push(self, spec: Spec, generated: int) -> Suspicion | None:
        """`spec`: counters after a batch; `generated`: tokens of the answer by then."""
        batch, self._seen = gained(self._seen, spec), spec
        # With fewer drafts than the baseline's, as in an answer's last step, it has nothing to say.
        if batch is None or batch.proposed != self._drafts * batch.verify_steps:
            return None
        found: Suspicion | None = None
        for at, one in enumerate(self._directions):
            value = max(0.0, self._sums[at] + one.ratio(batch.accepted, batch.verify_steps))
            if value >= self._threshold:
                said = f"log-likelihood ratio {value:.1f} against the baseline"
                found, value = Suspicion(one.kind, said, generated), 0.0
            self._sums[at] = value
        return found
