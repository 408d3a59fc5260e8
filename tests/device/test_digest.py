"""A page's digest: the plain one's bits, of bytes and not of places; every flipped bit shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.errors import Bug
from stanchion.device.kernels.digest import row_digests, row_digests_plain

TOKENS = 5
WIDTHS = st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 132, 656]))


def pool(seed: int, width: int, pages: int, offset: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, offset + width * TOKENS * pages, np.uint8)


@given(st.integers(0, 99), WIDTHS, st.integers(0, 65), st.lists(st.integers(0, TOKENS), max_size=4))
@settings(deadline=None)  # the first call may compile
def test_it_is_the_plain_one(seed: int, width: int, offset: int, rows: list[int]) -> None:
    memory = pool(seed, width, 6, offset)
    pages = np.random.default_rng(seed).permutation(6).astype(np.int32)[: len(rows)]
    given_rows = np.array(rows, np.int32)
    kernel = row_digests(memory, offset, width, TOKENS, pages, given_rows)
    plain = row_digests_plain(memory, offset, width, TOKENS, pages, given_rows)
    assert kernel.tolist() == plain.tolist()


@given(st.integers(0, 99), WIDTHS, st.integers(1, TOKENS), st.data())
@settings(deadline=None)  # the first call may compile
def test_every_flipped_bit_shows(seed: int, width: int, rows: int, data: st.DataObject) -> None:
    memory = pool(seed, width, 1)
    page, count = np.zeros(1, np.int32), np.array([rows], np.int32)
    before = row_digests(memory, 0, width, TOKENS, page, count)
    flipped = data.draw(st.integers(0, width * TOKENS * 8 - 1))
    memory[flipped // 8] ^= 1 << (flipped % 8)
    changed = row_digests(memory, 0, width, TOKENS, page, count) != before
    assert changed.all() == (flipped < width * rows * 8)


def test_every_bit_of_one_page_shows_and_no_two_alike() -> None:
    width = 67
    memory = pool(3, width, 1)
    page, count = np.zeros(1, np.int32), np.array([TOKENS], np.int32)
    seen = {int(row_digests(memory, 0, width, TOKENS, page, count)[0])}
    for bit in range(memory.size * 8):
        memory[bit // 8] ^= 1 << (bit % 8)
        seen.add(int(row_digests(memory, 0, width, TOKENS, page, count)[0]))
        memory[bit // 8] ^= 1 << (bit % 8)
    assert len(seen) == memory.size * 8 + 1


@given(st.integers(0, 99), WIDTHS)
@settings(deadline=None)  # the first call may compile
def test_it_knows_bytes_and_no_places(seed: int, width: int) -> None:
    memory = pool(seed, width, 2)
    size = width * TOKENS
    memory[size:] = memory[:size]
    moved = np.concatenate([np.zeros(13, np.uint8), memory])
    both, full = np.array([0, 1], np.int32), np.full(2, TOKENS, np.int32)
    here = row_digests(memory, 0, width, TOKENS, both, full)
    there = row_digests(moved, 13, width, TOKENS, both, full)
    assert len({*here.tolist(), *there.tolist()}) == 1


@given(st.integers(0, 99), WIDTHS, st.integers(1, TOKENS))
@settings(deadline=None)  # the first call may compile
def test_rows_are_added_and_have_their_place(seed: int, width: int, rows: int) -> None:
    """The digest of more rows differs by what depends on those rows alone; swapped rows show."""
    memory = pool(seed, width, 2)
    memory[(rows - 1) * width : rows * width] ^= 255
    memory[(TOKENS + rows - 1) * width : (TOKENS + rows) * width] = memory[
        (rows - 1) * width : rows * width
    ]
    both = np.array([0, 1], np.int32)
    less = row_digests(memory, 0, width, TOKENS, both, np.full(2, rows - 1, np.int32))
    more = row_digests(memory, 0, width, TOKENS, both, np.full(2, rows, np.int32))
    added = more - less
    assert added[0] == added[1]
    table = memory[: width * TOKENS].reshape(TOKENS, width)
    if not np.array_equal(table[0], table[-1]):
        table[[0, -1]] = table[[-1, 0]]
        full = np.full(1, TOKENS, np.int32)
        before = row_digests(memory, 0, width, TOKENS, both[:1], full)
        table[[0, -1]] = table[[-1, 0]]
        assert row_digests(memory, 0, width, TOKENS, both[:1], full) != before


def test_a_digest_outside_the_pool_is_refused() -> None:
    memory = np.zeros(100, np.uint8)
    one = np.ones(1, np.int32)
    for pages, rows in ((one * 2, one), (one * -1, one), (one, one * (TOKENS + 1)), (one, -one)):
        with pytest.raises(Bug):
            row_digests(memory, 0, 10, TOKENS, pages, rows)
    with pytest.raises(Bug):
        row_digests(memory, 0, 10, TOKENS, one, np.ones(2, np.int32))
