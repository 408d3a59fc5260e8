"""Writes to a peer on this machine: its pool is mapped here, and the courier's thread copies.

A copy takes as long as memory does and waits for no peer. Once begun it goes on to its end: only
the end of this process stops one half-way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.device.kernels.spans import copy_spans
from stanchion.kv.arena import Address, Arena, attach
from stanchion.kv.layout import Layout, Spans
from stanchion.kv.transfer.courier import Courier
from stanchion.kv.transfer.words import (
    Invitation,
    ShmPlace,
    Transfer,
    TransferError,
    WriteEnded,
    name_buffers,
)

Bytes = NDArray[np.uint8]


def shm_transfer(arena: Arena, layout: Layout, slow_ms: float = 0.0) -> Transfer:
    """The source's side, for a pool of its own that may be private."""
    return Courier(layout, ShmWire(arena.memory), slow_ms)


def shm_invitation(arena: Arena, layout: Layout) -> Invitation:
    """The target's side: what it says of its own pool, which lies in a shared arena."""
    address = arena.address
    return Invitation(
        place=ShmPlace(address.descriptor),
        pid=address.pid,
        token=address.token,
        pages=layout.pages,
        page_tokens=layout.page_tokens,
        size=address.size,
        buffers=name_buffers(layout),
    )


@dataclass(frozen=True, eq=False)
class Copy:
    destination: Bytes
    spans: Spans


class ShmWire:
    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._peers: dict[int, Bytes] = {}
        self._ended: list[WriteEnded] = []
        none = np.zeros(0, np.int64)
        copy_spans(memory, memory, none, none, none)  # compiled before the first write

    def join(self, peer: int, invitation: Invitation) -> None:
        place = invitation.place
        if not isinstance(place, ShmPlace):
            raise TransferError(f"the peer wants {invitation.kind}, and this worker writes shm")
        address = Address(invitation.pid, place.descriptor, invitation.size, invitation.token)
        self._peers[peer] = attach(address)

    def leave(self, peer: int) -> None:
        del self._peers[peer]

    def prepare(self, peer: int, found: Spans) -> Copy:
        return Copy(self._peers[peer], found)

    def begin(self, number: int, work: Copy) -> None:
        what = work.spans
        copy_spans(self._memory, work.destination, what.source, what.destination, what.bytes)
        self._ended.append(WriteEnded(number, whole=True))

    def ended(self) -> list[WriteEnded]:
        said, self._ended = self._ended, []
        return said

    def patience_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._peers.clear()
