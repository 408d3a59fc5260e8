"""What engine, link and backends say about one-sided writes of KV pages. No I/O here.

A target *invites*: it says where its pool is. A source *connects* to the invitation, and *writes*
layers of its own pages into pages that the target has pinned; the target takes no part. Each write
ends exactly once, whole or not. Unless it is said to be stray, it touches neither end's memory from
then on. Nothing but that, or a fence, is evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from stanchion.core.errors import ServeError
from stanchion.device.stream import Pages, Queue
from stanchion.kv.layout import Key, Layout, Place

TOKEN_BYTES = 16
AGENT_BYTES_MAX = 64 * 2**10
BUFFERS_MAX = 4096
BYTES_MAX = 2**46

Offset = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
BufferName = Annotated[str, Meta(min_length=3, max_length=128)]  # "layer/name"
Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class TransferError(ServeError):
    """A peer that cannot be written to. The message says what does not fit."""

    code = "transfer_error"


class ShmPlace(Struct, frozen=True, tag="shm"):
    """The pool is the memfd behind /proc/`pid`/fd/`descriptor`, after its header page."""

    descriptor: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class NixlPlace(Struct, frozen=True, tag="nixl"):
    """The pool is registered with a NIXL agent, and begins at `address` in its process."""

    agent: Annotated[str, Meta(min_length=1, max_length=128)]
    metadata: Annotated[bytes, Meta(max_length=AGENT_BYTES_MAX)]
    address: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class Invitation(Struct, frozen=True, kw_only=True, tag="invitation"):
    """Where a pool is, and what lies where in it. `token` was drawn for this very pool."""

    place: ShmPlace | NixlPlace
    pid: Count
    token: Token
    pages: Count
    page_tokens: Count
    size: Offset
    buffers: Annotated[dict[BufferName, tuple[Offset, Count]], Meta(max_length=BUFFERS_MAX)]

    @property
    def kind(self) -> str:
        return "shm" if isinstance(self.place, ShmPlace) else "nixl"


encode_invitation = msgspec.msgpack.encode
decode_invitation = msgspec.msgpack.Decoder(Invitation).decode


@dataclass(frozen=True, eq=False)
class Write:
    """One layer of `source` pages, into `destination` pages of `peer`'s pool.

    The last page has `last_rows` rows, the others are whole. Numbers are the caller's, and never
    used twice. `checked`: places in `source` of pages whose digests are to be said with its end.
    """

    number: int
    peer: int
    layer: int
    source: Pages
    destination: Pages
    last_rows: int
    checked: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def rows(self, page_tokens: int) -> NDArray[np.int32]:
        """Of each checked page."""
        rows = np.full(len(self.source), page_tokens, np.int32)
        rows[-1] = self.last_rows
        return rows[self.checked]


@dataclass(frozen=True)
class WriteEnded:
    """The backend is done with this write and with our pages; `whole` if every byte is in place.

    A `stray` one broke, and what it had sent may still arrive at a target that lives. So it is no
    evidence there: the target has to fence. `why` says in words what went wrong, where something
    did; a write that was cut has nothing to say. `digests`: little-endian uint64, (buffers of the
    layer by name, checked pages), made before anything was sent.
    """

    number: int
    whole: bool
    stray: bool = False
    why: str = ""
    digests: bytes = b""


class Transfer(Queue, Protocol):
    """The source's side of a backend; all of it on the engine thread.

    As a device queue: its marks count the writes submitted, which end in any order; `passed` asks
    whether the last before the mark has ended.
    """

    @property
    def bytes_sent(self) -> int:
        """Of the writes that ended whole."""

    def connect(self, peer: int, invitation: Invitation) -> None:
        """Raise TransferError where the peer cannot be written to, and name what is wrong."""

    def disconnect(self, peer: int) -> None:
        """Forget it. A Bug while a write to it is open."""

    def submit(self, write: Write) -> None:
        """Returns at once. A Bug where it would leave either pool."""

    def cut(self, numbers: Sequence[int]) -> None:
        """Asks: those that have not begun end as not whole, the others go on. Poll answers."""

    def poll(self) -> list[WriteEnded]:
        """What has ended since: each write once, and for good."""

    def fileno(self) -> int:
        """Readable when `poll` has something to say."""

    def close(self) -> None: ...


def name_buffers(layout: Layout) -> dict[str, tuple[int, int]]:
    return {
        f"{layer}/{name}": (place.offset, place.row_bytes)
        for (layer, name), place in layout.buffers.items()
    }


def layout_of(invitation: Invitation) -> Layout:
    """The peer's layout, each buffer of it within the peer's memory."""
    buffers: dict[Key, Place] = {}
    rows = invitation.pages * invitation.page_tokens
    for words, (offset, row_bytes) in invitation.buffers.items():
        layer, slash, name = words.partition("/")
        if not (slash and layer.isdecimal() and layer.isascii()):
            raise TransferError(f"a buffer is called {words!r}, not LAYER/NAME")
        if offset + rows * row_bytes > invitation.size:
            raise TransferError(f"buffer {words} lies outside the peer's memory")
        buffers[int(layer), name] = Place(offset, row_bytes)
    ordered = dict(sorted(buffers.items()))
    return Layout(invitation.pages, invitation.page_tokens, ordered, invitation.size)


def check_layouts(ours: Layout, theirs: Layout) -> None:
    differences = ours.differences(theirs)
    if differences:
        raise TransferError("the peer's pages are not ours: " + "; ".join(differences))
