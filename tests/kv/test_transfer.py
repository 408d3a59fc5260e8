"""One-sided writes between two processes, over each backend: which bytes move, and when a write
may begin, ends, and lets its pages go."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

import msgspec
import numpy as np
import pytest

from stanchion.core.errors import Bug
from stanchion.kv.arena import Arena
from stanchion.kv.layout import Layout, spans
from stanchion.kv.store import Store
from stanchion.kv.transfer.nixl import INSTALL, nixl_transfer
from stanchion.kv.transfer.sender import Sender
from stanchion.kv.transfer.shm import shm_transfer
from stanchion.kv.transfer.words import (
    Invitation,
    NixlPlace,
    ShmPlace,
    Transfer,
    TransferError,
    Write,
    WriteEnded,
    decode_invitation,
    encode_invitation,
    layout_of,
)
from tests.kv.helpers import Gate, answers, pages, replace_struct
from tests.kv.peer import BIG, SCHEMA, TOKENS, Child, fill

PAGES_HERE, PAGES_THERE = 40, 23
Make = Callable[[Arena, Layout], Transfer]


WRITES = 100  # of 20 MiB: seconds of them, so that the fence comes amid them on any machine
BACKENDS: dict[str, Make] = {"shm": shm_transfer, "nixl": nixl_transfer}


@pytest.fixture(params=["shm", "nixl"])
def backend(request: pytest.FixtureRequest) -> str:
    name = cast(str, request.param)
    if name == "nixl" and (find_spec("nixl") is None):
        pytest.skip(f"nixl is not installed: {INSTALL}")
    return name


@dataclass
class Ends:
    """Both ends: ours in this process, theirs in a child."""

    store: Store
    transfer: Transfer
    sender: Sender
    child: Child
    invitation: Invitation

    def answers(self, count: int) -> list[WriteEnded]:
        return answers(self.transfer, count)


@pytest.fixture
def ends(backend: str) -> Iterator[Ends]:
    layout = Layout.of(SCHEMA, PAGES_HERE)
    arena = Arena.shared(layout.total)
    store = Store(SCHEMA, PAGES_HERE, arena)
    fill(arena.memory, 1)
    transfer = BACKENDS[backend](arena, layout)
    child = Child(backend)
    try:
        invitation = decode_invitation(child.ask("target", PAGES_THERE, 2))
        transfer.connect(5, invitation)
        yield Ends(store, transfer, Sender(store, transfer), child, invitation)
    finally:
        transfer.close()
        child.end()


def test_the_bytes_arrive_and_no_others_change(ends: Ends) -> None:
    random = np.random.default_rng(3)
    theirs = layout_of(ends.invitation)
    wanted = np.empty(theirs.total, np.uint8)
    fill(wanted, 2)
    ours = ends.store.arena.memory
    free = random.permutation(PAGES_THERE).astype(np.int32)
    writes = []
    for number, layer in enumerate((0, 1, 0, 1)):
        count = int(random.integers(1, 6))
        source = random.permutation(PAGES_HERE)[:count].astype(np.int32)
        destination, free = np.sort(free[:count]), free[count:]
        writes.append(Write(number, 5, layer, source, destination, int(random.integers(1, 5))))
    sent = 0
    for write in writes:
        ends.sender.send(write)
        found = spans(
            ends.store.layout, theirs, write.layer, write.source, write.destination, write.last_rows
        )
        for here, there, size in zip(found.source, found.destination, found.bytes, strict=True):
            wanted[there : there + size] = ours[here : here + size]
        sent += found.total
    said = ends.answers(len(writes))
    assert sorted(one.number for one in said) == [0, 1, 2, 3]
    assert all(one.whole for one in said), said
    assert ends.transfer.bytes_sent == sent
    assert np.array_equal(np.frombuffer(ends.child.ask("memory"), np.uint8), wanted)
    assert ends.transfer.poll() == []
    assert not select.select([ends.transfer.fileno()], [], [], 0)[0]


def test_a_held_write_begins_after_what_it_waits_for_and_can_be_cut(ends: Ends) -> None:
    before = ends.child.ask("memory")
    gate = Gate()
    ends.transfer.wait(gate, 1)
    for number in range(3):
        ends.sender.send(Write(number, 5, 0, pages(1), pages(number + 1), TOKENS))
    assert ends.transfer.poll() == []
    ends.transfer.cut([1])
    assert ends.answers(1) == [WriteEnded(1, whole=False)]
    assert ends.child.ask("memory") == before
    gate.at = 1
    said = ends.transfer.poll()  # what was held begins here
    said += ends.answers(2 - len(said))
    assert sorted((one.number, one.whole) for one in said) == [(0, True), (2, True)]
    ends.transfer.cut([0, 1, 2])  # they have ended: nothing more is said
    assert ends.transfer.poll() == []
    after = np.frombuffer(ends.child.ask("memory"), np.uint8)
    changed = np.flatnonzero(after != np.frombuffer(before, np.uint8))
    place = layout_of(ends.invitation).buffers[0, "key"]
    size = place.row_bytes * TOKENS
    second = range(place.offset + 2 * size, place.offset + 3 * size)
    assert len(changed) and not set(changed.tolist()) & set(second)


def test_a_write_that_is_cut_at_once_ends_once(ends: Ends) -> None:
    everything = pages(*range(PAGES_THERE))
    for number in range(20):
        ends.sender.send(Write(number, 5, 1, everything, everything, TOKENS))
        ends.transfer.cut([number])
    said = ends.answers(20)
    assert sorted(one.number for one in said) == list(range(20))
    assert ends.transfer.passed(ends.transfer.mark())
    assert ends.transfer.poll() == []


def test_a_peer_is_disconnected_only_when_nothing_is_open(ends: Ends) -> None:
    gate = Gate()
    ends.transfer.wait(gate, 1)
    ends.sender.send(Write(0, 5, 0, pages(1), pages(2), TOKENS))
    with pytest.raises(Bug, match="open"):
        ends.transfer.disconnect(5)
    ends.transfer.cut([0])
    ends.answers(1)
    ends.transfer.disconnect(5)
    with pytest.raises(Bug, match="not connected"):
        ends.sender.send(Write(1, 5, 0, pages(1), pages(2), TOKENS))
    gate.at = 1
    ends.transfer.connect(5, ends.invitation)
    ends.sender.send(Write(2, 5, 0, pages(1), pages(2), TOKENS))
    assert ends.answers(1) == [WriteEnded(2, whole=True)]


def test_a_peer_that_died_ends_its_writes(ends: Ends) -> None:
    """Over shm nothing fails: our map outlives it. Over a wire they end as not whole."""
    ends.child.end()
    for number in range(3):
        ends.sender.send(Write(number, 5, 0, pages(1), pages(2), TOKENS))
    said = ends.answers(3)
    assert sorted(one.number for one in said) == [0, 1, 2]
    if ends.invitation.kind == "nixl":
        assert not any(one.whole for one in said)
        assert all(one.why and one.stray for one in said)
    ends.transfer.disconnect(5)


def test_what_does_not_fit_is_refused_by_name(ends: Ends) -> None:
    good = ends.invitation
    assert decode_invitation(encode_invitation(good)) == good
    buffers = dict(good.buffers)
    offset, row_bytes = buffers.pop("0/key")
    cases = {
        "key of layer 0": replace_struct(good, buffers=buffers),
        "page_tokens": replace_struct(good, page_tokens=TOKENS * 2, size=good.size * 2),
        "outside": replace_struct(good, pages=PAGES_THERE * 100),
        "LAYER/NAME": replace_struct(good, buffers={**buffers, "x/key": (offset, row_bytes)}),
    }
    for words, bad in cases.items():
        with pytest.raises(TransferError, match=words):
            ends.transfer.connect(6, bad)
    with pytest.raises(Bug, match="twice"):
        ends.transfer.connect(5, good)


def test_an_invitation_has_bounds() -> None:
    place = NixlPlace(agent="a", metadata=b"x" * 70_000, address=1)
    wide = Invitation(
        place=place, pid=1, token=b"t" * 16, pages=1, page_tokens=1, size=1, buffers={}
    )
    for bad in (
        wide,
        replace_struct(wide, place=ShmPlace(3), pid=0),
        replace_struct(wide, place=ShmPlace(3), token=b"short"),
        replace_struct(wide, place=ShmPlace(3), buffers={"0/a": (-1, 4)}),
        replace_struct(wide, place=ShmPlace(3), buffers={f"0/{i}": (0, 4) for i in range(5000)}),
    ):
        with pytest.raises(msgspec.ValidationError):
            decode_invitation(encode_invitation(bad))


# ---- nixl -----------------------------------------------------------------------------------


def test_a_fence_stops_one_peer_and_no_other() -> None:
    """Both are one source here. The target clears the pages after its fence: they stay so."""
    if find_spec("nixl") is None:
        pytest.skip(f"nixl is not installed: {INSTALL}")
    layout = Layout.of(BIG, 40)
    arena = Arena.private(layout.total)
    arena.memory[:] = 1
    transfer = nixl_transfer(arena, layout)
    child = Child("nixl")
    try:
        transfer.connect(1, decode_invitation(child.ask("big target", 80)))
        transfer.connect(2, decode_invitation(child.ask("invite", 2)))
        source = np.arange(40, dtype=np.int32)
        for number in range(WRITES):
            peer = number % 2
            transfer.submit(Write(number, 1 + peer, 0, source, source + peer * 40, 64))
        said = answers(transfer, 1, more=True)
        child.ask("fence and clear", 1, 0, 40)
        said += answers(transfer, WRITES - len(said))
        assert sorted(one.number for one in said) == list(range(WRITES))
        assert all(one.whole for one in said if one.number % 2)
        assert not all(one.whole for one in said)
        memory = np.frombuffer(child.ask("memory"), np.uint8)
        half = len(memory) // 2
        assert not memory[:half].any() and memory[half:].all()
        transfer.disconnect(1)
        transfer.connect(3, decode_invitation(child.ask("invite", 3)))
        transfer.submit(Write(WRITES, 3, 0, source, source, 64))
        assert answers(transfer, 1) == [WriteEnded(WRITES, whole=True)]
        assert np.frombuffer(child.ask("memory"), np.uint8).all()
    finally:
        transfer.close()
        child.end()


def test_an_agent_that_cannot_be_met_is_refused() -> None:
    if find_spec("nixl") is None:
        pytest.skip(f"nixl is not installed: {INSTALL}")
    layout = Layout.of(SCHEMA, PAGES_HERE)
    transfer = nixl_transfer(Arena.private(layout.total), layout)
    child = Child("nixl")
    try:
        good = decode_invitation(child.ask("target", PAGES_THERE, 2))
        assert isinstance(good.place, NixlPlace)
        metadata, address, agent = good.place.metadata, good.place.address, good.place.agent
        for place in (
            NixlPlace(agent, b"", address),
            NixlPlace(agent, metadata[:100], address),
            NixlPlace("another", metadata, address),
            NixlPlace(agent, metadata, address + 2**30),
            ShmPlace(3),
        ):
            with pytest.raises(TransferError):
                transfer.connect(1, replace_struct(good, place=place))
        transfer.connect(1, good)
    finally:
        transfer.close()
        child.end()
