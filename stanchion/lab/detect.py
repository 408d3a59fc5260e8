"""Detectors over recorded answers: the gateway's own folds, and simple judges beside them. Pure.

The folds see what they see in a live gateway: tokens with their log-probabilities, and speculation
counters as often as the replay kept them. The simple judges are what people try first (regular
expressions, character sets, a floor under log-probabilities), kept to be compared with, not to be
relied on. A detector that has nothing to go by says None, which is not the same as "healthy".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import nan
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from stanchion.core.messages import Spec
from stanchion.gateway.monitor import report
from stanchion.gateway.monitor.baseline import Baseline
from stanchion.gateway.monitor.calibrated import Calibrated, threshold
from stanchion.gateway.monitor.fold import Monitor, Reading, Rules
from stanchion.gateway.monitor.text import odd
from stanchion.gateway.monitor.witness import Confirmed, Scale, judge
from stanchion.gateway.monitor.words import Suspicion
from stanchion.gateway.tokens import Vocabulary
from stanchion.lab.results import Result

WINDOW_TOKENS = 64
LOGPROB_MIN = -3.0  # nats a token, mean over a window: under it the judge calls it garble
FOREIGN_SHARE = 0.05  # of an answer's characters, neither ASCII nor in the prompt
FOREIGN_MIN = 8
# One character or one short unit again and again.
REGEX = re.compile(r"(\S)\1{39,}|(.{2,60}?)\2{9,}", re.DOTALL)
REGEX_CHARACTERS = 20_000  # of an answer's end: the pattern is quadratic at worst
TEXT_KINDS = ("loop", "scripts", "odd_characters", "reserved", "rare", "nan")
Truth = Literal["same", "differs", "unknown"]


class Finding(Struct, frozen=True, kw_only=True):
    """What was found in one answer. `by`: each detector's word. `at`: tokens of the answer until
    the first suspicion. `onset`: the first token that is not the reference's."""

    request: str
    copy: int
    session: str
    arm: str
    speed: float
    in_flight: int
    tokens: int
    by: dict[str, bool | None]
    evidence: tuple[str, ...] = ()
    at: int | None = None
    truth: Truth = "unknown"
    onset: int | None = None

    @property
    def votes(self) -> int:
        return sum(1 for one in self.by.values() if one)


@dataclass(frozen=True)
class Eyes:
    """What is needed to look at an answer. `baseline`: of the model that gave it."""

    vocabulary: Vocabulary
    baseline: Baseline | None = None


def find(one: Result, eyes: Eyes) -> Finding:
    """All detectors over one answer."""
    vocabulary = eyes.vocabulary
    text = prompt_text(one)
    tokens = list(one.tokens) or vocabulary.encode(one.said, special=False)
    reading = Reading(
        prompt=prompt_ids(one) or vocabulary.encode(text, special=False),
        pieces=vocabulary.pieces,
        special=vocabulary.special,
        ends=frozenset(vocabulary.eos_ids),
    )
    monitor = Monitor(Rules("none", baseline=eyes.baseline), reading)
    scores = [nan if score is None else score for score in one.logprobs]
    suspicions = monitor.push(tokens, scores, None)
    kinds = {found.kind for found in suspicions}
    by = _acceptance(one, eyes.baseline)
    by |= {kind: kind in kinds for kind in TEXT_KINDS}
    if eyes.baseline is None or not eyes.baseline.ranks:
        by["rare"] = None
    if not one.logprobs:
        by["nan"] = None
    by["text"] = bool(kinds)
    by["monitor"] = by["text"] or bool(by["calibrated" if eyes.baseline else "report"])
    by |= {
        "regex": REGEX.search(one.said[-REGEX_CHARACTERS:]) is not None,
        "characters": _foreign(one.said, text),
        "log-probability": _unlikely(scores),
    }
    return Finding(
        request=one.request,
        copy=one.copy,
        session=one.session,
        arm=one.arm,
        speed=one.speed,
        in_flight=one.in_flight,
        tokens=len(tokens),
        by=by,
        evidence=tuple(f"{found.kind}: {found.evidence}" for found in suspicions[:8]),
        at=min((found.at for found in suspicions), default=None),
    )


class _Rule(Protocol):
    def push(self, spec: Spec, generated: int) -> Suspicion | None: ...


def _acceptance(one: Result, baseline: Baseline | None) -> dict[str, bool | None]:
    calibrated = None if baseline is None else Calibrated(baseline, threshold())
    return {
        "report-literal": _over(one, report.Literal()),
        "report": _over(one, report.Windows()),
        "calibrated": _over(one, calibrated),
    }


def _over(one: Result, rule: _Rule | None) -> bool | None:
    if rule is None or not one.points:
        return None
    return any(rule.push(point.spec, point.tokens) is not None for point in one.points)


# ---- simple judges --------------------------------------------------------------------------


def _foreign(said: str, prompt: str) -> bool:
    """Too many characters that are odd, or neither ASCII nor in the prompt."""
    known = set(prompt)
    strange = sum(1 for one in said if (not one.isascii() or odd(one)) and one not in known)
    return strange >= FOREIGN_MIN and strange >= FOREIGN_SHARE * len(said)


def _unlikely(scores: Sequence[float]) -> bool | None:
    """A stretch that the model itself hardly believed."""
    if not scores:
        return None
    total = 0.0
    for at, score in enumerate(scores):
        total += score
        if at >= WINDOW_TOKENS:
            total -= scores[at - WINDOW_TOKENS]
        if at >= WINDOW_TOKENS - 1 and total / WINDOW_TOKENS < LOGPROB_MIN:
            return True
    return False


# ---- prompts --------------------------------------------------------------------------------


def prompt_text(one: Result) -> str:
    """All text of the body that was sent; of ids nothing."""
    return "\n".join(_texts(_body(one)))


def prompt_ids(one: Result) -> list[int]:
    """A prompt that was sent as token ids."""
    prompt = _body(one).get("prompt")
    ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    return list(prompt) if ids and isinstance(prompt, list) else []


def _body(one: Result) -> dict[str, Any]:
    return msgspec.json.decode(one.body, type=dict[str, Any]) if bytes(one.body) else {}


def _texts(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            kept = (inner for name, inner in value.items() if name not in _SETTINGS)
            return [text for inner in kept for text in _texts(inner)]
        case list():
            return [text for inner in value for text in _texts(inner)]
    return []


_SETTINGS = ("model", "role", "type", "cache_salt", "id", "tool_call_id", "stream_options")


def question(one: Result) -> str:
    """What was asked, as a digest: two results with the same one should have the same answer.
    Salts and what else was wanted of the reply are no part of it."""
    told = {name: value for name, value in _body(one).items() if name not in _ASIDE}
    words = json.dumps([one.path, told], sort_keys=True).encode()
    return blake2b(words, digest_size=16).hexdigest()


_ASIDE = ("cache_salt", "model", "stream", "stream_options", "return_token_ids", "logprobs")


# ---- the reference --------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Answers that are right, by question: of runs alone, or under no load. `unstable`: questions
    that had several answers, where equality says nothing."""

    answers: Mapping[str, Result]
    unstable: frozenset[str]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Reference:
        answers: dict[str, Result] = {}
        unstable = set()
        for one in results:
            if one.ending != "completed":
                continue
            asked = question(one)
            if asked in answers and _words(answers[asked]) != _words(one):
                unstable.add(asked)
            answers.setdefault(asked, one)
        return cls(answers, frozenset(unstable))

    def of_question(self, one: Result) -> Result | None:
        return self.answers.get(question(one))

    def is_unstable(self, one: Result) -> bool:
        return question(one) in self.unstable


def compare(one: Result, right: Result, scale: Scale | None = None) -> tuple[Truth, int | None]:
    """Is it the reference's answer, and if not, from where on? An answer that was cut off is held
    against as much of it.

    Without `scale` another token is another answer. With one (a server whose runs differ by
    rounding) it differs only where the log-probabilities part before the tokens do; tokens that
    part at a near tie are nobody's fault, and `unknown`.
    """
    said, wanted = _words(one), _words(right)
    whole = one.ending == "completed"
    parted = _parted(said, wanted, whole)
    if scale is None:
        return ("same", None) if parted is None else ("differs", parted)
    shared = min(len(one.logprobs), len(right.logprobs), len(said) if parted is None else parted)
    logged = [nan if score is None else score for score in one.logprobs[:shared]]
    cold = [nan if score is None else score for score in right.logprobs[:shared]]
    found = judge(logged, cold, scale)
    if isinstance(found, Confirmed):
        return "differs", found.onset
    return ("same", None) if parted is None else ("unknown", parted)


def _words(one: Result) -> Sequence[Any]:
    """Tokens where the server gave them, else characters."""
    return one.tokens or one.said


def _parted(said: Sequence[Any], wanted: Sequence[Any], whole: bool) -> int | None:
    for at, (mine, right) in enumerate(zip(said, wanted)):
        if mine != right:
            return at
    if len(said) > len(wanted) or (whole and len(said) < len(wanted)):
        return min(len(said), len(wanted))
    return None
