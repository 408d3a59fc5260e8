"""The monitor of one attempt at an answer: tokens and counters in, suspicions out. Pure.

The same fold stops a live answer in the gateway and scans recordings offline. Text witnesses go by
the token, so how tokens are batched changes nothing of what they say; acceptance goes by the
batches that carry counters (see `report`). It works with what there is: without counters, or
without a baseline, the other witnesses go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, Protocol

from stanchion.core.messages import Spec
from stanchion.gateway.detok import TextFold
from stanchion.gateway.monitor import report
from stanchion.gateway.monitor.baseline import Baseline
from stanchion.gateway.monitor.calibrated import Calibrated, threshold
from stanchion.gateway.monitor.loops import Loops
from stanchion.gateway.monitor.rare import Rare
from stanchion.gateway.monitor.text import Prompt, Texts
from stanchion.gateway.monitor.words import Suspicion

Acceptance = Literal["none", "report", "report-literal", "calibrated"]


@dataclass(frozen=True)
class Rules:
    """`calibrated` wants a baseline; where there is none for this model, `report` stands in."""

    acceptance: Acceptance = "calibrated"
    text: bool = True
    baseline: Baseline | None = None


@dataclass(frozen=True)
class Reading:
    """What is known of an answer before its first token."""

    prompt: Sequence[int]
    pieces: Sequence[bytes]
    special: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()


class _Test(Protocol):
    def push(self, spec: Spec, generated: int) -> Suspicion | None: ...


class Monitor:
    def __init__(self, rules: Rules, reading: Reading) -> None:
        prompt = Prompt(reading.prompt, reading.pieces)
        self._test = _acceptance(rules)
        self._looks = rules.text
        self._ends = reading.ends
        self._pieces = TextFold(reading.pieces, reading.special)
        self._texts = Texts(prompt, reading.special, reading.ends)
        self._loops = Loops(reading.prompt, reading.pieces)
        ranked = rules.baseline is not None and rules.baseline.ranks
        self._rare = Rare(prompt, rules.baseline) if ranked and rules.baseline else None
        self._broken = False
        self.tokens = 0

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[float], spec: Spec | None
    ) -> list[Suspicion]:
        """One batch, with the counters as they are after it."""
        found: list[Suspicion] = []
        for place, token in enumerate(tokens):
            self.tokens += 1
            if place < len(logprobs) and isnan(logprobs[place]) and not self._broken:
                self._broken = True
                found.append(Suspicion("nan", "a log-probability is no number", self.tokens))
            if self._looks:
                found += self._read(token)
        if spec is not None and (one := self._test and self._test.push(spec, self.tokens)):
            found.append(one)
        return found

    def replay(self, tokens: Sequence[int]) -> None:
        """Take over the clean tokens of an attempt before: what they show has been judged."""
        self.push(tokens, (), None)

    def _read(self, token: int) -> list[Suspicion]:
        if token in self._ends:
            return []
        at = self.tokens
        found = self._texts.push(self._pieces.push(token), at)
        ones = (
            self._loops.push(token),
            self._texts.token(token, at),
            self._rare.push(token, at) if self._rare is not None else None,
        )
        return found + [one for one in ones if one is not None]


def _acceptance(rules: Rules) -> _Test | None:
    match rules.acceptance:
        case "none":
            return None
        case "report-literal":
            return report.Literal()
        case "calibrated" if rules.baseline is not None:
            return Calibrated(rules.baseline, threshold())
        case _:
            return report.Windows()
