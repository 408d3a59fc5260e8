"""Where bytes lie, and which of them a write moves: against a loop over rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.errors import Bug
from stanchion.device.kernels.spans import LINE, STREAMED_BYTES, copy_spans, copy_spans_plain
from stanchion.kv.arena import Arena
from stanchion.kv.layout import ALIGNMENT, Layout, spans
from stanchion.kv.schema import Buffer, Schema

TOKENS = 4


def schema(page_tokens: int = TOKENS, key_width: int = 7) -> Schema:
    """Two layers; the second shares the first's index. Declared in no particular order."""
    return Schema(
        "test", page_tokens, 2, False,
        (
            Buffer("latent", 1, "attend", "bfloat16", 5),
            Buffer("key", 0, "index", "float8_e4m3fn", key_width),
            Buffer("latent", 0, "attend", "bfloat16", 5),
            Buffer("scale", 0, "index", "float32", 1),
        ),
    )  # fmt: skip


def test_buffers_are_in_one_order_apart_and_aligned() -> None:
    layout = Layout.of(schema(), 300)
    assert list(layout.buffers) == [(0, "key"), (0, "latent"), (0, "scale"), (1, "latent")]
    end = 0
    for key, place in layout.buffers.items():
        assert place.offset >= end and place.offset % ALIGNMENT == 0
        end = place.offset + layout.bytes_of(key)
    assert end <= layout.total


def test_what_differs_is_named() -> None:
    ours = Layout.of(schema(), 3)
    assert ours.differences(Layout.of(schema(), 9)) == []
    assert ours.differences(Layout.of(schema(key_width=8), 3)) == [
        "buffer key of layer 0: 7 bytes a row here, 8 bytes a row there"
    ]
    assert ours.differences(Layout.of(schema(page_tokens=8), 3)) == ["page_tokens: 4 here, 8 there"]
    fewer = Schema("test", TOKENS, 1, False, schema().buffers[1:])
    assert ours.differences(Layout.of(fewer, 3)) == [
        "buffer latent of layer 1: 10 bytes a row here, absent there"
    ]


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, int, list[int], list[int], int, int]:
    pools = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    count = draw(st.integers(1, min(pools)))
    source = draw(st.permutations(range(pools[0])))[:count]
    destination = draw(st.permutations(range(pools[1])))[:count]
    if draw(st.booleans()):
        source, destination = sorted(source), sorted(destination)
    return *pools, source, destination, draw(st.integers(1, TOKENS)), draw(st.integers(0, 1))


@given(writes())
@settings(deadline=None)  # the first call may compile
def test_spans_move_the_named_rows_and_no_others(
    write: tuple[int, int, list[int], list[int], int, int],
) -> None:
    pages_here, pages_there, source, destination, last_rows, layer = write
    ours, theirs = Layout.of(schema(), pages_here), Layout.of(schema(), pages_there)
    random = np.random.default_rng(7)
    here = random.integers(0, 256, ours.total, np.uint8)
    before = random.integers(0, 256, theirs.total, np.uint8)
    wanted = before.copy()
    for key in ours.of_layer(layer):
        size = ours.buffers[key].row_bytes
        for at, (page, place) in enumerate(zip(source, destination, strict=True)):
            for row in range(TOKENS if at < len(source) - 1 else last_rows):
                start = ours.buffers[key].offset + (page * TOKENS + row) * size
                end = theirs.buffers[key].offset + (place * TOKENS + row) * size
                wanted[end : end + size] = here[start : start + size]
    found = spans(
        ours, theirs, layer, np.array(source, np.int32), np.array(destination, np.int32), last_rows
    )
    for copy in (copy_spans, copy_spans_plain):
        there = before.copy()
        copy(here, there, found.source, found.destination, found.bytes)
        assert np.array_equal(there, wanted)
    runs = 1 + sum(
        (source[i] - source[i - 1], destination[i] - destination[i - 1]) != (1, 1)
        for i in range(1, len(source))
    )
    assert len(found.bytes) == runs * len(ours.of_layer(layer))


@pytest.mark.parametrize(
    ("source", "destination", "last_rows", "layer"),
    [
        ([], [], 1, 0),
        ([1], [1, 2], 1, 0),
        ([1], [1], 0, 0),
        ([1], [1], TOKENS + 1, 0),
        ([9], [1], 1, 0),
        ([1], [5], 1, 0),
        ([1], [-1], 1, 0),
        ([1, 2], [3, 3], 1, 0),
        ([1], [1], 1, 2),
    ],
)
def test_a_write_that_leaves_its_pool_is_refused(
    source: list[int], destination: list[int], last_rows: int, layer: int
) -> None:
    ours, theirs = Layout.of(schema(), 9), Layout.of(schema(), 5)
    with pytest.raises(Bug):
        spans(
            ours, theirs, layer,
            np.array(source, np.int32), np.array(destination, np.int32), last_rows,
        )  # fmt: skip


@pytest.mark.parametrize("shift", [0, 1, 8, 63, 64])
@pytest.mark.parametrize("size", [LINE * 9, LINE * 9 + 1, LINE - 1])
def test_large_copies_are_right_at_any_alignment(shift: int, size: int) -> None:
    """Stored past the caches where that can be done, and plainly elsewhere; nothing beside it."""
    random = np.random.default_rng(size + shift)
    count = STREAMED_BYTES // size + 1
    source = random.integers(1, 256, count * (size + 7), np.uint8)
    here = random.permutation(count).astype(np.int64) * (size + 7)
    memory = Arena.private(count * (size + LINE) + 2 * LINE).memory
    there = random.permutation(count).astype(np.int64) * (-(-size // LINE) * LINE) + shift
    sizes = np.full(count, size, np.int64)
    wanted = memory.copy()
    copy_spans_plain(source, wanted, here, there, sizes)
    copy_spans(source, memory, here, there, sizes)
    assert np.array_equal(memory, wanted)


def test_spans_outside_memory_are_refused() -> None:
    memory = np.zeros(100, np.uint8)
    one = np.array([90], np.int64)
    for here, there, size in ((one, one - 90, 20), (one - 90, one, 20), (one - 91, one, 1)):
        with pytest.raises(Bug):
            copy_spans(memory, memory.copy(), here, there, np.array([size], np.int64))
