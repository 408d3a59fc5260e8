"""Who computes which queries of a pass.

A pass is ragged: request r has queries starts[r] to starts[r + 1], of successive positions. Each
rank gets a share of every request, in lanes: runs of successive queries of one request. A lane's
context is all rows up to each query's own position, so a lane is to a model what a request is.

There is one partition of a pass, and it is a bijection between its queries and the ranks' local
rows. Global and local numbers are of two types; nothing else turns one into the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug

Ints = NDArray[np.int64]
Rank = NewType("Rank", int)
Queries = NewType("Queries", Ints)  # numbers in the whole pass
Locals = NewType("Locals", Ints)  # rows of one rank's own arrays
Split = Literal["zigzag", "interleaved", "contiguous"]
SPLITS: tuple[Split, ...] = ("zigzag", "interleaved", "contiguous")
RUN = 8  # queries of one lane where lanes are dealt out in turn


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a pass."""

    queries: Queries  # (local rows,)
    starts: Ints  # (lanes + 1,)
    requests: Ints  # (lanes,) the request that each lane is of

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True, eq=False)
class Partition:
    shares: tuple[Share, ...]  # by rank
    owner: Ints  # (queries,) the rank that computes it
    local: Locals  # (queries,) and its row there

    @classmethod
    def of(cls, starts: Ints, ranks: int, how: Split = "zigzag") -> Partition:
        """Raise Bug unless every query is some rank's, and one's alone."""
        shares = tuple(_share(starts, Rank(rank), ranks, how) for rank in range(ranks))
        owner = np.full(starts[-1], -1, np.int64)
        local = np.full(starts[-1], -1, np.int64)
        for rank, share in enumerate(shares):
            owner[share.queries] = rank
            local[share.queries] = np.arange(len(share))
        if sum(len(one) for one in shares) != len(owner) or (owner < 0).any():
            raise Bug(f"a split of {len(owner)} queries over {ranks} ranks is not a partition")
        return cls(shares, owner, Locals(local))

    @property
    def order(self) -> Queries:
        """Which query each row is, once all ranks' rows lie end to end."""
        return Queries(np.concatenate([one.queries for one in self.shares]))


def _share(starts: Ints, rank: Rank, ranks: int, how: Split) -> Share:
    firsts, pasts, requests = [], [], []
    for request, (first, past) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        # Short requests fall to the last pieces; each request begins with another rank.
        turned = (rank + request) % ranks
        for low, high in _merged(_runs(past - first, turned, ranks, how)):
            firsts.append(first + low)
            pasts.append(first + high)
            requests.append(request)
    lanes = [np.arange(first, past) for first, past in zip(firsts, pasts)]
    ends = np.cumsum([0, *(len(one) for one in lanes)])
    every = np.concatenate(lanes) if lanes else np.empty(0, np.int64)
    return Share(Queries(every.astype(np.int64)), ends.astype(np.int64), np.array(requests, int))


def _runs(count: int, rank: int, ranks: int, how: Split) -> list[tuple[int, int]]:
    """This rank's runs of `count` queries, in order; some may be empty."""
    if how == "interleaved":
        run = max(1, min(RUN, count // ranks))
        return [(low, min(low + run, count)) for low in range(rank * run, count, ranks * run)]
    pieces = ranks if how == "contiguous" else 2 * ranks
    mine = [rank] if how == "contiguous" else [rank, pieces - 1 - rank]
    return [(count * at // pieces, count * (at + 1) // pieces) for at in mine]


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without the empty ones; neighbours as one."""
    merged: list[tuple[int, int]] = []
    for low, high in runs:
        if low == high:
            continue
        if merged and merged[-1][1] == low:
            merged[-1] = merged[-1][0], high
        else:
            merged.append((low, high))
    return merged
