"""Who computes what, who keeps what, and what a pass needs: pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.errors import Bug
from stanchion.kv.schema import Buffer, Schema
from stanchion.model import hashed
from stanchion.parallel import split
from stanchion.parallel.layersplit import Layer, Owners, needed
from stanchion.parallel.split import SPLITS, Partition, Split

COUNTS = st.lists(st.integers(0, 70), min_size=1, max_size=9)


def starts_of(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int64)


@given(COUNTS, st.integers(1, 8), st.sampled_from(SPLITS))
def test_every_query_is_one_ranks(counts: list[int], ranks: int, how: Split) -> None:
    starts = starts_of(counts)
    one = Partition.of(starts, ranks, how)
    assert sorted(one.order.tolist()) == list(range(starts[-1]))
    for query in range(starts[-1]):
        assert one.shares[one.owner[query]].queries[one.local[query]] == query


@given(COUNTS, st.integers(1, 8), st.sampled_from(SPLITS))
def test_a_lane_is_a_run_of_one_request(counts: list[int], ranks: int, how: Split) -> None:
    starts = starts_of(counts)
    for share in Partition.of(starts, ranks, how).shares:
        for at, request in enumerate(share.requests):
            lane = share.queries[share.starts[at] : share.starts[at + 1]]
            assert len(lane) and (np.diff(lane) == 1).all()
            assert starts[request] <= lane[0] and lane[-1] < starts[request + 1]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_balances_the_triangle(ranks: int) -> None:
    """Work of a query: the rows that it may read. Contiguous runs give the last rank most."""
    starts = starts_of([3670])

    def worst(how: Split) -> float:
        shares = Partition.of(starts, ranks, how).shares
        work = [float((one.queries + 1).sum()) for one in shares]
        return max(work) * ranks / sum(work)

    assert worst("zigzag") < 1.01
    assert worst("interleaved") < 1.02
    assert worst("contiguous") > 1.4


def test_short_requests_do_not_all_fall_to_one_rank() -> None:
    shares = Partition.of(starts_of([1] * 8), 4).shares
    assert [len(one) for one in shares] == [2, 2, 2, 2]


def test_a_map_that_is_no_bijection_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ([(0, 3)], [(0, 5)]):  # queries that nobody has; that all have
        monkeypatch.setattr(split, "_runs", lambda *_, runs=wrong: list(runs))
        with pytest.raises(Bug, match="partition"):
            Partition.of(np.array([0, 5], np.int64), 2)


# ---- owners ---------------------------------------------------------------------------------


def schema(sizes: list[int]) -> Schema:
    buffers = tuple(
        Buffer("latent_rope", at, "attend", "int64", one) for at, one in enumerate(sizes)
    )
    return Schema("test", 16, len(sizes), True, buffers)


@given(st.lists(st.integers(1, 30), min_size=4, max_size=80), st.integers(1, 4))
def test_every_layer_has_one_owner_and_bytes_are_level(sizes: list[int], ranks: int) -> None:
    whole = schema(sizes)
    owners = Owners.of(whole, ranks)
    parts = [owners.schema(whole, rank) for rank in range(ranks)]  # type: ignore[arg-type]
    kept = sorted(one.layer for part in parts for one in part.buffers)
    assert kept == list(range(len(sizes)))
    bytes_kept = [part.page_bytes for part in parts]
    assert max(bytes_kept) - min(bytes_kept) <= max(sizes) * 8 * 16
    assert owners.page_bytes(whole) == max(bytes_kept)


def test_the_published_models_fit() -> None:
    """78 layers and a draft layer, of which 21 have an indexer (GLM-5.2) or all (GLM-5)."""
    for indexed in (21, 79):
        sizes = [72 + (17 if at < indexed else 0) for at in range(79)]
        for ranks in (2, 4, 8):
            whole = schema(sizes)
            capacity = whole.page_bytes / Owners.of(whole, ranks).page_bytes(whole)
            assert capacity >= 0.95 * ranks, (indexed, ranks, capacity)


def test_more_ranks_than_layers_is_a_bug() -> None:
    with pytest.raises(Bug, match="layers"):
        Owners.of(hashed.schema(16, True), 5)
    assert Owners.of(hashed.schema(16, True), 4).of_layer(Layer(3)) in range(4)


# ---- what a pass needs ----------------------------------------------------------------------


def test_only_pages_with_earlier_rows_are_sent_and_each_once() -> None:
    """Two requests share pages 7 and 3; one goes on within page 9, the other begins a page."""
    page_tokens = 4
    tables = np.array([7, 3, 9, 5, 7, 3, 8, 2], np.int32)
    table_starts = np.array([0, 4, 8], np.int64)
    positions = np.array([10, 11, 12, 8, 9], np.int64)
    starts = np.array([0, 3, 5], np.int64)
    rows = np.array([9 * 4 + 2, 9 * 4 + 3, 5 * 4, 8 * 4, 8 * 4 + 1], np.int64)
    need = needed(positions, rows, starts, tables, table_starts, page_tokens)
    assert sorted(need.pages[: need.prefix].tolist()) == [3, 7, 9]
    assert sorted(need.pages[need.prefix :].tolist()) == [5, 8]
    back = np.concatenate([[0], need.pages])  # scratch page -> pool page
    assert (back[need.rows // page_tokens] * page_tokens + need.rows % page_tokens == rows).all()
    used = [0, 1, 2, 3, 4, 5, 6]  # page 2 is for later, and has no place
    assert back[need.tables[used]].tolist() == tables[used].tolist()
    assert need.tables[7] == 0


def test_a_position_that_is_redone_needs_its_page() -> None:
    """Its row is in place and goes to the null page; what it reads must be sent."""
    tables, table_starts = np.array([6, 4], np.int32), np.array([0, 2], np.int64)
    need = needed(
        np.array([3], np.int64), np.array([3], np.int64), np.array([0, 1], np.int64),
        tables, table_starts, 4,
    )  # fmt: skip
    assert need.pages.tolist() == [6] and need.prefix == 1
    assert need.rows.tolist() == [3] and need.written.tolist() == [0]
