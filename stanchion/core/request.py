"""What a client may ask of a generation, with the bound of every field.

The bounds are part of the type: whoever decodes a `Sampling` (HTTP body, worker message, trace
file) gets an error that names the field, never an engine with a value that it cannot serve.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]

PRIORITY_MAX = 100
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
AHEAD = 16  # later arrivals that one step of priority lets a request overtake

TOP_LOGPROBS_MAX = 20
STOP_IDS_MAX = 64
LOGIT_BIAS_MAX = 1024
DRAFT_TOKENS_MAX = 5
NAME_CHARACTERS_MAX = 128
GREEDY_BELOW = 1e-5  # colder than this, differences of logits overflow: it means greedy (vLLM)


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Names and meanings follow the OpenAI API and vLLM's extensions.

    `temperature` 0 is greedy and exact. `top_k` and `seed` absent mean "all" and "the engine
    draws one". Penalties are applied to logits before the temperature, as in vLLM:
    `repetition_penalty` to prompt and output tokens, the other two to output tokens.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=2**24)]
    min_tokens: Annotated[int, Meta(ge=0, le=2**24)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Meta(max_length=LOGIT_BIAS_MAX)] = ()
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_IDS_MAX)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    draft_tokens: Annotated[int, Meta(ge=0, le=DRAFT_TOKENS_MAX)] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def rank(arrivals: int, priority: int) -> int:
    """Where a request stands among those that wait, lower being earlier: a more urgent one counts
    as one that arrived earlier, by `AHEAD` arrivals a step. So it is overtaken by none that is
    less urgent, and none waits for more than so many that came later."""
    return arrivals + AHEAD * priority
