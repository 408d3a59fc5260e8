"""Collectives through shared memory: every byte, whoever says it, and no wait without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from stanchion.core.errors import Bug
from stanchion.parallel.board import CHUNK_BYTES, CHUNKS, Board, BoardGroup
from stanchion.parallel.group import RankLost
from stanchion.parallel.split import Rank

SIZES = (1, 7, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 3, 64)


@contextmanager
def board(size: int) -> Iterator[Board]:
    made = Board.of(size)
    try:
        yield made
    finally:
        made.close()


def said(at: int) -> Tensor:
    generator = torch.Generator().manual_seed(at)
    return torch.randint(0, 256, (SIZES[at % len(SIZES)],), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_have_what_each_of_them_said(size: int) -> None:
    turns = 4 * len(SIZES)
    wrong: list[tuple[int, int]] = []

    def life(rank: int, shared: Board) -> None:
        group = BoardGroup(shared, Rank(rank), 30.0)
        for at in range(turns):
            root = Rank((at * at) % size)
            memory = said(at) if rank == root else torch.zeros_like(said(at))
            group.broadcast(memory, root)
            if not torch.equal(memory, said(at)):
                wrong.append((rank, at))

    with board(size) as shared:
        lives = [threading.Thread(target=life, args=(rank, shared)) for rank in range(size)]
        for one in lives:
            one.start()
        for one in lives:
            one.join(60)
        assert not any(one.is_alive() for one in lives)
    assert wrong == []


def test_who_says_waits_until_chunks_were_taken() -> None:
    """Otherwise what a slow rank has not read yet would be written over."""
    with board(2) as shared:
        group = BoardGroup(shared, Rank(0), 0.05)
        for _ in range(CHUNKS):
            group.broadcast(torch.ones(8, dtype=torch.uint8), Rank(0))
        with pytest.raises(RankLost):
            group.broadcast(torch.ones(8, dtype=torch.uint8), Rank(0))


def test_nobody_waits_for_ever_for_a_rank_that_says_nothing() -> None:
    with board(2) as shared, pytest.raises(RankLost):
        BoardGroup(shared, Rank(0), 0.05).broadcast(torch.ones(8, dtype=torch.uint8), Rank(1))


def test_memory_with_gaps_is_a_bug() -> None:
    with board(2) as shared, pytest.raises(Bug):
        gaps = torch.zeros(8, 8, dtype=torch.uint8)[:, ::2]
        BoardGroup(shared, Rank(0), 1.0).broadcast(gaps, Rank(0))
