"""One layer's way from its owner to a reader, in every order in which its parts may happen.

The real broadcasts, doors and scratch of two ranks, over queues that are as late as they may be:
the owner's load, its sends, and what the reader receives. What is open is which of them, or which
rank's program, does its next piece of work. A broadcast returns at its owner at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from stanchion.core.errors import Bug
from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Stream
from stanchion.kv.schema import Buffer, Schema
from stanchion.kv.store import Found, Rows, Store
from stanchion.parallel.exchange import Exchange
from stanchion.parallel.layersplit import Owners, needed
from stanchion.parallel.shared import Broadcasts, Shared
from stanchion.parallel.split import Partition, Rank
from stanchion.sim.choices import Choices, every, seeded
from stanchion.sim.late import LateQueue

PAGE = 2
PAGES = np.array([1, 2], np.int32)  # of the owner's pool, with the rows of an earlier pass
OWNER = Rank(1)
Program = Generator[None, None, None]


@dataclass
class Wire:
    """The group of two ranks, as each of them sees it."""

    rank: Rank
    box: deque[bytes]
    pump: Callable[[], None]
    size: int = 2

    def broadcast(self, memory: Tensor, root: Rank) -> None:
        if self.rank == root:
            self.box.append(memory.numpy().tobytes())
            return
        while not self.box:
            self.pump()  # as a reader's thread that stands still, while the owner goes on
        memory.view(-1).numpy()[:] = np.frombuffer(self.box.popleft(), np.uint8)


@dataclass
class World:
    layers: int
    choices: Choices
    failpoints: frozenset[str] = frozenset()
    loads: LateQueue = field(default_factory=LateQueue)
    sends: LateQueue = field(default_factory=LateQueue)  # the owner's broadcasts
    comes: LateQueue = field(default_factory=LateQueue)  # the reader's
    read: list[list[int]] = field(default_factory=list)  # by layer: the rows that were found

    def __post_init__(self) -> None:
        buffers = tuple(Buffer("key", at, "index", "int64", 1) for at in range(self.layers))
        self.schema = Schema("world", PAGE, self.layers, False, buffers)
        self.box: deque[bytes] = deque()
        self.store = Store(self.schema, 4)
        self.owner, self.reader = self._owner(), self._reader()

    def run(self) -> bool:
        """Was everything found that was loaded?"""
        parts = [self.reader_goes, self.owner_goes, self.loads, self.sends, self.comes]
        over: dict[int, None] = {}
        while len(over) < 2:
            able = [at for at in range(2) if at not in over]
            able += [at for at in range(2, 5) if parts[at].jobs]  # type: ignore[union-attr]
            at = able[self.choices.pick(len(able))]
            if at >= 2:
                parts[at]._do()  # type: ignore[union-attr]
            elif not parts[at]():  # type: ignore[operator]
                over[at] = None
        return self.read == [[100 * at + row for row in range(4)] for at in range(self.layers)]

    def reader_goes(self) -> bool:
        return next(self.reader, self) is None

    def owner_goes(self) -> bool:
        return next(self.owner, self) is None

    def _pump(self) -> None:
        if self.sends.jobs:
            self.sends._do()
        elif not self.owner_goes():
            raise Bug("the owner has done all its work, and the reader waits for more")

    def _owner(self) -> Program:
        stream = Stream("load", self.loads)
        for layer in range(self.layers):
            with stream.writing(self.store.behind(layer, "index"), PAGES) as view:
                self.loads.submit(lambda rows=view.rows["key"], at=layer: _load(rows, at))
        shared = self._shared(OWNER, self.store, self.sends)
        for layer in range(self.layers):
            yield
            shared.ask(layer, "index", _nothing)

    def _reader(self) -> Program:
        shared = self._shared(Rank(0), Store(self.schema.only(set()), 4), self.comes)
        for layer in range(self.layers):
            yield
            (rows,) = shared.ask(layer, "index", _found)
            self.read.append(rows.tolist())

    def _shared(self, rank: Rank, store: Store, queue: LateQueue) -> Shared:
        """A pass of one query, behind two pages that are there."""
        one, table = np.array([2 * PAGE]), np.array([1, 2, 3], np.int32)
        starts, rows = np.array([0, 1]), np.array([3 * PAGE])
        need = needed(one, rows, starts, table, np.array([0, 3]), PAGE)
        wire = Wire(rank, self.box, self._pump)
        owners = Owners((OWNER,) * self.layers)
        broadcasts = Broadcasts(self.schema, owners, store, wire, queue, self.failpoints)
        inner = type("Inner", (), {"page_tokens": PAGE})
        return Shared(
            inner, Stream("compute", InlineQueue()), broadcasts, Exchange(wire),
            Partition.of(starts, 2), need, rows, range(self.layers),
        )  # fmt: skip


def _load(rows: Tensor, layer: int) -> None:
    rows[PAGE : 3 * PAGE, 0] = torch.arange(100 * layer, 100 * layer + 4)


def _found(rows: Rows) -> Found:
    return (rows["key"][PAGE : 3 * PAGE, 0].numpy().copy(),)


def _nothing(rows: Rows) -> Found:
    return ()


def test_one_layer_arrives_in_every_order() -> None:
    runs = [World(1, choices).run() for choices in every(100_000)]
    assert len(runs) > 100 and all(runs)


@pytest.mark.parametrize("failpoint", ["broadcast_before_load", "index_broadcast_skipped"])
def test_the_old_wrong_ways_of_one_layer_are_caught(failpoint: str) -> None:
    runs = [World(1, choices, frozenset([failpoint])).run() for choices in every(100_000)]
    assert not all(runs)


def test_more_layers_than_slots_arrive_in_many_orders() -> None:
    for seed in range(300):
        assert World(4, seeded(seed)).run(), f"replay with seed {seed}"


@pytest.mark.soak
def test_more_layers_than_slots_arrive_in_very_many_orders() -> None:
    for seed in range(300, 30_000):
        assert World(2 + seed % 4, seeded(seed)).run(), f"replay with seed {seed}"


def test_a_slot_that_is_refilled_under_its_reader_is_caught() -> None:
    failpoints = frozenset(["scratch_refilled_under_reader"])
    assert not all(World(4, seeded(seed), failpoints).run() for seed in range(10))
