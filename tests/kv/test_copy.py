"""What a tier moves is what the schema says: for any schema, all of a page comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.kv.copies import Loading, Spill
from stanchion.kv.copy import Slots, StoreCopier
from stanchion.kv.hosttier import HostTier
from stanchion.kv.pages import PagePool
from stanchion.kv.record import Record
from stanchion.kv.schema import DOORS, DTYPE_BYTES, Buffer, Schema
from stanchion.kv.store import Store
from stanchion.sim.late import LateQueue

PAGES = 9
NAMES = ("latent", "rope", "index_key", "scale", "draft_state")


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Layers own what they like; widths, types and doors are anything."""
    layers = draw(st.integers(1, 4))
    buffers = []
    for layer in range(layers):
        for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)):
            kind = draw(st.sampled_from(sorted(DTYPE_BYTES)))
            buffers.append(
                Buffer(name, layer, draw(st.sampled_from(DOORS)), kind, draw(st.integers(1, 9)))
            )
    return Schema("any", draw(st.integers(1, 5)), layers, False, tuple(buffers))


class Board:
    def __init__(self, schema: Schema, check: str = "off", digests: bool = False) -> None:
        self.schema = schema
        self.store = Store(schema, PAGES)
        self.tier = HostTier(PAGES - 1)
        self.host = np.zeros(schema.page_bytes * PAGES, np.uint8)
        self.queues = LateQueue(), LateQueue()
        self.copier = StoreCopier(self.store, self.host, *self.queues, check, digests)  # type: ignore[arg-type]
        rng = np.random.default_rng(1)
        memory = self.store.arena.memory
        memory[:] = rng.integers(0, 256, len(memory), np.uint8)
        self.before = memory.copy()

    def spill(self, pages: list[int]) -> list[Record]:
        device = PagePool(PAGES)
        slots = self.tier.pool.take(len(pages), "spill")
        records = [Record(bytes([page]) * 32, b"", b"", b"") for page in pages]
        spill = Spill(records, np.array(pages, np.int32), slots.pages, [])
        self.copier.save(spill)
        assert not self.copier.saved(spill)
        self.copier.finish(spill)
        assert self.copier.saved(spill)
        assert device.audit() == []
        self.slots = slots.pages
        return [
            Record(one.key, b"", b"", digests)
            for one, digests in zip(records, spill.digests or [b""] * len(records))
        ]

    def lift(self, records: list[Record], pages: list[int]) -> Loading:
        kept = [self.tier.keep(one, int(slot)) for one, slot in zip(records, self.slots)]
        lift = Loading([one.record for one in kept], np.array(pages, np.int32), self.slots)
        self.copier.load([lift])
        self.queues[0].finish(self.queues[0].mark())
        assert self.copier.loaded(lift)
        return lift

    def page(self, memory: np.ndarray, page: int) -> list[bytes]:
        found = []
        for place in self.store.layout.buffers.values():
            size = place.row_bytes * self.schema.page_tokens
            first = place.offset + page * size
            found.append(memory[first : first + size].tobytes())
        return found


@given(schemas(), st.permutations(range(1, PAGES)), st.permutations(range(1, PAGES)))
@settings(max_examples=60, deadline=None)
def test_every_buffer_of_a_page_comes_back(
    schema: Schema, there: list[int], back: list[int]
) -> None:
    board = Board(schema, "full")
    records = board.spill(there[:4])
    board.store.arena.memory.fill(0x5A)
    lift = board.lift(records, back[:4])
    for source, target in zip(there[:4], back[:4]):
        assert board.page(board.store.arena.memory, target) == board.page(board.before, source)
    untouched = set(range(PAGES)) - set(back[:4])
    for page in untouched:
        assert set(b"".join(board.page(board.store.arena.memory, page))) <= {0x5A}
    assert not lift.bad


@given(schemas(), st.data())
@settings(max_examples=40, deadline=None)
def test_every_byte_of_a_page_is_checked(schema: Schema, data: st.DataObject) -> None:
    board = Board(schema, "full")
    records = board.spill([3, 5])
    at = data.draw(st.integers(0, schema.page_bytes - 1))
    board.host[int(board.slots[1]) * schema.page_bytes + at] ^= 1
    assert set(board.lift(records, [1, 2]).bad) == {1}


@pytest.mark.parametrize("check", ["off", "sampled", "full"])
def test_how_much_is_checked_is_as_asked(check: str) -> None:
    """One page in 16, by its key, if sampled: keys are digests, so all prefixes have their turn."""
    schema = Schema("one", 4, 1, False, (Buffer("row", 0, "attend", "int64", 1),))
    board = Board(schema, check)
    chosen = [page for page in range(256) if board.copier._chosen(bytes([page]) * 32)]
    assert len(chosen) == {"off": 0, "sampled": 16, "full": 256}[check]


def test_a_slot_holds_a_page_whole_and_nothing_twice() -> None:
    schema = Schema(
        "two", 4, 2, False,
        (
            Buffer("latent", 0, "attend", "bfloat16", 3),
            Buffer("index_key", 0, "index", "float8_e4m3fn", 5),
            Buffer("latent", 1, "attend", "bfloat16", 3),
        ),
    )  # fmt: skip
    slots = Slots.of(schema)
    assert slots.page_bytes == schema.page_bytes
    spans = sorted(
        (place.offset, place.offset + 4 * place.row_bytes) for place in slots.buffers.values()
    )
    assert [end for _, end in spans[:-1]] == [first for first, _ in spans[1:]]
    assert spans[0][0] == 0 and spans[-1][1] == schema.page_bytes
    assert slots.buffers[0, "index_key"].offset < slots.buffers[0, "latent"].offset
