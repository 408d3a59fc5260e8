"""What decode keeps of each life of a prefill worker, and of each handoff from it. No behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from stanchion.core.messages import Partner
from stanchion.disagg import handoff as h
from stanchion.engine.request import Request
from stanchion.kv.pages import Pin
from stanchion.kv.transfer.words import Invitation


class Target(Protocol):
    """Our pool, as peers may write to it. A peer is known by its incarnation. `local`: only the
    end of a peer's process is a fence, so that it must be one that we can watch."""

    @property
    def local(self) -> bool: ...

    def invitation(self, peer: int) -> Invitation:
        """For this peer, until it is fenced."""

    def fence(self, peer: int, ended: bool) -> bool:
        """Cut the peer off. True if from now on nothing of it is in flight, and nothing can begin.
        `ended`: there is evidence that its process has ended."""


@dataclass(frozen=True)
class Times:
    """Seconds. `silence_s`: a peer unheard for so long is suspected. `drain_s`: so is one that has
    a cancelled handoff open for so long. `deadline_s`: a request's KV must be here by then."""

    beat_s: float = 0.5
    silence_s: float = 5.0
    drain_s: float = 60.0
    deadline_s: float = math.inf


@dataclass(eq=False)
class Receiving:
    """One handoff, decode's end."""

    number: int
    request: Request
    peer: Peer
    pins: list[Pin]
    first_page: int
    state: h.Decode = field(default_factory=h.Decode)
    session: int | None = None  # in which it was offered; None: no offer has left
    cancelled_at: float | None = None


@dataclass(eq=False)
class Peer:
    """One life of a prefill worker. `heard_at`: the last word from it, or when we first asked."""

    partner: Partner
    heard_at: float
    attempt: int  # of all that this decode worker made to have a session with anybody
    session: int | None = None
    invitation: Invitation | None = None
    ended: bool = False  # there is evidence
    cut: bool = False  # it was cut off, and there is no evidence: what it holds stays held
    suspected_at: float | None = None
    handoffs: dict[int, Receiving] = field(default_factory=dict)  # by number; the open ones
