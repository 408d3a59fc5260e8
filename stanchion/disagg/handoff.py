"""The handoff of one request's KV from a prefill worker to a decode worker. No I/O here.

Each end is a function (state, event) -> (state, effects). A worker performs the effects and feeds
back what comes of them; the checker does the same with a wire and a transport that it controls.

A handoff is many one-sided writes (a chunk of one layer each) into pages that decode pinned, from
pages that prefill pinned. How many there will be is not known before the last is computed. The
promise: a page is unpinned, at either end, only when no write of this handoff is in flight or can
still begin. Evidence of that is the writer's word (Written, Drained) or a fence that the transport
vouches for (PeerFenced). Time passing is not: a deadline asks, and then fences.

Messages may be lost, repeated and reordered. Decode asks again on every tick until it is answered;
prefill answers from where it stands, for as long as it may be asked. A Cancel that overtakes its
Offer closes the handoff, so that the Offer finds it closed. Handoffs are told apart by number, and
lives of a process by the link's sessions: a message to or from an earlier one never gets here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from stanchion.core.errors import Bug

# ---- on the wire ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """Decode to prefill: write here."""


@dataclass(frozen=True)
class Cancel:
    """Decode to prefill: I no longer want it. Answered by Written or Drained."""


@dataclass(frozen=True)
class Written:
    """Prefill to decode: every byte is in place, and I will not write again."""


@dataclass(frozen=True)
class Drained:
    """Prefill to decode: not all bytes are in place, and I will not write again."""


@dataclass(frozen=True)
class Lost:
    """Prefill to decode: I will not write again, but a write failed, and what the network still
    holds of it I cannot know. Only a fence can tell."""


Message = Offer | Cancel | Written | Drained | Lost

# ---- from a worker to its own end -----------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """These rows are ready on prefill: write number `write` may start. Numbers count from 0."""

    write: int


@dataclass(frozen=True)
class Sealed:
    """All rows are computed: there will be no further write."""


@dataclass(frozen=True)
class WriteEnded:
    """The transport is done with this write; `whole` if every byte is in place. Of a `stray` one
    bytes may still arrive at the target."""

    write: int
    whole: bool = True
    stray: bool = False


@dataclass(frozen=True)
class Abort:
    """The client left, a deadline passed, the request was rejected, preempted or drained."""


@dataclass(frozen=True)
class Tick:
    """Time to ask again."""


@dataclass(frozen=True)
class Overdue:
    """The peer did not answer in time. Asks for a fence; proves nothing."""


@dataclass(frozen=True)
class PeerFenced:
    """The transport vouches: nothing of this peer is in flight, and nothing can begin."""


# ---- effects --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    message: Message


@dataclass(frozen=True)
class StartWrite:
    write: int


@dataclass(frozen=True)
class CutWrites:
    """Ask the transport to stop early, and the runner to compute no further chunk."""


@dataclass(frozen=True)
class Unpin:
    """This end's pages: nothing of the handoff touches them any more."""


@dataclass(frozen=True)
class Admit:
    """Decode: the KV is whole. The request keeps the pages."""


@dataclass(frozen=True)
class Fence:
    """Decode: have the peer cut off for good, and tell us when that is certain."""


Effect = Send | StartWrite | CutWrites | Unpin | Admit | Fence
PrefillEvent = Offer | Cancel | Computed | Sealed | WriteEnded | Abort
DecodeEvent = Written | Drained | Lost | Abort | Tick | Overdue | PeerFenced

# ---- prefill's end --------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefill:
    """`idle`: not offered yet. `open`: writing. `cutting`: waits for writes to end. Then closed."""

    phase: Literal["idle", "open", "cutting", "written", "drained", "lost"] = "idle"
    begun: int = 0  # writes given to the transport so far
    flying: tuple[int, ...] = ()  # of those, the ones that have not ended
    sealed: bool = False
    strayed: bool = False  # a write failed, and its bytes may be anywhere


def prefill(state: Prefill, event: PrefillEvent) -> tuple[Prefill, tuple[Effect, ...]]:
    match state.phase, event:
        case "idle", Offer():
            return replace(state, phase="open"), ()
        case "open", Computed(write):
            return _begun(state, write), (StartWrite(write),)
        case "open", Sealed():
            return _landed(replace(state, sealed=True))
        case "open", WriteEnded(write, True):
            return _landed(_without(state, write))
        case "open" | "cutting", WriteEnded(write, _, stray):
            after = replace(_without(state, write), strayed=state.strayed or stray)
            return _cut(after, state.phase == "open")
        case "idle" | "open", Cancel() | Abort():
            return _cut(state, first=True)
        case "open", Offer():
            return state, ()  # asked again: the answer comes when the writes have ended
        case "cutting", Offer() | Cancel() | Abort() | Computed() | Sealed():
            return state, ()
        case "written", Offer() | Cancel():
            return state, (Send(Written()),)
        case "drained", Offer() | Cancel():
            return state, (Send(Drained()),)
        case "lost", Offer() | Cancel():
            return state, (Send(Lost()),)
        case "written", Abort():
            return state, ()
        case "drained" | "lost", Abort() | Computed() | Sealed():
            return state, ()
    raise Bug(f"prefill {state.phase} got {event}")


def _begun(state: Prefill, write: int) -> Prefill:
    if write != state.begun or state.sealed:
        raise Bug(f"write {write} of a handoff that has begun {state.begun}")
    return replace(state, begun=write + 1, flying=(*state.flying, write))


def _without(state: Prefill, write: int) -> Prefill:
    if write not in state.flying:
        raise Bug(f"write {write} ended without having begun")
    return replace(state, flying=tuple(one for one in state.flying if one != write))


def _landed(state: Prefill) -> tuple[Prefill, tuple[Effect, ...]]:
    if state.flying or not state.sealed:
        return state, ()
    return replace(state, phase="written"), (Send(Written()), Unpin())


def _cut(state: Prefill, first: bool) -> tuple[Prefill, tuple[Effect, ...]]:
    asked: tuple[Effect, ...] = (CutWrites(),) if first else ()
    if state.flying:
        return replace(state, phase="cutting"), asked
    if state.strayed:  # our own pages are read no more, decode's may still be written
        return replace(state, phase="lost"), (*asked, Send(Lost()), Unpin())
    return replace(state, phase="drained"), (*asked, Send(Drained()), Unpin())


# ---- decode's end ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Decode:
    phase: Literal["offered", "cancelling", "admitted", "released"] = "offered"


def decode(state: Decode, event: DecodeEvent) -> tuple[Decode, tuple[Effect, ...]]:
    match state.phase, event:
        case "offered", Written():
            return Decode("admitted"), (Admit(),)
        case "offered" | "cancelling", Drained() | PeerFenced():
            return Decode("released"), (Unpin(),)
        case "cancelling", Written():
            return Decode("released"), (Unpin(),)
        case "offered", Abort():
            return Decode("cancelling"), (Send(Cancel()),)
        case "offered", Tick():
            return state, (Send(Offer()),)
        case "cancelling", Tick():
            return state, (Send(Cancel()),)
        case "offered" | "cancelling", Overdue() | Lost():
            return state, (Fence(),)
        case "cancelling", Abort():
            return state, ()
        case "admitted" | "released", _:
            return state, ()  # it is settled: whatever comes now is late
    raise Bug(f"decode {state.phase} got {event}")
