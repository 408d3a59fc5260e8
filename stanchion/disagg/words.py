"""What decode and prefill workers say to each other: typed, bounded, msgpack.

Decode opens a session with `Meet`; prefill checks that the two fit and answers `Met`. A session
ties one life of decode to one life of prefill, and to one invitation: a frame of any other session
is answered `Stranger` and has no effect. Prefill ends a session only when all its handoffs are
closed, so a new `Met` from the same life of it says that it begins no write of the earlier session.
A `Meet` with another invitation says that decode has fenced the earlier one.

Every frame of decode's carries `settled`: its handoffs below that number are settled, and prefill
may forget them. Once a tick decode says `Beat`, with the handoffs that wait for an answer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from stanchion.core.messages import PROMPT_TOKENS_MAX, Name, TopToken
from stanchion.core.outcome import Outcome
from stanchion.core.request import NAME_CHARACTERS_MAX, Priority, TokenId
from stanchion.kv.transfer.words import Invitation

RANKS_MAX = 64
HANDOFFS_MAX = 2**16
PAGES_MAX = 2**22
Number = Annotated[int, Meta(ge=0, lt=2**53)]
ProcessId = Annotated[int, Meta(ge=1, lt=2**31)]
Tenant = Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)]
PageNumbers = Annotated[list[Annotated[int, Meta(ge=1, lt=2**31)]], Meta(max_length=PAGES_MAX)]

# ---- decode to prefill ----------------------------------------------------------------------


class Meet(Struct, frozen=True, kw_only=True, tag="meet"):
    """Who decode is, and where its pool lies. Repeated until answered; `attempt` counts the
    sessions that it asked for, so that a late answer to an earlier one is known for that."""

    attempt: Number
    name: Name
    incarnation: int
    identity: dict[str, str]
    invitation: Invitation


class Offer(Struct, frozen=True, kw_only=True, tag="offer"):
    """Compute this prompt, and write its KV from page `first_page` on into `pages`."""

    session: int
    settled: Number
    number: Number
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=PROMPT_TOKENS_MAX)]
    tenant: Tenant
    salt: Tenant
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None
    first_page: Number
    pages: PageNumbers
    priority: Priority = 0


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    session: int
    settled: Number
    number: Number


class Beat(Struct, frozen=True, kw_only=True, tag="beat"):
    """I am here. `asked`: handoffs offered, and not answered yet."""

    session: int
    settled: Number
    asked: Annotated[list[Number], Meta(max_length=HANDOFFS_MAX)]


FromDecode = Meet | Offer | Cancel | Beat

# ---- prefill to decode ----------------------------------------------------------------------


class Met(Struct, frozen=True, kw_only=True, tag="met"):
    """`pids`: all processes that may write to decode's pool, one a rank. `host` names the machine
    and its space of process ids: a pid means nothing elsewhere."""

    attempt: Number
    session: int
    incarnation: int
    pids: Annotated[list[ProcessId], Meta(min_length=1, max_length=RANKS_MAX)]
    host: str


class Unfit(Struct, frozen=True, tag="unfit"):
    """The two cannot work together: each difference names a field and both values."""

    attempt: Number
    incarnation: int
    differences: list[str]


class PromptLogprobs(Struct, frozen=True):
    logprobs: list[float]
    top: list[list[TopToken]]


class Written(Struct, frozen=True, kw_only=True, tag="written"):
    """Every byte is in place. `digests`: little-endian uint64, (buffers, pages) as `chosen` says
    which pages; empty where none are checked."""

    session: int
    number: Number
    cached_tokens: Number
    digests: bytes
    scores: PromptLogprobs | None


class Drained(Struct, frozen=True, kw_only=True, tag="drained"):
    """Nothing is in flight or will be; `outcome` says why it is not whole."""

    session: int
    number: Number
    outcome: Outcome


class Lost(Struct, frozen=True, kw_only=True, tag="lost"):
    """A write failed, and what the network still holds of it prefill cannot know: fence it."""

    session: int
    number: Number


class Alive(Struct, frozen=True, kw_only=True, tag="alive"):
    """The answer to a Beat. `unknown`: asked for, and never heard of: offer them again."""

    session: int
    unknown: list[Number]


class Stranger(Struct, frozen=True, tag="stranger"):
    """That session is none of this life of mine: meet again."""

    session: int
    incarnation: int


FromPrefill = Met | Unfit | Written | Drained | Lost | Alive | Stranger

encode = msgspec.msgpack.encode
decode_from_decode = msgspec.msgpack.Decoder(FromDecode).decode
decode_from_prefill = msgspec.msgpack.Decoder(FromPrefill).decode
