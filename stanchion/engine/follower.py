"""A rank that is not rank 0: it runs the passes that rank 0 says, copies and sends its own layers.

It decides nothing. Orders are carried out one after another; but a write of a layer may begin amid
a pass, once that pass has the layer's rows in place, as it may on rank 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from stanchion.core.errors import Bug
from stanchion.device.stream import View
from stanchion.engine.orders import (
    Connect,
    Connected,
    Copied,
    Cut,
    Disconnect,
    Load,
    Order,
    Pass,
    Report,
    Save,
    Send,
    Sent,
    array,
    decode_order,
    pages,
    write_of,
)
from stanchion.engine.ranks import Side
from stanchion.engine.runner import Raising
from stanchion.kv.copies import Loading, Spill
from stanchion.kv.copy import StoreCopier
from stanchion.kv.record import Record
from stanchion.kv.schema import Door
from stanchion.kv.store import Found, Leased, Read, Rows, Store
from stanchion.kv.transfer.words import Invitation, TransferError, Write, WriteEnded
from stanchion.model.text import Ragged


@dataclass(frozen=True)
class Rang:
    """Some write has ended."""


@dataclass(frozen=True)
class Over:
    """Rank 0 says no more."""


Item = bytes | Rang | Over


class Inbox(Protocol):
    def take(self) -> Item:
        """Wait for it."""

    def at_hand(self) -> list[Item]:
        """All that has come, without waiting."""


class Lane(Protocol):
    """Writes to pools of peers, behind the doors of our own (see disagg/prefill)."""

    def connect(self, peer: int, invitation: Invitation) -> None: ...
    def disconnect(self, peer: int) -> None: ...
    def send(self, write: Write) -> None: ...
    def cut(self, numbers: Sequence[int]) -> None: ...
    def poll(self) -> list[WriteEnded]: ...
    @property
    def bytes_sent(self) -> int: ...


@dataclass
class Follower:
    """`report` may be called by the threads that copy. `copier` is there with a host tier, `lane`
    where layers are sent to decode workers."""

    side: Side
    store: Store
    inbox: Inbox
    report: Callable[[Report], None]
    copier: StoreCopier | None = None
    lane: Lane | None = None
    _ahead: deque[Order | Over] = field(default_factory=deque)
    _saved: dict[int, Record] = field(default_factory=dict)  # by slot: what it holds

    def run(self) -> None:
        while True:
            item = self._ahead.popleft() if self._ahead else self._decoded(self.inbox.take())
            if isinstance(item, Over):
                return
            if item is not None:
                self._do(item)

    def _decoded(self, item: Item) -> Order | Over | None:
        if isinstance(item, Rang):
            self._hear_ends()
            return None
        return item if isinstance(item, Over) else decode_order(item)

    def _do(self, order: Order) -> None:
        match order:
            case Pass():
                self._pass(order)
            case Load():
                self._load(order)
            case Save():
                self._save(order)
            case Connect():
                self.report(Connected(order.peer, self._connect(order)))
            case Disconnect():
                self._lane.disconnect(order.peer)
            case Send():
                self._lane.send(write_of(order))
            case Cut():
                self._lane.cut(order.numbers)

    # ---- passes -----------------------------------------------------------------------------

    def _pass(self, order: Pass) -> None:
        batch = Ragged(
            tokens=array(order.tokens, np.int64),
            positions=array(order.positions, np.int64),
            rows=array(order.rows, np.int64),
            starts=array(order.starts, np.int64),
            tables=pages(order.tables),
            table_starts=array(order.table_starts, np.int64),
        )
        written = np.unique(batch.rows // self.store.schema.page_tokens).astype(np.int32)
        leased = Leased(self.store, self.side.compute, [], batch.tables, written)
        # Rank 0's hidden states come to this memory.
        rows = self.side.model.no_hidden(len(batch.tokens))
        hidden = torch.empty_like(rows) if order.draft else None
        self.side.run(batch, _Noting(leased, self._between), hidden)

    def _between(self, layer: int) -> None:
        """This layer's rows are in place, amid a pass: what was to be sent of it may be."""
        for item in self.inbox.at_hand():
            if (order := self._decoded(item)) is not None:
                self._ahead.append(order)
        while self._ahead and isinstance(first := self._ahead[0], Send) and first.layer <= layer:
            self._ahead.popleft()
            self._do(first)

    # ---- copies -----------------------------------------------------------------------------

    def _load(self, order: Load) -> None:
        slots = pages(order.slots)
        unknown = Record(b"", b"", b"", b"")  # has no digests: it is not checked
        records = [self._saved.get(slot, unknown) for slot in slots.tolist()]
        loading = Loading(records, pages(order.pages), slots)
        self._copier.load([loading])
        # On the queue's own thread: whoever read a bad page hears of it before he says anything.
        self._copier.load_queue.submit(partial(self._loaded, order.number, loading))

    def _loaded(self, number: int, loading: Loading) -> None:
        self.report(Copied(number, list(loading.bad)))

    def _save(self, order: Save) -> None:
        records = [Record(key, b"", b"", b"") for key in order.keys]
        spill = Spill(records, pages(order.pages), pages(order.slots), [])
        self._copier.save(spill)
        self._copier.save_queue.submit(partial(self._kept, order.number, spill))

    def _kept(self, number: int, spill: Spill) -> None:
        """On the queue's own thread. Nobody asks for these slots before he has heard of it."""
        digests = spill.digests or [b""] * len(spill.records)
        for record, slot, digest in zip(spill.records, spill.slots.tolist(), digests):
            self._saved[slot] = Record(record.key, b"", b"", digest)
        self.report(Copied(number, []))

    @property
    def _copier(self) -> StoreCopier:
        if self.copier is None:
            raise Bug("a rank without a host tier was told to copy")
        return self.copier

    # ---- writes to peers --------------------------------------------------------------------

    def _connect(self, order: Connect) -> str:
        try:
            self._lane.connect(order.peer, order.invitation)
        except TransferError as error:
            return str(error)
        return ""

    def _hear_ends(self) -> None:
        for one in self._lane.poll():
            total = self._lane.bytes_sent
            self.report(Sent(one.number, one.whole, one.stray, one.why, one.digests, total))

    @property
    def _lane(self) -> Lane:
        if self.lane is None:
            raise Bug("a rank that sends nothing was told to")
        return self.lane


class _Noting:
    """A cache that says when a layer's rows are in place."""

    def __init__(self, leased: Leased, then: Callable[[int], None]) -> None:
        self.page_tokens = leased.page_tokens
        self._leased = leased
        self._then = then

    def writing(self, layer: int, door: Door) -> AbstractContextManager[View[Rows]]:
        entered = self._leased.writing(layer, door)
        if door == "index":  # a layer's index rows are written before its latents
            return entered
        return Raising(entered, partial(self._then, layer))

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        return self._leased.ask(layer, door, read)
