"""What the ranks of one worker say to each other: rank 0 gives orders, the others report.

Orders are carried out in the order in which they were given: so a page is loaded before the pass
that reads it is run, and what is sent to a peer has been computed. Arrays travel as they lie in
memory.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from stanchion.device.stream import Pages
from stanchion.kv.transfer.words import Invitation, Write

# ---- rank 0 to the others -------------------------------------------------------------------


class Pass(Struct, frozen=True, array_like=True, tag="pass"):
    """A ragged pass (see model/text)."""

    draft: bool
    tokens: bytes  # int64
    positions: bytes  # int64
    rows: bytes  # int64
    starts: bytes  # int64
    tables: bytes  # int32
    table_starts: bytes  # int64


class Load(Struct, frozen=True, array_like=True, tag="load"):
    """From slots of each rank's own host memory into pages of its pool."""

    number: int
    slots: bytes  # int32
    pages: bytes  # int32


class Save(Struct, frozen=True, array_like=True, tag="save"):
    """The other way. `keys` are the pages' own: who checks some of them goes by the key."""

    number: int
    pages: bytes  # int32
    slots: bytes  # int32
    keys: list[bytes]


class Connect(Struct, frozen=True, array_like=True, tag="connect"):
    peer: int
    invitation: Invitation


class Disconnect(Struct, frozen=True, array_like=True, tag="disconnect"):
    peer: int


class Send(Struct, frozen=True, array_like=True, tag="send"):
    """A write of a layer that the rank keeps."""

    number: int
    peer: int
    layer: int
    source: bytes  # int32
    destination: bytes  # int32
    last_rows: int
    checked: bytes  # int64


class Cut(Struct, frozen=True, array_like=True, tag="cut"):
    numbers: list[int]


Order = Pass | Load | Save | Connect | Disconnect | Send | Cut

# ---- the others to rank 0 -------------------------------------------------------------------


class Copied(Struct, frozen=True, array_like=True, tag="copied"):
    """A load or a save is over. `bad`: places of a load that differ from what was saved."""

    number: int
    bad: list[int]


class Connected(Struct, frozen=True, array_like=True, tag="connected"):
    """`error`: why not, if not."""

    peer: int
    error: str


class Sent(Struct, frozen=True, array_like=True, tag="sent"):
    """A write is over. `total`: the bytes of all that this rank has sent by now."""

    number: int
    whole: bool
    stray: bool
    why: str
    digests: bytes
    total: int


Report = Copied | Connected | Sent

encode = msgspec.msgpack.encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def array(said: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(said, dtype).copy()  # tensors want memory that may be written


def pages(said: bytes) -> Pages:
    return array(said, np.int32)


def said(array: NDArray[Any], dtype: type[np.generic]) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def send_of(write: Write) -> Send:
    source, destination = said(write.source, np.int32), said(write.destination, np.int32)
    checked = said(write.checked, np.int64)
    return Send(
        write.number, write.peer, write.layer, source, destination, write.last_rows, checked
    )


def write_of(order: Send) -> Write:
    return Write(
        order.number, order.peer, order.layer, pages(order.source), pages(order.destination),
        order.last_rows, array(order.checked, np.int64),
    )  # fmt: skip
