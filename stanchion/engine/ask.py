"""What is asked of the sampler, a row at a time, and what it answers. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stanchion.core.messages import TopToken
from stanchion.core.request import Sampling


@dataclass(frozen=True)
class Ask:
    """One row's question: which token comes at `place`, after `generated` output tokens."""

    sampling: Sampling
    seed: int
    place: int
    generated: int = 0
    ends: tuple[int, ...] = ()  # token ids that end the answer, banned below min_tokens
    prompt: NDArray[np.int32] | None = None  # for the repetition penalty
    output: tuple[int, ...] = ()  # for the penalties: output tokens so far, drafts included
    allowed: bytes | None = None  # a bit a token, lowest first: what the grammar has there

    @property
    def shaped(self) -> bool:
        """Do the logits change before the temperature?"""
        one = self.sampling
        if self.allowed is not None:
            return True
        penalised = one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1.0
        return bool(penalised or one.logit_bias or self.generated < one.min_tokens)

    @property
    def filtered(self) -> bool:
        one = self.sampling
        return one.min_p > 0.0 or one.top_k is not None or one.top_p < 1.0


@dataclass(frozen=True)
class Chosen:
    """What a window came to: accepted drafts, then one more token; each with its raw logprob."""

    tokens: list[int]
    accepted: int
    logprobs: list[float]
    top: list[list[TopToken]] = field(default_factory=list)
