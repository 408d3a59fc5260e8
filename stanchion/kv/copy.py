"""Copies between the device's pool and the host arena, on streams of their own.

The host arena is page-first: slot s holds one page whole, its layers in order, and of each layer
the buffers behind the index door before those behind the attend door. A load opens the door of
each (layer, door) and goes in that order, so that a reader waits for what it reads and no more. A
save reads through all doors of its pages. Jobs run on the queues' threads; what they have done is
looked at once their mark has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stanchion.device.kernels.digest import row_digests
from stanchion.device.kernels.spans import copy_spans, span_copy
from stanchion.device.stream import JobQueue, Mark, Pages, Stream
from stanchion.kv.copies import Loading, Spill
from stanchion.kv.layout import Key, Layout, Offsets, Place
from stanchion.kv.schema import DOORS, Door, Schema
from stanchion.kv.store import Store

Bytes = NDArray[np.uint8]
Mode = Literal["off", "sampled", "full"]
SAMPLED_ONE_IN = 16
Delays = Mapping[tuple[int, Door], float]  # seconds


@dataclass(frozen=True)
class Slots:
    """Where each buffer lies in a slot."""

    page_bytes: int
    buffers: Mapping[Key, Place]

    @classmethod
    def of(cls, schema: Schema) -> Slots:
        end = 0
        buffers: dict[Key, Place] = {}
        for layer in range(schema.layers):
            for door in DOORS:
                for one in sorted(schema.behind(layer, door), key=lambda one: one.name):
                    buffers[layer, one.name] = Place(end, one.row_bytes)
                    end += one.row_bytes * schema.page_tokens
        return cls(end, buffers)

    def spans(
        self, layout: Layout, keys: Sequence[Key], slots: Pages, pages: Pages
    ) -> tuple[Offsets, Offsets, Offsets]:
        """(in the host arena, in the pool, bytes) of these buffers of each page."""
        row_bytes = np.array([layout.buffers[key].row_bytes for key in keys], np.int64)
        inside = np.array([self.buffers[key].offset for key in keys], np.int64)
        base = np.array([layout.buffers[key].offset for key in keys], np.int64)
        sizes = row_bytes * layout.page_tokens
        host = slots.astype(np.int64)[:, None] * self.page_bytes + inside
        pool = pages.astype(np.int64)[:, None] * sizes + base
        return host.ravel(), pool.ravel(), np.tile(sizes, len(slots))


@dataclass(frozen=True)
class Checked:
    """Places of lifts whose digests are checked, and what they must be, (buffers, places)."""

    lifts: list[tuple[Loading, int]]
    pages: Pages
    expected: NDArray[np.uint64]


class StoreCopier:
    """`delays` holds a load back before it copies, for the lab; `sleep` is how. `left_out` are the
    (layer, door) that a load forgets, for the lab as well."""

    def __init__(
        self,
        store: Store,
        host: Bytes,
        load: JobQueue,
        save: JobQueue,
        check: Mode = "off",
        digests: bool = False,
        delays: Delays | None = None,
        sleep: Callable[[float], None] | None = None,
        left_out: frozenset[tuple[int, Door]] = frozenset(),
    ) -> None:
        self.slots = Slots.of(store.schema)
        self._store = store
        self._host = host
        self._load = Stream("load", load)
        self._save = Stream("spill", save)
        self._jobs = load, save
        self._check = check
        self._digests = digests or check != "off"
        self._delays = delays or {}
        self._sleep = sleep
        self._left_out = left_out
        self._loaded: dict[int, Mark] = {}  # by id of the lift
        self._saved: dict[int, Mark] = {}
        schema = store.schema
        self._names = sorted((one.layer, one.name) for one in schema.buffers)
        self._doors = [
            (layer, door, [(layer, one.name) for one in behind])
            for layer in range(schema.layers)
            for door in DOORS
            if (behind := schema.behind(layer, door))
        ]

    # ---- host -> device ---------------------------------------------------------------------

    def load(self, lifts: Sequence[Loading]) -> None:
        slots = np.concatenate([one.slots for one in lifts])
        pages = np.concatenate([one.pages for one in lifts])
        checked = self._checked(lifts)
        queue, layout, memory = self._jobs[0], self._store.layout, self._store.arena.memory
        for layer, door, keys in self._doors:
            with self._load.writing(self._store.behind(layer, door), pages):
                if (delay := self._delays.get((layer, door))) and self._sleep is not None:
                    queue.submit(partial(self._sleep, delay))
                if (layer, door) not in self._left_out:
                    host, pool, sizes = self.slots.spans(layout, keys, slots, pages)
                    # Ready made: what the thread holds the interpreter for, compute waits for.
                    queue.submit(span_copy(self._host, memory, host, pool, sizes))
                    if checked.lifts:
                        queue.submit(partial(self._compare, keys, checked))
        for one in lifts:
            self._loaded[id(one)] = queue.mark()

    def _compare(self, keys: list[Key], checked: Checked) -> None:
        """On the load stream's thread, once these buffers are there."""
        for key in keys:
            actual = self._digest(key, checked.pages)
            for at in np.flatnonzero(actual != checked.expected[self._names.index(key)]):
                lift, place = checked.lifts[at]
                lift.bad.append(place)

    def _checked(self, lifts: Sequence[Loading]) -> Checked:
        chosen = [
            (lift, place)
            for lift in lifts
            for place, record in enumerate(lift.records)
            if record.digests and self._chosen(record.key)
        ]
        said = [np.frombuffer(lift.records[at].digests, "<u8") for lift, at in chosen]
        none = np.zeros((len(self._names), 0), np.uint64)
        expected = np.stack(said, 1).astype(np.uint64) if said else none
        pages = np.array([lift.pages[at] for lift, at in chosen], np.int32)
        return Checked(chosen, pages, expected)

    def _chosen(self, key: bytes) -> bool:
        """Is the page of this key checked when it is read from the host?"""
        return self._check == "full" or (self._check == "sampled" and not key[0] % SAMPLED_ONE_IN)

    def loaded(self, lift: Loading) -> bool:
        return self._passed(0, self._loaded, id(lift))

    # ---- device -> host ---------------------------------------------------------------------

    def save(self, spill: Spill) -> None:
        queue = self._jobs[1]
        with ExitStack() as doors:
            for layer, door, _ in self._doors:
                guarded = self._store.behind(layer, door)
                doors.enter_context(self._save.reading(guarded, spill.pages))
            queue.submit(partial(self._take, spill))
        self._saved[id(spill)] = queue.mark()

    def _take(self, spill: Spill) -> None:
        """On the spill stream's thread."""
        layout, memory = self._store.layout, self._store.arena.memory
        if self._digests:
            every = np.stack([self._digest(key, spill.pages) for key in self._names], 1)
            spill.digests = [one.tobytes() for one in every.astype("<u8")]
        host, pool, sizes = self.slots.spans(layout, self._names, spill.slots, spill.pages)
        copy_spans(memory, self._host, pool, host, sizes)

    def saved(self, spill: Spill) -> bool:
        return self._passed(1, self._saved, id(spill))

    def finish(self, spill: Spill) -> None:
        self._jobs[1].finish(self._saved[id(spill)])

    @property
    def load_queue(self) -> JobQueue:
        return self._jobs[0]

    @property
    def save_queue(self) -> JobQueue:
        return self._jobs[1]

    # ---- both -------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        return len(self._loaded) + len(self._saved)

    def close(self) -> None:
        for queue in self._jobs:
            queue.close()

    def _passed(self, at: int, marks: dict[int, Mark], number: int) -> bool:
        if not self._jobs[at].passed(marks[number]):
            return False
        del marks[number]
        return True

    def _digest(self, key: Key, pages: Pages) -> NDArray[np.uint64]:
        place, layout = self._store.layout.buffers[key], self._store.layout
        rows = np.full(len(pages), layout.page_tokens, np.int32)
        memory = self._store.arena.memory
        return row_digests(memory, place.offset, place.row_bytes, layout.page_tokens, pages, rows)
