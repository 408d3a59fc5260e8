"""A pass's cache under LayerSplit: every rank reads from scratch, and a layer's owner keeps it.

Before a layer is used its owner broadcasts the pages of it that the pass needs, index keys before
latents, each behind a door of its own; both go up to two layers ahead of the reader, on a stream
of their own. The rows that this pass writes go from rank to rank directly, and the owner keeps
them.

All ranks open the same doors in the same order, so their collectives match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stanchion.device.hasty import Hasty
from stanchion.device.stream import JobQueue, Stream, View
from stanchion.kv.schema import DOORS, Door, Schema
from stanchion.kv.store import Found, Read, Rows, Store
from stanchion.parallel.exchange import Exchange, Passage, Picked, Writing
from stanchion.parallel.group import Group
from stanchion.parallel.layersplit import Layer, Needed, Owners
from stanchion.parallel.scratch import SLOTS, ByLayer, Scratch
from stanchion.parallel.split import Ints, Partition, Rank


@dataclass
class Broadcasts:
    """Owners' pages on their way into scratch: one queue, and so one order of collectives.

    `slow_s` holds each of them back, for the lab; `sleep` is how.
    """

    whole: Schema
    owners: Owners
    store: Store
    group: Group
    queue: JobQueue
    failpoints: frozenset[str] = frozenset()
    slow_s: float = 0.0
    sleep: Callable[[float], None] | None = None
    scratch: Scratch = field(init=False)
    stream: Stream = field(init=False)
    bytes_sent: int = 0  # by all owners, to each of the others

    def __post_init__(self) -> None:
        self.stream = Stream("broadcast", self.queue)
        if "broadcast_before_load" in self.failpoints:
            own = {(one.layer, one.door) for one in self.store.schema.buffers}
            names = frozenset(f"layer {layer} {door}" for layer, door in own)
            self.stream = Hasty("broadcast", self.queue, names)
        self.scratch = Scratch.of(self.whole, 2)

    def make_room(self, pages: int) -> None:
        """Between two passes. What is still being sent keeps the memory that it goes to."""
        if pages > self.scratch.pages:
            self.scratch = Scratch.of(self.whole, max(pages, 2 * self.scratch.pages))

    def begin(self, layer: int, door: Door, need: Needed) -> None:
        """Submit the broadcast of a layer's pages, through the doors at both of its ends."""
        if not need.prefix or (door == "index" and "index_broadcast_skipped" in self.failpoints):
            return
        with self.stream.writing(self.scratch.slot(layer, door), need.sent) as view:
            self._submit(layer, door, need, view.rows[layer])

    def refill(self, layer: int, door: Door, need: Needed) -> None:
        """The old wrong way: at once, whoever reads there. For the lab."""
        if need.prefix:
            with Stream("blind", self.queue).reading(
                self.scratch.slot(layer, door), need.sent
            ) as view:
                self._submit(layer, door, need, view.rows[layer])
            self.queue.finish(self.queue.mark())

    def _submit(self, layer: int, door: Door, need: Needed, into: Rows) -> None:
        if self.slow_s and self.sleep is not None:
            self.queue.submit(partial(self.sleep, self.slow_s))
        owner = self.owners.of_layer(Layer(layer))
        tokens = self.whole.page_tokens
        sent = {name: into[name][tokens : (need.prefix + 1) * tokens] for name in sorted(into)}
        self.bytes_sent += sum(one.numel() * one.element_size() for one in sent.values())
        if owner != self.group.rank:
            self.queue.submit(partial(self._send, sent, owner))
            return
        pages = need.pages[: need.prefix]
        with self.stream.reading(self.store.behind(layer, door), pages) as view:
            at = torch.from_numpy(pages.astype("int64"))
            self.queue.submit(partial(_gather, view.rows, at, sent, tokens))
            self.queue.submit(partial(self._send, sent, owner))

    def _send(self, sent: Rows, owner: Rank) -> None:
        """On the broadcast stream's thread."""
        for name in sorted(sent):
            self.group.broadcast(sent[name].view(torch.uint8), owner)


class Shared:
    """One pass. `inner` is the rank's own pool; it has rows of the layers that are its own, and
    hears of every layer when its rows are in."""

    def __init__(
        self,
        inner: Any,
        compute: Stream,
        broadcasts: Broadcasts,
        exchange: Exchange,
        partition: Partition,
        need: Needed,
        rows: Ints,
        layers: Sequence[int],
    ) -> None:
        self.page_tokens: int = inner.page_tokens
        self._inner = inner
        self._compute = compute
        self._broadcasts = broadcasts
        self._exchange = exchange
        self._partition = partition
        self._need = need
        self._rows = torch.from_numpy(rows)  # (queries,) in the pool
        self._kept = torch.from_numpy(need.rows)  # (queries,) in scratch
        broadcasts.make_room(len(need.pages) + 1)
        orders = broadcasts.scratch.orders
        self._orders = {door: [at for at in layers if at in orders[door]] for door in DOORS}
        for ahead in range(SLOTS):
            for door in DOORS:
                self._begin(door, ahead)

    def writing(self, layer: int, door: Door) -> Passage:
        slot = self._broadcasts.scratch.slot(layer, door)
        passage = self._compute.writing(slot, self._need.written)
        return Writing(passage, partial(_of_layer, layer), partial(self._keep, layer, door))

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        with self._reading(layer, door) as view:
            return read(view.rows)

    def _reading(self, layer: int, door: Door) -> Passage:
        slot = self._broadcasts.scratch.slot(layer, door)
        passage = self._compute.reading(slot, self._need.every)
        place = self._orders[door].index(layer)
        if "scratch_refilled_under_reader" in self._broadcasts.failpoints:
            return Refilled(passage, layer, partial(self._refill, door, place + SLOTS))
        then = partial(self._begin, door, place + SLOTS)
        return Reading(passage, layer, then)

    def _keep(self, layer: int, door: Door, scratch: Rows) -> None:
        """The other ranks' rows into scratch; all of them into the pool, if the layer is ours."""
        self._exchange.rows(self._partition, self._need.rows, scratch)
        with self._inner.writing(layer, door) as view:
            for name, pool in view.rows.items():
                pool.view(torch.uint8)[self._rows] = scratch[name].view(torch.uint8)[self._kept]

    def _begin(self, door: Door, place: int) -> None:
        for layer in self._orders[door][place : place + 1]:
            self._broadcasts.begin(layer, door, self._need)

    def _refill(self, door: Door, place: int) -> None:
        for layer in self._orders[door][place : place + 1]:
            self._broadcasts.refill(layer, door, self._need)


class Reading(Picked):
    """A door of scratch. Once it is closed, its slot is the next layer's."""

    def __init__(self, door: Any, layer: int, then: Callable[[], None]) -> None:
        super().__init__(door, partial(_of_layer, layer))
        self._then = then

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None:
            self._then()


class Refilled(Reading):
    """The old wrong way: the slot is the next layer's before its reader has read."""

    def __enter__(self) -> View[Rows]:
        view = super().__enter__()
        self._then()
        return view

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._then = lambda: None
        super().__exit__(kind, *rest)


def _of_layer(layer: int, slot: ByLayer) -> Rows:
    return slot[layer]


def _gather(pool: Rows, pages: Tensor, into: Rows, page_tokens: int) -> None:
    """The owner's pages, side by side, into its own scratch."""
    for name, rows in into.items():
        page = rows.view(torch.uint8).view(len(pages), -1)  # (pages, bytes)
        torch.index_select(pool[name].view(torch.uint8).view(-1, page.shape[1]), 0, pages, out=page)
