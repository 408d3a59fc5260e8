"""One request inside the engine: its tokens, its pages, and how far it has come.

Positions count from 0 over prompt and output. `computed` target rows are in place (0 to
computed - 1). While a request decodes, its last token is known but its row is not: computed =
length - 1. The draft layer is then one slot ahead: slots 0 to computed are in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from stanchion.core.identity import Digest
from stanchion.core.matching import Matcher
from stanchion.core.messages import Spec, Start
from stanchion.core.outcome import Outcome, worse
from stanchion.core.request import Sampling
from stanchion.device.stream import Pages
from stanchion.engine.ask import Ask
from stanchion.kv.pages import Pin

if TYPE_CHECKING:
    from torch import Tensor  # held for the runner, never looked into

Phase = Literal["waiting", "receive", "prefill", "decode", "ended"]
NO_PAGES: Pages = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Ahead:
    """What the draft layer holds for the token after the last: its hidden and its logits row."""

    hidden: Tensor  # (1, hidden_width)
    logits: Tensor  # (1, vocabulary)


@dataclass(eq=False)
class Request:
    start: Start
    arrival: int
    seed: int
    ends: tuple[int, ...]  # token ids that end the answer
    eos: tuple[int, ...]
    root: Digest
    tokens: NDArray[np.int32]  # capacity prompt + max_tokens
    length: int  # tokens known
    keys: list[Digest] = field(default_factory=list)
    phase: Phase = "waiting"
    overtaken: int = 0
    lacks: int = 0  # pages that must be free or evictable before it is worth another try
    computed: int = 0
    cached: int = 0
    published: int = 0
    scored: int = 0  # prompt log-probabilities said
    redo: bool = False  # the last cached position is computed again, without writing its row
    pins: list[Pin] = field(default_factory=list)  # shared prefix first, then its own
    pages: Pages = field(default_factory=lambda: NO_PAGES)
    generations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    ahead: Ahead | None = None
    verify_steps: int = 0
    verified: int = 0
    proposed: int = 0
    accepted: int = 0
    record: list[tuple[list[int], int]] = field(default_factory=list)
    outcome: Outcome | None = None
    matcher: Matcher | None = None  # as far as what was said; None: no grammar
    sampling: Sampling = field(init=False)
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = self.start.sampling
        self.prompt_length = len(self.start.tokens)

    @property
    def name(self) -> str:
        return self.start.request

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def answer_begins(self) -> int:
        """Where the answer began, in this attempt or in an earlier one."""
        return self.prompt_length - self.start.said

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_tokens - self.generated

    @property
    def length_max(self) -> int:
        return self.prompt_length + self.sampling.max_tokens

    @property
    def prefill_end(self) -> int:
        """Prefill computes up to here: all of a prompt, or all but the last of what came since."""
        return self.length - 1 if self.generated else self.length

    @property
    def wants_scores(self) -> bool:
        """Are there log-probabilities of its prompt still to be said?"""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and self.scored < self.prompt_length - 1

    @property
    def spec(self) -> Spec | None:
        if not self.proposed:
            return None
        return Spec(self.verify_steps, self.verified, self.proposed, self.accepted)

    def drafts(self, most: int) -> int:
        """How many drafts its next verify step may carry."""
        own = self.sampling.draft_tokens
        return max(0, min(most if own is None else min(own, most), self.tokens_left - 1))

    def ask(self, drafts: list[int], allowed: bytes | None = None) -> Ask:
        """The question for the token after `drafts`, which follow the known tokens. `allowed` is
        what the grammar has there."""
        place, generated = self.length + len(drafts), self.generated + len(drafts)
        ask = Ask(self.sampling, self.seed, place, generated, allowed=allowed)
        if not ask.shaped:
            return ask
        output = (*self.tokens[self.answer_begins : self.length].tolist(), *drafts)
        prompt = self.tokens[: self.answer_begins]
        ends = self.ends or self.eos
        return Ask(self.sampling, self.seed, place, generated, ends, prompt, output, allowed)

    def end(self, outcome: Outcome) -> None:
        """The worst of what is said wins; the loop lets a request go only once."""
        self.outcome = outcome if self.outcome is None else worse(self.outcome, outcome)
