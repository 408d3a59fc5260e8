"""Every order in which two handoffs over the same pages can go, and the old wrong ways to do it.

The world: request A's pages on decode are given to request B as soon as A's end unpins them. Each
has a prefill worker of its own and two writes. Messages cross, one may be lost and one repeated;
clients may leave; one prefill may die or be stopped with its writes still on the way. A write that
the transport has taken goes on by itself until it ends or the peer is fenced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from stanchion.core.errors import Bug
from stanchion.disagg import handoff as h
from stanchion.sim.check import Violation, Way, check

WRITES = 2
TO_PREFILL = (h.Offer, h.Cancel)
KINDS = [h.Offer(), h.Cancel(), h.Written(), h.Drained(), h.Lost()]
PrefillStep = Callable[[h.Prefill, h.PrefillEvent], tuple[h.Prefill, tuple[h.Effect, ...]]]
DecodeStep = Callable[[h.Decode, h.DecodeEvent], tuple[h.Decode, tuple[h.Effect, ...]]]


class Side(NamedTuple):
    """One handoff: both ends, what is on the wire, and what the transport still carries."""

    prefill: h.Prefill = h.Prefill()
    decode: h.Decode | None = None  # None: not offered yet
    wire: tuple[h.Message, ...] = ()
    carried: tuple[int, ...] = ()  # writes in the transport's hands
    stray: int | None = None  # of those, one that failed: what it sent is in a socket
    computed: int = 0  # writes, then one more for the seal
    alive: bool = True
    stopped: bool = False
    fenced: bool = False
    fence_asked: bool = False
    pinned: bool = False  # decode's pages, by this handoff
    source: bool = True  # prefill's pages
    may_abort: bool = True
    may_fail: bool = True


class World(NamedTuple):
    sides: tuple[Side, Side] = (Side(), Side())
    pages: tuple[str, ...] = ("",) * WRITES  # who wrote each part last
    losses: int = 1
    repeats: int = 1
    crashes: int = 1
    stops: int = 1
    strays: int = 0
    fault: str = ""


def perform(world: World, at: int, effects: tuple[h.Effect, ...], prefills: bool) -> World:
    side = world.sides[at]
    for effect in effects:
        match effect:
            case h.Send(message) if message not in side.wire:  # one of each kind bounds the world
                side = side._replace(wire=tuple(sorted((*side.wire, message), key=KINDS.index)))
            case h.StartWrite(write):
                side = side._replace(carried=(*side.carried, write))
            case h.Unpin() if prefills:
                side = side._replace(source=False)
            case h.Unpin():
                side = side._replace(pinned=False)
            case h.Fence():
                side = side._replace(fence_asked=True)
            case h.Admit() if set(world.pages) != {"AB"[at]}:
                world = world._replace(fault=f"{'AB'[at]} reads KV that is not its own and whole")
    return with_side(world, at, side)


def with_side(world: World, at: int, side: Side) -> World:
    first, second = world.sides
    return world._replace(sides=(side, second) if at == 0 else (first, side))


@dataclass(frozen=True)
class Machines:
    prefill: PrefillStep = h.prefill
    decode: DecodeStep = h.decode

    def at_prefill(self, world: World, at: int, event: h.PrefillEvent) -> World:
        side = world.sides[at]
        state, effects = self.prefill(side.prefill, event)
        return perform(with_side(world, at, side._replace(prefill=state)), at, effects, True)

    def at_decode(self, world: World, at: int, event: h.DecodeEvent) -> World:
        side = world.sides[at]
        assert side.decode is not None
        state, effects = self.decode(side.decode, event)
        return perform(with_side(world, at, side._replace(decode=state)), at, effects, False)


def ways(world: World, machines: Machines) -> Iterator[Way[World]]:
    for at in (0, 1):
        yield from _ways_of(world, at, machines)


def _ways_of(world: World, at: int, machines: Machines) -> Iterator[Way[World]]:
    side, name = world.sides[at], "AB"[at]
    running = side.alive and not side.stopped
    if side.decode is None:
        if at == 0 or (world.sides[0].decode is not None and not world.sides[0].pinned):
            begun = side._replace(decode=h.Decode(), pinned=True, wire=(h.Offer(),))
            yield Way(f"{name} offered", with_side(world, at, begun))
    else:
        yield from _decode_ways(world, at, machines)
    if running and side.prefill.phase != "idle" and side.computed <= WRITES:
        later = with_side(world, at, side._replace(computed=side.computed + 1))
        last = side.computed == WRITES
        computed = h.Sealed() if last else h.Computed(side.computed)
        label = "has computed all" if last else "computes"
        yield Way(f"{name} {label}", machines.at_prefill(later, at, computed))
    if running and side.may_abort and side.prefill.phase in ("open", "cutting"):
        left = with_side(world, at, side._replace(may_abort=False))
        yield Way(f"{name} is given up", machines.at_prefill(left, at, h.Abort()), failure=True)
    for write in side.carried:
        yield from _write_ways(world, at, write, machines)
    yield from _wire_ways(world, at, machines)
    if side.alive and side.may_fail and world.crashes:
        dead = with_side(world, at, side._replace(alive=False))
        yield Way(f"prefill of {name} dies", dead._replace(crashes=0), failure=True)
    if running and side.may_fail and world.stops:
        held = with_side(world, at, side._replace(stopped=True))
        yield Way(f"prefill of {name} is stopped", held._replace(stops=0), failure=True)


def _decode_ways(world: World, at: int, machines: Machines) -> Iterator[Way[World]]:
    side, name = world.sides[at], "AB"[at]
    assert side.decode is not None
    if side.may_abort and side.decode.phase in ("offered", "cancelling"):
        left = with_side(world, at, side._replace(may_abort=False))
        yield Way(f"client of {name} leaves", machines.at_decode(left, at, h.Abort()), failure=True)
    if side.decode.phase in ("offered", "cancelling"):
        yield Way(f"{name} asks again", machines.at_decode(world, at, h.Tick()))
        if not side.fence_asked:
            yield Way(f"{name} is overdue", machines.at_decode(world, at, h.Overdue()))
    if side.decode.phase == "admitted" and side.pinned:
        yield Way(f"{name} completes", with_side(world, at, side._replace(pinned=False)))
    if side.fence_asked and not side.fenced:
        # The supervisor kills the process, sees it gone, and the transport drops what it carried.
        fenced = side._replace(alive=False, fenced=True, carried=(), wire=())
        after = with_side(world, at, fenced)
        yield Way(f"prefill of {name} is fenced", machines.at_decode(after, at, h.PeerFenced()))


def _write_ways(world: World, at: int, write: int, machines: Machines) -> Iterator[Way[World]]:
    side, name = world.sides[at], "AB"[at]
    gone = side._replace(carried=tuple(one for one in side.carried if one != write))
    pages = tuple(name if part == write else who for part, who in enumerate(world.pages))
    landed = with_side(world, at, gone)._replace(pages=pages)
    if not side.source and write != side.stray:
        landed = landed._replace(fault=f"a write of {name} reads pages that prefill gave back")
    if not side.pinned:
        landed = landed._replace(fault=f"a write of {name} lands in pages that decode gave back")
    if side.alive and not side.stopped:
        told = write in side.prefill.flying and not landed.fault
        yield Way(
            f"write {write} of {name} lands",
            machines.at_prefill(landed, at, h.WriteEnded(write)) if told else landed,
        )
        if side.prefill.phase == "cutting" and write in side.prefill.flying:
            cut = with_side(world, at, gone)
            event = h.WriteEnded(write, whole=False)
            yield Way(f"write {write} of {name} is cut", machines.at_prefill(cut, at, event))
        if world.strays and write in side.prefill.flying:
            # Its handle says that it failed; its bytes are still in a socket, and may land.
            failed = with_side(world, at, side._replace(stray=write))._replace(strays=0)
            event = h.WriteEnded(write, whole=False, stray=True)
            label = f"write {write} of {name} fails"
            yield Way(label, machines.at_prefill(failed, at, event), failure=True)
    elif not side.alive:  # the transport goes on; nobody is left to hear of it
        yield Way(f"write {write} of {name} lands late", landed)


def _wire_ways(world: World, at: int, machines: Machines) -> Iterator[Way[World]]:
    side, name = world.sides[at], "AB"[at]
    for place, message in enumerate(side.wire):
        kind = type(message).__name__
        rest = side._replace(wire=side.wire[:place] + side.wire[place + 1 :])
        taken = with_side(world, at, rest)
        if world.losses:
            yield Way(f"{kind} of {name} is lost", taken._replace(losses=0), failure=True)
        kept = [taken] if not world.repeats else [taken, world._replace(repeats=0)]
        for after in kept:
            again = "" if after is taken else " (and again later)"
            if not isinstance(message, TO_PREFILL):
                yield Way(
                    f"{kind} of {name} arrives{again}", machines.at_decode(after, at, message)
                )
            elif side.alive and not side.stopped:
                yield Way(
                    f"{kind} of {name} arrives{again}", machines.at_prefill(after, at, message)
                )
            elif not side.alive:
                yield Way(f"{kind} of {name} finds nobody", after)


def wrong(world: World) -> str | None:
    return world.fault or None


def done(world: World) -> bool:
    """Everybody is settled, no page is held, nothing is carried."""
    return all(
        side.decode is not None
        and side.decode.phase in ("admitted", "released")
        and not side.pinned
        and not side.carried
        and (not side.source or not side.alive)
        for side in world.sides
    )


def visit(machines: Machines, start: World | None = None) -> int:
    return check(start or World(), partial(ways, machines=machines), wrong, done)


# In CI the second request is well-behaved: its client stays, its prefill lives.
CALM = World(
    (Side(), Side(may_abort=False, may_fail=False)), losses=0, repeats=0, crashes=0, stops=0
)


@pytest.mark.parametrize("failure", ["losses", "repeats", "crashes", "stops", "strays"])
def test_every_order_with_one_failure_is_safe_and_ends(failure: str) -> None:
    states = visit(Machines(), CALM._replace(**{failure: 1}))
    print(states, "states")
    assert states > 1000


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "start",
    [
        CALM._replace(losses=1, repeats=1, crashes=1, stops=1),
        World(losses=1, repeats=0, crashes=0, stops=0),
        World(losses=0, repeats=0, crashes=1, stops=0),
        World(losses=0, repeats=0, crashes=0, stops=1),
        CALM._replace(losses=1, crashes=1, strays=1),
    ],
    ids=["all failures of one", "both lose and leave", "one dies", "one stops", "strays too"],
)
def test_every_order_of_a_larger_world_is_safe_and_ends(start: World) -> None:
    states = visit(Machines(), start)
    print(states, "states")
    assert states > 100_000


# ---- the old machines ------------------------------------------------------------------------


def unpin_on_abort(state: h.Decode, event: h.DecodeEvent) -> tuple[h.Decode, tuple[h.Effect, ...]]:
    if state.phase == "offered" and isinstance(event, h.Abort):
        return h.Decode("released"), (h.Send(h.Cancel()), h.Unpin())
    return h.decode(state, event)


def unpin_on_a_timeout(
    state: h.Decode, event: h.DecodeEvent
) -> tuple[h.Decode, tuple[h.Effect, ...]]:
    if state.phase == "cancelling" and isinstance(event, h.Overdue):
        return h.Decode("released"), (h.Unpin(),)
    return h.decode(state, event)


def source_freed_early(
    state: h.Prefill, event: h.PrefillEvent
) -> tuple[h.Prefill, tuple[h.Effect, ...]]:
    after, effects = h.prefill(state, event)
    if after.phase == "cutting" and state.phase == "open":
        return after, (*effects, h.Unpin())
    return after, effects


def acknowledged_when_received(
    state: h.Prefill, event: h.PrefillEvent
) -> tuple[h.Prefill, tuple[h.Effect, ...]]:
    after, effects = h.prefill(state, event)
    if isinstance(event, h.Cancel) and after.phase == "cutting":
        return after, (*effects, h.Send(h.Drained()))
    return after, effects


def a_failed_write_counts_as_ended(
    state: h.Prefill, event: h.PrefillEvent
) -> tuple[h.Prefill, tuple[h.Effect, ...]]:
    if isinstance(event, h.WriteEnded):
        event = replace(event, stray=False)
    return h.prefill(state, event)


def cancel_forgotten_before_its_offer(
    state: h.Prefill, event: h.PrefillEvent
) -> tuple[h.Prefill, tuple[h.Effect, ...]]:
    """Answers a Cancel that came first, but does not remember it."""
    if state.phase == "idle" and isinstance(event, h.Cancel):
        return state, (h.Send(h.Drained()),)
    return h.prefill(state, event)


@pytest.mark.parametrize("old", [unpin_on_abort, unpin_on_a_timeout])
def test_an_old_decode_is_caught(old: DecodeStep) -> None:
    with pytest.raises(Violation, match="pages that decode gave back") as caught:
        visit(Machines(decode=old), CALM)
    print(caught.value)


@pytest.mark.parametrize(
    "old, why",
    [
        (source_freed_early, "pages that prefill gave back"),
        (acknowledged_when_received, "pages that decode gave back"),
        (cancel_forgotten_before_its_offer, "pages that decode gave back"),
        (a_failed_write_counts_as_ended, "pages that decode gave back"),
    ],
)
def test_an_old_prefill_is_caught(old: PrefillStep, why: str) -> None:
    with pytest.raises(Violation, match=why) as caught:
        visit(Machines(prefill=old), CALM._replace(strays=1))
    print(caught.value)


def test_a_prefill_that_ignores_cancel_for_ever_is_caught() -> None:
    """It stays safe, but where nothing fences it a request that was never computed cannot end."""

    def no_fence(state: h.Decode, event: h.DecodeEvent) -> tuple[h.Decode, tuple[h.Effect, ...]]:
        return (state, ()) if isinstance(event, h.Overdue) else h.decode(state, event)

    def deaf(state: h.Prefill, event: h.PrefillEvent) -> tuple[h.Prefill, tuple[h.Effect, ...]]:
        if isinstance(event, h.Cancel) or state.phase == "cutting":
            return replace(state, phase="cutting", flying=()), ()
        return h.prefill(state, event)

    with pytest.raises(Violation, match="no way to an end"):
        visit(Machines(prefill=deaf, decode=no_fence), CALM)


def test_what_a_state_does_not_expect_is_a_bug() -> None:
    with pytest.raises(Bug, match="ended without having begun"):
        h.prefill(h.Prefill("open"), h.WriteEnded(0))
    with pytest.raises(Bug, match="prefill idle got"):
        h.prefill(h.Prefill(), h.WriteEnded(0))
    with pytest.raises(Bug, match="of a handoff that has begun 1"):
        h.prefill(h.Prefill("open", begun=1), h.Computed(0))


def test_the_page_of_protocols_is_drawn_from_the_machines() -> None:
    root = Path(__file__).parent.parent.parent
    spec = importlib.util.spec_from_file_location("draw", root / "runs" / "draw_protocols.py")
    assert spec is not None and spec.loader is not None
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    assert (root / "docs" / "PROTOCOLS.md").read_text() == drawn.page(), (
        "run runs/draw_protocols.py"
    )
