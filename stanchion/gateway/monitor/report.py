"""The acceptance rule of Z.ai's "Scaling Pain" report, on a request's running counters. Pure.

The report aborts a generation when its accept length stays below 1.4 and more than 128 tokens are
generated, or when its accept rate is over 0.96. `Windows` says what "stays" means: below 1.4 in two
successive windows of 64 verify steps once more than 128 tokens are generated, or over 0.96 in one
full window. `Literal` takes the running values as they are, past the same 128 tokens.

Counters come with batches of tokens, and a window ends with the first batch that fills it. So the
answer is the same for every way of batching that has the same batch ends at the window ends; with
an engine that reports every verify step a window has exactly 64 of them, and where several reports
were merged it has up to as many more as one batch holds, less one.
"""

from __future__ import annotations

from stanchion.core.acceptance import accept_length, accept_rate
from stanchion.core.messages import Spec
from stanchion.gateway.monitor.words import Suspicion

LENGTH_MIN = 1.4
RATE_MAX = 0.96
TOKENS = 128
WINDOW_STEPS = 64
NOTHING = Spec(verify_steps=0, tokens=0, proposed=0, accepted=0)


def gained(before: Spec, after: Spec) -> Spec | None:
    """What came between two readings. None where the counters contradict themselves: they went
    back, or say that more was accepted than proposed."""
    between = Spec(
        verify_steps=after.verify_steps - before.verify_steps,
        tokens=after.tokens - before.tokens,
        proposed=after.proposed - before.proposed,
        accepted=after.accepted - before.accepted,
    )
    steps, tokens = between.verify_steps, between.tokens
    drafted = steps >= 0 and 0 <= between.accepted <= between.proposed
    return between if drafted and steps <= tokens <= steps + between.proposed else None


class Windows:
    """The rule with windows. Without drafts acceptance is undefined, and nothing is suspected."""

    def __init__(self) -> None:
        self._begun = NOTHING
        self._low = False  # the window before was

    def push(self, spec: Spec, generated: int) -> Suspicion | None:
        """`spec`: counters after a batch; `generated`: tokens of the answer by then."""
        window = gained(self._begun, spec)
        if window is None:
            self._begun, self._low = spec, False
            return None
        if window.verify_steps < WINDOW_STEPS:
            return None
        self._begun = spec
        before, self._low = self._low, False
        rate, length = accept_rate(window), accept_length(window)
        if rate is None or length is None:
            return None
        self._low = length < LENGTH_MIN
        if self._low and before and generated > TOKENS:
            return _low(length, window.verify_steps, generated)
        return _high(rate, window.verify_steps, generated) if rate > RATE_MAX else None


class Literal:
    """The running values, without windows: shown beside the rule, to tell what windows are for."""

    def __init__(self) -> None:
        self._told = False

    def push(self, spec: Spec, generated: int) -> Suspicion | None:
        rate, length = accept_rate(spec), accept_length(spec)
        if self._told or generated <= TOKENS or gained(NOTHING, spec) is None:
            return None
        if rate is None or length is None or (length >= LENGTH_MIN and rate <= RATE_MAX):
            return None
        self._told = True
        if length < LENGTH_MIN:
            return _low(length, spec.verify_steps, generated)
        return _high(rate, spec.verify_steps, generated)


def _low(length: float, steps: int, at: int) -> Suspicion:
    said = f"accept length {length:.3f} over {steps} verify steps"
    return Suspicion("low_acceptance", said, at)


def _high(rate: float, steps: int, at: int) -> Suspicion:
    return Suspicion("high_acceptance", f"accept rate {rate:.3f} over {steps} verify steps", at)
