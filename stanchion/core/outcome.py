"""How a request ends: a closed set, set once; when two endings meet, the worse one wins.

Only `Completed` may become a success marker on the wire. Everything else names itself.
"""

from __future__ import annotations

from typing import Literal, assert_never

from msgspec import Struct

Reason = Literal["stop", "length"]
FaultOwner = Literal["client", "capacity", "worker", "data"]
Leaver = Literal["client", "deadline", "monitor", "drain", "stop_string", "admin"]


class Completed(Struct, frozen=True, tag="completed"):
    """The answer is whole. `stop`: an end token or stop id; `length`: max_tokens reached."""

    reason: Reason


class Cancelled(Struct, frozen=True, tag="cancelled"):
    by: Leaver


class Rejected(Struct, frozen=True, tag="rejected"):
    """It can never succeed here: `field` breaks the bound that `message` states."""

    field: str
    message: str


class Overloaded(Struct, frozen=True, tag="overloaded"):
    message: str
    retry_after_s: float


class PeerLost(Struct, frozen=True, tag="peer_lost"):
    """`peer` names the worker that was lost, where it is another one than says so; `owner` whose
    fault it is."""

    message: str
    peer: str = ""
    owner: FaultOwner = "worker"


class OutputSuspect(Struct, frozen=True, tag="output_suspect"):
    """What was computed cannot be trusted (NaN, a digest that differs, a verdict)."""

    evidence: str


Outcome = Completed | Cancelled | Rejected | Overloaded | PeerLost | OutputSuspect


def fault_owner(ended: Outcome) -> FaultOwner | None:
    """Whose fault it is that an attempt ended so; None where it is nobody's. What clients do, and
    what is refused for want of room, says nothing against a worker; nor does a wrong answer say
    that the next attempt there will fail: that is the data's fault, and judged elsewhere."""
    match ended:
        case Completed():
            return None
        case Cancelled(by="deadline"):
            return "worker"
        case Cancelled(by="monitor") | OutputSuspect():
            return "data"
        case Cancelled(by="drain" | "admin"):
            return None
        case Cancelled() | Rejected():
            return "client"
        case Overloaded():
            return "capacity"
        case PeerLost():
            return ended.owner
        case _:
            assert_never(ended)


# From harmless to worst. A suspect output stays suspect whatever else happened to the request.
_ORDER: tuple[type, ...] = (Completed, Cancelled, Rejected, Overloaded, PeerLost, OutputSuspect)


def worse(first: Outcome, second: Outcome) -> Outcome:
    return first if _ORDER.index(type(first)) >= _ORDER.index(type(second)) else second
