"""What gateway and workers say to each other: typed, bounded, msgpack. No object serialisation.

One request's life on this wire: `Start`, then any number of `Tokens`, then exactly one `Ended`.
Request ids are minted by the gateway; a client's own id never becomes a key here.

A worker joins by saying `Join` on the gateway's join socket, again and again until it is answered;
the gateway then connects to the worker's own address and greets it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from stanchion.core.grammar import GRAMMAR_BYTES_MAX
from stanchion.core.outcome import Leaver, Outcome
from stanchion.core.request import NAME_CHARACTERS_MAX, Priority, Sampling, TokenId

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Address = Annotated[str, Meta(min_length=1, max_length=512)]
PROMPT_TOKENS_MAX = 4 * 2**20
Role = Literal["both", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")

# ---- gateway to worker ----------------------------------------------------------------------


class Partner(Struct, frozen=True):
    """The prefill worker of a pair: where its peers reach it, and which life of it is meant."""

    name: Name
    address: Address
    incarnation: int


class Start(Struct, frozen=True, kw_only=True, tag="start"):
    """Generate. `tenant` is the authenticated one, `salt` splits its cache further.

    `prefill` is given to decode workers alone: who computes the prompt's KV. `grammar` is what the
    answer has to follow (`core.grammar`). The last `said` of the tokens are the answer's own, said
    by an earlier attempt at it: penalties and grammar count them in.
    Of two requests the one of lower `priority` is earlier (as in vLLM), within a bound. `session`
    names, by a hash, the conversation that it belongs to, "" if its client did not say.
    """

    request: Name
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=PROMPT_TOKENS_MAX)]
    sampling: Sampling
    tenant: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    salt: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    prefill: Partner | None = None
    grammar: Annotated[str, Meta(max_length=GRAMMAR_BYTES_MAX)] | None = None
    said: Annotated[int, Meta(ge=0, le=PROMPT_TOKENS_MAX)] = 0
    priority: Priority = 0
    session: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""


class Abort(Struct, frozen=True, tag="abort"):
    request: Name
    by: Leaver


class Drain(Struct, frozen=True, tag="drain"):
    """Take nothing new; say `Drained` when everything accepted has ended."""


class Greet(Struct, frozen=True, tag="greet"):
    """Asks for `Hello`."""


class Quarantine(Struct, frozen=True, kw_only=True, tag="quarantine"):
    """An answer of these tokens was wrong, by the tenant and with the salt that it had: nothing
    that it read may be found again."""

    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=PROMPT_TOKENS_MAX)]
    tenant: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    salt: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""


class Flush(Struct, frozen=True, tag="flush"):
    """Give back all that is kept for reuse alone, on every tier."""


Order = Quarantine | Flush  # about what is kept, and no request's
ToWorker = Start | Abort | Drain | Greet | Order

# ---- worker to gateway ----------------------------------------------------------------------


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """Who a worker is. `identity` is what all workers of a cluster must agree on, field by field:
    schema, model, revision, page size, speculation, version. `incarnation` is drawn anew by each
    process; `pid` is 0 where the gateway is on another machine. `peer_address` is where decode
    workers reach a prefill worker."""

    name: Name
    role: Role
    incarnation: int
    pid: int
    peer_address: str
    identity: dict[str, str]
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


class Counted(Struct, frozen=True):
    """Tokens as the server counts them, where those of the messages are the bytes of its text."""

    prompt: int
    completion: int


class Ended(Struct, frozen=True, kw_only=True, tag="ended"):
    """`generated`: tokens that were said of it, as its worker counts them; None: it does not."""

    request: str
    outcome: Outcome
    generated: int | None = None
    cached_tokens: int = 0
    spec: Spec | None = None
    draft_record: list[tuple[list[int], int]] | None = None  # per verify step: drafts, accepted
    counted: Counted | None = None


class TierProgress(Struct, frozen=True, kw_only=True):
    """KV beyond the device, in pages where nothing else is said."""

    host_pages: int
    host_free: int
    host_kept: int
    host_quarantined: int
    copies: int  # between tiers, not ended
    lifted: int
    spilled: int
    not_spilled: int
    fetched: int
    timeouts: int
    bad_host: int
    disk_pages: int = 0
    disk_bytes: int = 0
    disk_stored: int = 0
    disk_misses: int = 0
    disk_dropped: int = 0
    disk_errors: int = 0
    disk_writing: bool = False
    disk_warning: str = ""


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
    handoffs: int = 0  # open ones: their pages are held until there is evidence
    pages_handoff: int = 0  # held for nothing but such evidence
    pages_quarantined: int = 0  # never used again by this process
    kv_bytes_sent: int = 0
    deadlines: int = 0  # requests cut off by the prefill deadline
    draining: bool = False  # it takes nothing new
    quarantines: int = 0  # orders to drop a prefix that were carried out
    pages_dropped: int = 0  # KV pages that are shared no more for these
    tiers: TierProgress | None = None


class Drained(Struct, frozen=True, tag="drained"):
    pass


class Suspected(Struct, frozen=True, tag="suspected"):
    """A decode worker holds pages that a prefill worker may still write, and gets no answer from
    it. Whoever can should end that process for good: its end is the evidence that frees them."""

    name: str
    incarnation: int
    why: str


FromWorker = Hello | Tokens | PromptScores | Ended | Progress | Drained | Suspected

# ---- joining --------------------------------------------------------------------------------


class Join(Struct, frozen=True, tag="join"):
    """A worker to the gateway's join socket. `address` is where its own socket is bound."""

    address: Address
    hello: Hello


class Welcome(Struct, frozen=True, tag="welcome"):
    pass


class Refused(Struct, frozen=True, tag="refused"):
    """It does not fit: each difference names a field, and what either side has."""

    differences: list[str]


def differences(
    ours: dict[str, str], theirs: dict[str, str], here: str = "here", there: str = "there"
) -> list[str]:
    """Every field in which two identities differ, in words."""
    return [
        f"{name}: {ours.get(name, 'absent')} {here}, {theirs.get(name, 'absent')} {there}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


encode = msgspec.msgpack.encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_join = msgspec.msgpack.Decoder(Join).decode
decode_join_reply = msgspec.msgpack.Decoder(Welcome | Refused).decode
