"""What healthy answers look like, as data: learnt once, kept in a file, read back. Pure.

A file has a version, one baseline for each (model, revision, draft length, thinking mode), and for
each (model, revision) how far clean runs are apart. A file of another version, or one that is not
whole, is a ConfigError and never half a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from stanchion.core.errors import ConfigError
from stanchion.core.request import DRAFT_TOKENS_MAX
from stanchion.gateway.monitor.witness import Scale

WINDOW_STEPS = 64
RANKS = 16  # bins of token ids, lowest first; BPE gives late and rare merges the highest
TRIMMED = 0.001  # share of windows at either end that may be outliers
Thinking = Literal["on", "off", "any"]
Count = Annotated[int, Meta(ge=0)]
Drafts = Annotated[int, Meta(ge=1, le=DRAFT_TOKENS_MAX)]


class Baseline(Struct, frozen=True, kw_only=True):
    """`accepted`: verify steps by drafts accepted, 0 to `draft_tokens`. `low`, `high`: between
    these lie the means of drafts accepted a step, over windows of 64 steps. `ranks`: tokens that
    their prompt does not have, by sixteenth of the vocabulary; empty where they were not counted.
    """

    model: str
    revision: str
    draft_tokens: Drafts
    thinking: Thinking
    answers: Count
    accepted: tuple[Count, ...]
    low: Annotated[float, Meta(ge=0.0)]
    high: Annotated[float, Meta(ge=0.0)]
    vocabulary: Count = 0
    ranks: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if len(self.accepted) != self.draft_tokens + 1:
            raise ValueError(f"accepted must have {self.draft_tokens + 1} counts")
        if not self.low <= self.high <= self.draft_tokens:
            raise ValueError("low, high and draft_tokens must be in this order")
        if self.ranks and (len(self.ranks) != RANKS or self.vocabulary < RANKS):
            raise ValueError(f"ranks must have {RANKS} counts of a vocabulary of {RANKS} or more")


class Clean(Struct, frozen=True, kw_only=True):
    """A witness's `Scale`, learnt from so many clean runs."""

    model: str
    revision: str
    drift: Annotated[float, Meta(gt=0.0)]
    threshold: Annotated[float, Meta(gt=0.0)]
    runs: Annotated[int, Meta(ge=1)]


class Baselines(Struct, frozen=True, kw_only=True):
    version: Literal[1]
    baselines: tuple[Baseline, ...]
    clean: tuple[Clean, ...] = ()

    def of(
        self, model: str, revision: str, draft_tokens: int, thinking: Thinking = "any"
    ) -> Baseline | None:
        """The one for this mode, else one that was learnt over both."""
        for mode in (thinking, "any"):
            for one in self.baselines:
                known = (one.model, one.revision, one.draft_tokens, one.thinking)
                if known == (model, revision, draft_tokens, mode):
                    return one
        return None

    def scale(self, model: str, revision: str) -> Scale:
        """Where nobody measured it, the default, which is wide."""
        for one in self.clean:
            if (one.model, one.revision) == (model, revision):
                return Scale(one.drift, one.threshold, one.runs)
        return Scale()


NO_BASELINES = Baselines(version=1, baselines=())


def read(raw: bytes, name: str) -> Baselines:
    """Raise ConfigError, naming the file, where it is none of ours."""
    try:
        return msgspec.json.decode(raw, type=Baselines)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} has no baselines of version 1: {error}") from None


def write(baselines: Sequence[Baseline], clean: Sequence[Clean] = ()) -> bytes:
    made = Baselines(version=1, baselines=tuple(baselines), clean=tuple(clean))
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def learn(
    model: str,
    revision: str,
    draft_tokens: int,
    thinking: Thinking,
    answers: Sequence[Sequence[int]],
    ranks: Sequence[int] = (),
    vocabulary: int = 0,
) -> Baseline:
    """`answers`: of each healthy answer, the drafts accepted in each verify step that had as many
    drafts as it could. Raise ConfigError where no answer has a whole window."""
    accepted = [0] * (draft_tokens + 1)
    means = []
    for steps in answers:
        for one in steps:
            accepted[one] += 1
        for first in range(0, len(steps) - WINDOW_STEPS + 1, WINDOW_STEPS):
            means.append(sum(steps[first : first + WINDOW_STEPS]) / WINDOW_STEPS)
    if not means:
        raise ConfigError(f"a baseline wants an answer of at least {WINDOW_STEPS} verify steps")
    means.sort()
    cut = floor(TRIMMED * len(means))
    return Baseline(
        model=model,
        revision=revision,
        draft_tokens=draft_tokens,
        thinking=thinking,
        answers=len(answers),
        accepted=tuple(accepted),
        low=means[cut],
        high=means[len(means) - 1 - cut],
        vocabulary=vocabulary,
        ranks=tuple(ranks),
    )


def rank(token: int, vocabulary: int) -> int:
    """The sixteenth of the vocabulary that a token is in; ids past it are in the last one."""
    return min(token * RANKS // vocabulary, RANKS - 1)
