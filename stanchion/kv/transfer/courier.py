"""A `Transfer`: one thread, and a wire that it drives. The same for every backend.

The thread's only links are an inbox, an outbox and a bell. What the engine thread asks for in
vain never gets here: pages outside a pool, or peers that are not connected, are Bugs at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from stanchion.core.errors import Bug
from stanchion.device.stream import Mark, Queue
from stanchion.kv.layout import Layout, Spans, spans
from stanchion.kv.transfer.bell import Bell
from stanchion.kv.transfer.book import Book
from stanchion.kv.transfer.inbox import Errand, Inbox
from stanchion.kv.transfer.words import (
    Invitation,
    Write,
    WriteEnded,
    check_layouts,
    layout_of,
)

T = TypeVar("T")


class Wire(Protocol[T]):
    """A backend. `join`, `leave` and `prepare` run on the engine thread, the others in the
    courier's own; a write is in the wire's hands from `begin` until it is said to have ended."""

    def join(self, peer: int, invitation: Invitation) -> None: ...
    def leave(self, peer: int) -> None: ...
    def prepare(self, peer: int, found: Spans) -> T: ...

    def begin(self, number: int, work: T) -> None: ...

    def ended(self) -> list[WriteEnded]:
        """What has ended since, each write once. What never comes back is never said to."""

    def patience_s(self) -> float | None:
        """How soon to ask `ended` again; None while nothing is open."""

    def close(self) -> None: ...


class Courier(Generic[T]):
    """See `Transfer`. `slow_ms` holds every write back by that long; it changes nothing else."""

    def __init__(self, layout: Layout, wire: Wire[T], slow_ms: float = 0.0) -> None:
        self._layout = layout
        self._wire = wire
        self._slow_s = slow_ms / 1000
        self._peers: dict[int, Layout] = {}
        self._book: Book[Errand[T]] = Book()
        self._bell = Bell()
        self._inbox: Inbox[T] = Inbox()
        self._outbox: SimpleQueue[WriteEnded] = SimpleQueue()
        links = (wire, self._inbox, self._outbox, self._bell)
        # A daemon: when the engine dies of a Bug, its process must not wait for this thread.
        self._thread = threading.Thread(target=_carry, args=links, name="transfer", daemon=True)
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        return self._book.bytes_sent

    def connect(self, peer: int, invitation: Invitation) -> None:
        if peer in self._peers:
            raise Bug(f"peer {peer} was connected twice")
        layout = layout_of(invitation)
        check_layouts(self._layout, layout)
        self._wire.join(peer, invitation)
        self._peers[peer] = layout

    def disconnect(self, peer: int) -> None:
        self._hear()
        self._book.check_none_open(peer)
        del self._peers[peer]
        self._wire.leave(peer)

    def submit(self, write: Write) -> None:
        theirs = self._peers.get(write.peer)
        if theirs is None:
            raise Bug(f"a write to peer {write.peer}, which is not connected")
        found = spans(
            self._layout, theirs, write.layer, write.source, write.destination, write.last_rows
        )
        work = self._wire.prepare(write.peer, found)
        errand = Errand(write.number, work, time.monotonic() + self._slow_s)
        self._book.open(write.number, write.peer, found.total, errand)
        self._begin()

    def cut(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._book.withdraw(number) or self._inbox.withdraw(number):
                self._outbox.put(WriteEnded(number, whole=False))
                self._bell.ring()

    def poll(self) -> list[WriteEnded]:
        self._bell.clear()
        self._hear()
        self._begin()
        return self._book.take()

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        """What has not begun never does. Nothing more is said of any write."""
        self._inbox.close()
        self._thread.join()
        self._wire.close()
        self._bell.close()

    def mark(self) -> Mark:
        return self._book.submitted

    def passed(self, mark: Mark) -> bool:
        """As of the last poll: a page is nobody else's before its owner has heard of the end."""
        return self._book.passed(mark)

    def wait(self, other: Queue, mark: Mark) -> None:
        self._book.wait(other, mark)

    def finish(self, mark: Mark) -> None:
        if not self.passed(mark):
            raise Bug("somebody would stand still for a write, which may take for ever")

    def _begin(self) -> None:
        for errand in self._book.ready():
            self._inbox.put(errand)

    def _hear(self) -> None:
        while True:
            try:
                self._book.end(self._outbox.get_nowait())
            except Empty:
                return


def _carry(wire: Wire[T], inbox: Inbox[T], outbox: SimpleQueue[WriteEnded], bell: Bell) -> None:
    """The thread. It ends with the inbox; what has begun by then may still be under way."""
    while not inbox.closed:
        errand = inbox.take(wire.patience_s())
        said: list[WriteEnded] = []
        if errand is not None:
            try:
                wire.begin(errand.number, errand.work)
            except Exception as error:  # noqa: BLE001  the edge of a transfer thread
                # What it did before it failed is unknown.
                broken = WriteEnded(errand.number, whole=False, stray=True, why=repr(error))
                said.append(broken)
        said += wire.ended()
        for ended in said:
            outbox.put(ended)
        if said:
            bell.ring()
