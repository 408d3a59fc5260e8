"""Shared memory between processes: whose it is, who may write, in which order, until when."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stanchion.core.errors import Bug
from stanchion.device.cpu import InlineQueue
from stanchion.device.kernels.digest import row_digests_plain
from stanchion.device.stream import Stream
from stanchion.kv.arena import Arena, attach
from stanchion.kv.digest import page_digests
from stanchion.kv.layout import Layout
from stanchion.kv.schema import DOORS
from stanchion.kv.store import Store
from stanchion.kv.transfer.book import Book
from stanchion.kv.transfer.courier import Courier
from stanchion.kv.transfer.fence import Watch
from stanchion.kv.transfer.inbox import Errand, Inbox
from stanchion.kv.transfer.sender import Sender
from stanchion.kv.transfer.shm import Copy, ShmWire, shm_invitation, shm_transfer
from stanchion.kv.transfer.words import (
    Invitation,
    NixlPlace,
    ShmPlace,
    TransferError,
    Write,
    WriteEnded,
    encode_invitation,
)
from tests.kv.helpers import PATIENCE_S, Gate, answers, pages, replace_struct
from tests.kv.peer import BIG, SCHEMA, TOKENS, Child, fill

PAGES_HERE = 40


# ---- shared memory --------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[tuple[Courier[Copy], Store, Invitation]]:
    """Both ends in this process: what one thread can show."""
    store = Store(SCHEMA, PAGES_HERE)
    target = Arena.shared(store.layout.total)
    transfer = Courier(store.layout, ShmWire(store.arena.memory), slow_ms=3600_000.0)
    yield transfer, store, shm_invitation(target, store.layout)
    transfer.close()
    target.close()


def test_a_wrong_token_pid_or_file_is_refused(
    shared: tuple[Courier[Copy], Store, Invitation],
) -> None:
    transfer, _, good = shared
    gone = Child("shm")
    gone.end()
    reading, writing = os.pipe()
    file = os.open(__file__, os.O_RDONLY)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, good.size + 4096)
    cases = {
        "token": replace_struct(good, token=b"z" * 16),
        "cannot reach": replace_struct(good, pid=gone.process.pid),
        "bytes": replace_struct(good, size=good.size + 4096),
        "no shared arena": replace_struct(good, place=ShmPlace(reading)),
        "shared arena": replace_struct(good, place=ShmPlace(file)),
        "shrink": replace_struct(good, place=ShmPlace(plain)),
        "writes shm": replace_struct(good, place=NixlPlace("a", b"", 1)),
    }
    for words, bad in cases.items():
        with pytest.raises(TransferError, match=words):
            transfer.connect(1, bad)
    for descriptor in (reading, writing, file, plain):
        os.close(descriptor)
    transfer.connect(1, good)


def test_slow_writes_wait_together_and_can_be_cut(
    shared: tuple[Courier[Copy], Store, Invitation],
) -> None:
    transfer, store, invitation = shared
    transfer.connect(1, invitation)
    sender = Sender(store, transfer)
    for number in range(3):
        sender.send(Write(number, 1, 0, pages(number), pages(number), 1))
    assert transfer.poll() == [] and transfer.mark() == 3
    transfer.cut([2, 0])
    assert [one.number for one in answers(transfer, 2)] == [2, 0]
    assert not transfer.passed(2)
    transfer.cut([1, 1])
    assert answers(transfer, 1) == [WriteEnded(1, whole=False)]
    assert transfer.passed(3) and transfer.bytes_sent == 0


def test_slow_writes_are_written() -> None:
    store = Store(SCHEMA, PAGES_HERE)
    fill(store.arena.memory, 1)
    target = Arena.shared(store.layout.total)
    transfer = shm_transfer(store.arena, store.layout, slow_ms=20.0)
    transfer.connect(1, shm_invitation(target, store.layout))
    everything = np.arange(PAGES_HERE, dtype=np.int32)
    for layer in range(SCHEMA.layers):
        transfer.submit(Write(layer, 1, layer, everything, everything, TOKENS))
    assert [one.number for one in answers(transfer, 2)] == [0, 1]
    for key, place in store.layout.buffers.items():
        rows = slice(place.offset, place.offset + store.layout.bytes_of(key))
        assert np.array_equal(target.memory[rows], store.arena.memory[rows])
    transfer.close()


def test_what_has_begun_goes_on() -> None:
    inbox: Inbox[str] = Inbox()
    for number in range(2):
        inbox.put(Errand(number, "work", 0.0))
    begun = inbox.take(None)
    assert begun is not None and begun.number == 0
    assert not inbox.withdraw(0) and inbox.withdraw(1) and not inbox.withdraw(1)
    assert inbox.take(0.0) is None and not inbox.closed
    inbox.close()
    assert inbox.take(None) is None and inbox.closed


def test_views_outlive_their_arena() -> None:
    arena = Arena.shared(100)
    address = arena.address
    theirs = attach(address)
    ours = arena.memory
    arena.close()
    theirs[:] = 7
    assert ours.tolist() == [7] * 100
    with pytest.raises(Bug):
        _ = arena.memory
    with pytest.raises(TransferError):
        attach(address)
    with pytest.raises(Bug, match="private"):
        _ = Arena.private(10).address


def test_an_arena_leaves_no_file() -> None:
    arena = Arena.shared(100)
    link = os.readlink(f"/proc/self/fd/{arena.address.descriptor}")
    assert link.startswith("/memfd:") and not Path(link.split(" ")[0]).exists()
    arena.close()


def test_a_pool_too_large_for_its_arena_is_a_bug() -> None:
    with pytest.raises(Bug, match="smaller"):
        Store(SCHEMA, PAGES_HERE, Arena.private(4096))


# ---- the end of a peer ----------------------------------------------------------------------


@pytest.fixture
def writer() -> Iterator[tuple[Child, Arena]]:
    """A child that writes 500 MB into our pool, over and over."""
    layout = Layout.of(BIG, 20)
    arena = Arena.shared(layout.total)
    child = Child("shm")
    invitation = encode_invitation(shm_invitation(arena, layout)).hex()
    assert child.ask("source", invitation, 20) == b"writing"
    yield child, arena
    child.end()
    arena.close()


def test_a_killed_peer_has_ended_and_writes_no_more(writer: tuple[Child, Arena]) -> None:
    child, arena = writer
    watch = Watch(child.process.pid)
    assert not watch.ended()
    os.kill(child.process.pid, signal.SIGKILL)
    assert select.select([watch.fileno()], [], [], PATIENCE_S)[0]
    assert watch.ended()
    arena.memory[:] = 9  # the pages are ours again
    assert watch.ended() and bool((arena.memory == 9).all())
    watch.close()
    late = Watch(child.process.pid)  # not reaped yet
    assert late.ended()
    late.close()
    child.process.wait()
    gone = Watch(child.process.pid)
    assert gone.ended() and select.select([gone.fileno()], [], [], 0)[0]
    gone.close()


def test_a_stopped_peer_has_not_ended(writer: tuple[Child, Arena]) -> None:
    child, _ = writer
    watch = Watch(child.process.pid)
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not watch.ended()
    os.kill(child.process.pid, signal.SIGKILL)
    assert select.select([watch.fileno()], [], [], PATIENCE_S)[0]
    watch.close()


# ---- order ----------------------------------------------------------------------------------


def test_a_writer_of_pages_that_are_sent_waits(
    shared: tuple[Courier[Copy], Store, Invitation],
) -> None:
    transfer, store, invitation = shared
    transfer.connect(1, invitation)
    Sender(store, transfer).send(Write(0, 1, 0, pages(3, 4), pages(1, 2), TOKENS))
    for door in DOORS:
        gate = Gate(at=1)
        guarded = store.behind(0, door)
        compute = Stream("compute", gate)
        with compute.reading(guarded, pages(3)), compute.writing(guarded, pages(5)):
            assert gate.waits == []
        with compute.writing(guarded, pages(4)):
            assert gate.waits == [(transfer, 1)]
        with (
            pytest.raises(Bug, match="stand still"),
            Stream("inline", InlineQueue()).writing(guarded, pages(4)),
        ):
            raise AssertionError("the door opened")
    with Stream("inline", InlineQueue()).writing(store.behind(1, "attend"), pages(4)):
        pass  # another layer
    transfer.cut([0])
    answers(transfer, 1)
    with Stream("inline", InlineQueue()).writing(store.behind(0, "attend"), pages(4)):
        pass


def test_a_write_waits_for_the_writer_of_its_pages(
    shared: tuple[Courier[Copy], Store, Invitation],
) -> None:
    transfer, store, invitation = shared
    transfer.connect(1, invitation)
    gate = Gate()
    with Stream("compute", gate).writing(store.behind(0, "attend"), pages(3)):
        pass
    book = transfer._book
    Sender(store, transfer).send(Write(0, 1, 0, pages(3), pages(1), TOKENS))
    assert book.ready() == [] and transfer.poll() == []
    gate.at = 1
    assert [errand.number for errand in book.ready()] == [0]


def test_a_mark_passes_when_its_own_write_has_ended() -> None:
    """An older write that is slow holds up nobody who has nothing to do with it."""
    book: Book[str] = Book()
    for number in (10, 11, 12):
        book.open(number, peer=1, size=100, work=f"work {number}")
    assert book.ready() == ["work 10", "work 11", "work 12"] and book.ready() == []
    book.end(WriteEnded(11, whole=True))
    assert [book.passed(mark) for mark in range(4)] == [True, False, True, False]
    book.end(WriteEnded(10, whole=False))
    assert [book.passed(mark) for mark in range(4)] == [True, True, True, False]
    book.end(WriteEnded(12, whole=True))
    assert book.passed(3) and book.bytes_sent == 200
    assert [one.number for one in book.take()] == [11, 10, 12] and book.take() == []
    with pytest.raises(Bug, match="not open"):
        book.end(WriteEnded(11, whole=True))
    book.open(13, peer=1, size=1, work="")
    with pytest.raises(Bug, match="twice"):
        book.open(13, peer=1, size=1, work="")


def test_held_writes_keep_their_order() -> None:
    book: Book[int] = Book()
    slow, fast = Gate(), Gate()
    book.wait(slow, 1)
    book.open(0, peer=1, size=1, work=0)
    book.wait(fast, 1)
    book.open(1, peer=1, size=1, work=1)
    fast.at = 1
    assert book.ready() == []
    slow.at = 1
    assert book.ready() == [0, 1]
    book.open(2, peer=1, size=1, work=2)
    assert book.ready() == [2]


# ---- digests --------------------------------------------------------------------------------


def test_page_digests_are_of_the_layers_buffers_by_name() -> None:
    store = Store(SCHEMA, 6)
    fill(store.arena.memory, 4)
    wanted_pages, rows = pages(4, 1), pages(TOKENS, 2)
    found = page_digests(store, Stream("compute", InlineQueue()), 0, wanted_pages, rows)
    assert found.shape == (2, 2)
    for at, name in enumerate(("key", "latent")):
        place = store.layout.buffers[0, name]
        plain = row_digests_plain(
            store.arena.memory, place.offset, place.row_bytes, TOKENS, wanted_pages, rows
        )
        assert found[at].tolist() == plain.tolist()


def test_a_store_is_zero_and_its_tensors_are_the_arena() -> None:
    store = Store(SCHEMA, 6)
    assert not store.arena.memory.any()
    stream = Stream("compute", InlineQueue())
    with stream.writing(store.behind(1, "attend"), pages(2)) as view:
        rows = view.rows["latent"]
        assert rows.shape == (6 * TOKENS, 72) and rows.is_contiguous()
        rows[2 * TOKENS] = 1.0
    place = store.layout.buffers[1, "latent"]
    start = place.offset + 2 * TOKENS * place.row_bytes
    assert set(np.flatnonzero(store.arena.memory) - start) <= set(range(place.row_bytes))
    assert bytes(store.arena.memory[start : start + 2]) == b"\x80\x3f"
