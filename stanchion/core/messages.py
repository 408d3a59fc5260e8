"""What gateway and workers say to each other: typed, bounded, msgpack. No object serialisation.

One request's life on this wire: `Start`, then any number of `Tokens`, then exactly one `Ended`.
Request ids are minted by the gateway; a client's own id never becomes a key here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from stanchion.core.outcome import Leaver, Outcome
from stanchion.core.request import NAME_CHARACTERS_MAX, Sampling, TokenId

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
PROMPT_TOKENS_MAX = 4 * 2**20

# ---- gateway to worker ----------------------------------------------------------------------


class Start(Struct, frozen=True, kw_only=True, tag="start"):
    """Generate. `tenant` is the authenticated one, `salt` splits its cache further."""

    request: Name
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=PROMPT_TOKENS_MAX)]
    sampling: Sampling
    tenant: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    salt: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""


class Abort(Struct, frozen=True, tag="abort"):
    request: Name
    by: Leaver


class Drain(Struct, frozen=True, tag="drain"):
    """Take nothing new; say `Drained` when everything accepted has ended."""


class Greet(Struct, frozen=True, tag="greet"):
    """Asks for `Hello`."""


ToWorker = Start | Abort | Drain | Greet

# ---- worker to gateway ----------------------------------------------------------------------


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """Who a worker is. Two workers that pair must agree on all but the pool's size."""

    model: str
    revision: str
    schema: str
    page_tokens: int
    pages: int
    context_max: int
    vocabulary: int
    draft_tokens: int
    eos_ids: tuple[int, ...]
    failpoints: tuple[str, ...]


class Spec(Struct, frozen=True):
    """Running speculation counters of one request. See `acceptance` for what is made of them."""

    verify_steps: int
    tokens: int  # generated in verify steps, bonus tokens included
    proposed: int
    accepted: int


class TopToken(Struct, frozen=True, array_like=True):
    token: int
    logprob: float


class Tokens(Struct, frozen=True, kw_only=True, tag="tokens"):
    """New tokens of one request, with the raw target log-probability of each.

    Raw: of the model's own distribution, before temperature, penalties and filters.
    `top` has one list a token where log-probabilities were asked for.
    """

    request: str
    tokens: list[int]
    logprobs: list[float]
    top: list[list[TopToken]] | None = None
    cached_tokens: int = 0
    spec: Spec | None = None


class PromptScores(Struct, frozen=True, kw_only=True, tag="prompt_scores"):
    """Raw log-probability of each prompt token but the first, given those before it."""

    request: str
    logprobs: list[float]
    top: list[list[TopToken]]


class Ended(Struct, frozen=True, kw_only=True, tag="ended"):
    request: str
    outcome: Outcome
    cached_tokens: int = 0
    spec: Spec | None = None
    draft_record: list[tuple[list[int], int]] | None = None  # per verify step: drafts, accepted


class Progress(Struct, frozen=True, kw_only=True, tag="progress"):
    """A worker's forward progress and load, said at least twice a second."""

    steps: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    pages: int
    pages_free: int
    pages_cached: int
    preempted: int
    suspect: int
    verify_steps: int
    proposed: int
    accepted: int
    busy_s: float


class Drained(Struct, frozen=True, tag="drained"):
    pass


FromWorker = Hello | Tokens | PromptScores | Ended | Progress | Drained

encode = msgspec.msgpack.encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
