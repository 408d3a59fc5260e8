"""Writes to a peer anywhere, by NIXL over UCX: the same courier, another wire. An optional backend.

A target has an agent for each peer that it invites, and so each peer has connections of its own:
to destroy that agent is the fence. Nothing else at the target stops what a peer has begun, and over
TCP bytes arrive after their sender's end (docs/nixl-fence.md has the measurements).

A source has one agent. NIXL has no cancel: to release a handle leaves its write under way, so a
handle is kept until it says DONE, and then every byte is in place, or fails. A write that failed is
stray: sockets may still hold bytes of it.
"""

from __future__ import annotations

import os
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.kv.arena import Arena
from stanchion.kv.layout import Layout, Spans
from stanchion.kv.transfer.courier import Courier
from stanchion.kv.transfer.words import (
    TOKEN_BYTES,
    Invitation,
    NixlPlace,
    Transfer,
    TransferError,
    WriteEnded,
    name_buffers,
)

INSTALL = "with torch there first, pip install nixl-cu13==1.5.1, then --no-deps nixl==1.5.2"
TRANSPORTS = "tcp,self"  # unless UCX_TLS says otherwise
FENCED = {"tcp", "self"}  # those of which an agent's end is known to be the end of all writes to it
POLL_S = 0.0005  # how often open writes are asked after
MEMORY = "DRAM"
Bytes = NDArray[np.uint8]
Descriptors = NDArray[np.uint64]  # (spans, 3): address, bytes, device


def nixl_transfer(arena: Arena, layout: Layout, slow_ms: float = 0.0) -> Transfer:
    """The source's side, for a pool of its own that may be private."""
    return Courier(layout, NixlWire(arena.memory), slow_ms)


class NixlTarget:
    """The target's side: who may write into `arena`, each peer by a connection of its own."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        self._memory = arena.memory
        self._layout = layout
        self._agents: dict[int, Agent] = {}

    def invitation(self, peer: int) -> Invitation:
        """For this peer alone, and until it is fenced. Takes some 60 ms."""
        if peer in self._agents:
            raise Bug(f"peer {peer} was invited twice")
        token = secrets.token_bytes(TOKEN_BYTES)
        agent = self._agents[peer] = Agent(f"target {token.hex()}", self._memory)
        return Invitation(
            place=NixlPlace(agent.name, agent.metadata(), agent.address),
            pid=os.getpid(),
            token=token,
            pages=self._layout.pages,
            page_tokens=self._layout.page_tokens,
            size=len(self._memory),
            buffers=name_buffers(self._layout),
        )

    def fence(self, peer: int) -> bool:
        """Break with this peer; its open writes end as not whole, there. Takes 0.1 to 0.5 s.

        True: nothing of it is in flight and nothing can begin, whether it lives or not. That is
        shown for TCP alone: over any other transport the answer is False, and no evidence.
        """
        self._agents.pop(peer).destroy()
        return set(os.environ["UCX_TLS"].split(",")) <= FENCED

    def close(self) -> None:
        for peer in [*self._agents]:
            self.fence(peer)


@dataclass(frozen=True, eq=False)
class Put:
    """Pairs of descriptors, ours and the peer's."""

    agent: str
    source: Descriptors
    destination: Descriptors


class NixlWire:
    def __init__(self, memory: Bytes) -> None:
        self._agent = Agent(f"source {secrets.token_hex(TOKEN_BYTES)}", memory)
        self._peers: dict[int, NixlPlace] = {}
        self._open: dict[int, Any] = {}  # handles, by number: the courier's thread alone
        self._ended: list[WriteEnded] = []

    def join(self, peer: int, invitation: Invitation) -> None:
        place = invitation.place
        if not isinstance(place, NixlPlace):
            raise TransferError(f"the peer wants {invitation.kind}, and this worker writes nixl")
        self._agent.meet(place, invitation.size)
        self._peers[peer] = place

    def leave(self, peer: int) -> None:
        self._agent.part(self._peers.pop(peer).agent)

    def prepare(self, peer: int, found: Spans) -> Put:
        place = self._peers[peer]
        return Put(
            place.agent,
            _descriptors(self._agent.address, found.source, found.bytes),
            _descriptors(place.address, found.destination, found.bytes),
        )

    def begin(self, number: int, work: Put) -> None:
        handle, state = self._agent.write(work)
        self._hear(number, handle, state)

    def ended(self) -> list[WriteEnded]:
        opened, self._open = self._open, {}
        for number, handle in opened.items():
            self._hear(number, handle, self._agent.state(handle))
        said, self._ended = self._ended, []
        return said

    def patience_s(self) -> float | None:
        return POLL_S if self._open else None

    def close(self) -> None:
        """Open writes are broken off by the agent's end; their target learns nothing of it."""
        self._open.clear()
        self._agent.destroy()

    def _hear(self, number: int, handle: Any, state: str) -> None:
        if state == "PROC":
            self._open[number] = handle
        else:
            done = state == "DONE"
            why = "" if done else f"NIXL: {state}"
            self._ended.append(WriteEnded(number, whole=done, stray=not done, why=why))


class Agent:
    """One NIXL agent over `memory`. What NIXL raises comes out as TransferError."""

    def __init__(self, name: str, memory: Bytes) -> None:
        os.environ.setdefault("UCX_TLS", TRANSPORTS)
        # UCX's own puts over TCP: in 3 of 24 runs in which a peer was gone amid them, this process
        # was killed inside UCX; as messages the same writes did no harm (docs/nixl-fence.md).
        os.environ.setdefault("UCX_TCP_PUT_ENABLE", "n")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # a peer's death is ours to report
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        try:
            from nixl import _api as api  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError as error:
            raise TransferError(f"NIXL is not installed ({error}): {INSTALL}") from error
        known = vars(api.nixlBind)
        self._errors: tuple[type[Exception], ...] = tuple(
            known[name] for name in sorted(known) if name.endswith("Error")
        )
        self.name = name
        self.address: int = memory.ctypes.data
        self._memory = memory  # outlives the agent
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = api.nixl_agent(
                name, api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            )
            self._agent.register_memory([(self.address, len(memory), 0, "")], MEMORY)
        except self._errors as error:
            raise TransferError(f"NIXL does not work here: {error}") from error

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, place: NixlPlace, size: int) -> None:
        """From here on `write` reaches `size` bytes of it."""
        try:
            met = self._agent.add_remote_agent(place.metadata)
        except self._errors as error:
            raise TransferError(f"the peer's NIXL agent cannot be met: {error}") from error
        name = met.decode() if isinstance(met, bytes) else str(met)
        memory = self._agent.get_xfer_descs([(place.address, size, 0)], MEMORY)
        if name != place.agent or not self._agent.check_remote_metadata(name, memory):
            self.part(name)
            raise TransferError(f"the peer's NIXL agent {name} does not own the memory it named")

    def part(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            return  # the connection broke before

    def write(self, put: Put) -> tuple[Any, str]:
        """A handle, and its state: DONE, PROC or ERR."""
        here = self._agent.get_xfer_descs(put.source, MEMORY)
        there = self._agent.get_xfer_descs(put.destination, MEMORY)
        handle = self._agent.initialize_xfer("WRITE", here, there, put.agent)
        return handle, str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        try:
            return str(self._agent.check_xfer_state(handle))
        except self._errors as error:
            return repr(error)

    def destroy(self) -> None:
        """Closes its connections and stops its thread: nothing is read from a socket afterwards."""
        gone = weakref.ref(self._agent.agent)
        del self._agent
        if gone() is not None:
            raise Bug(f"the NIXL agent {self.name} is still held by somebody")


def _descriptors(start: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Descriptors:
    made = np.zeros((len(offsets), 3), np.uint64)
    made[:, 0] = offsets + start
    made[:, 1] = sizes
    return made
