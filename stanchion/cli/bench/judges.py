"""The gateway's folds and its machine of an answer, over answers that are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from stanchion.cli.bench.labelled import Said, cold_scores
from stanchion.core.outcome import Completed
from stanchion.engine.loop import Engine
from stanchion.gateway.monitor.baseline import RANKS, Baseline, learn, rank
from stanchion.gateway.monitor.fold import Acceptance, Monitor, Reading, Rules
from stanchion.gateway.monitor.guard import Contract, Drop, Guard, Mode, Restart, Witness
from stanchion.gateway.monitor.report import NOTHING, gained
from stanchion.gateway.monitor.witness import Scale, calibrate, gap, judge
from stanchion.gateway.tokens import Vocabulary

MODES: tuple[Mode, ...] = tuple(one for one in get_args(Mode) if one != "off")
RULES: dict[str, tuple[Acceptance, bool]] = {  # acceptance by this rule; text looked at
    "report-literal": ("report-literal", False),
    "report": ("report", False),
    "calibrated": ("calibrated", False),
    "text": ("none", True),
}


@dataclass
class Verdict:
    """`found`: it was not completed. `in_time`: no token from the onset on had been released, so
    that another attempt goes unnoticed. `at`: tokens that had come by then."""

    found: bool = False
    in_time: bool = False
    at: int = 0
    witnesses: int = 0


@dataclass(frozen=True)
class Judges:
    """`cold`: a right engine, for scores that the recording does not have."""

    vocabulary: Vocabulary
    baseline: Baseline
    scale: Scale
    cold: Engine

    def suspected(self, answer: Said, rule: str) -> int | None:
        """At so many tokens, by that rule alone."""
        acceptance, text = RULES[rule]
        monitor = self._monitor(answer, Rules(acceptance, text, self.baseline))
        for one in answer.messages:
            if found := monitor.push(one.tokens, one.logprobs, one.spec):
                return found[0].at
        return None

    def mode(self, answer: Said, mode: Mode) -> Verdict:
        """How the gateway takes it, reader and witness at hand all the time."""
        rules = Rules("report", False) if mode == "report" else Rules(baseline=self.baseline)
        guard = Guard(Contract(mode, streams=True), lambda: self._monitor(answer, rules))
        verdict, arrived = Verdict(), 0
        for left, one in zip(range(len(answer.messages) - 1, -1, -1), answer.messages):
            arrived += len(one.tokens)
            readings = [(len(one.tokens), one.spec)] if one.spec is not None else []
            ended = None if left else Completed("length")
            self._do(
                guard, guard.came(one.tokens, one.logprobs, (), readings, ended), answer, verdict
            )
            if verdict.found or guard.failed is not None:
                verdict.found, verdict.at = True, arrived
                return verdict
            guard.released = guard.limit
        return verdict

    def _do(self, guard: Guard, effects: Sequence[object], answer: Said, verdict: Verdict) -> None:
        waiting = [*effects]
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Witness):
                verdict.witnesses += 1
                cold = answer.cold if answer.cold is not None else cold_scores(self.cold, answer)
                scores = answer.logprobs[: effect.tokens], cold[: effect.tokens]
                waiting += guard.verdict(judge(*scores, self.scale))
            elif isinstance(effect, Restart):
                verdict.found = verdict.in_time = True
            elif isinstance(effect, Drop):
                verdict.found = True

    def _monitor(self, answer: Said, rules: Rules) -> Monitor:
        vocabulary = self.vocabulary
        return Monitor(rules, Reading(answer.start.tokens, vocabulary.pieces, vocabulary.special))


# ---- what is learnt from healthy answers ----------------------------------------------------


@dataclass
class Learner:
    """Takes healthy answers one by one; makes a baseline of them."""

    drafts: int
    vocabulary: int
    steps: list[list[int]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [0] * RANKS)

    def add(self, answer: Said) -> None:
        self.steps.append(accepted_steps(answer, self.drafts))
        known = set(answer.start.tokens)
        for token in answer.tokens:
            if token not in known:
                self.ranks[rank(token, self.vocabulary)] += 1

    def baseline(self, name: str, revision: str) -> Baseline:
        return learn(name, revision, self.drafts, "any", self.steps, self.ranks, self.vocabulary)


def accepted_steps(answer: Said, drafts: int) -> list[int]:
    """Drafts accepted in each verify step that had all of them."""
    steps, before = [], NOTHING
    for one in answer.messages:
        if one.spec is not None:
            step, before = gained(before, one.spec), one.spec
            if step is not None and step.verify_steps == 1 and step.proposed == drafts:
                steps.append(step.accepted)
    return steps


def scale_of(cold: Engine, clean: Sequence[Said]) -> Scale:
    gaps = []
    for answer in clean:
        scores = answer.cold if answer.cold is not None else cold_scores(cold, answer)
        gaps.append([gap(was, now) for was, now in zip(answer.logprobs, scores, strict=True)])
    return calibrate(gaps)
