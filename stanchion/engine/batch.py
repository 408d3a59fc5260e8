"""From pieces to the ragged arrays that a model reads. Vectorised: no loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.device.stream import Pages
from stanchion.model.text import Ragged

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Written:
    """Which pages a pass writes, and up to which row each is then in place."""

    pages: Pages
    rows: NDArray[np.int32]


@dataclass(frozen=True)
class Tables:
    """The page tables of a flight's requests, end to end."""

    pages: Pages
    starts: Ints
    page_tokens: int

    @staticmethod
    def of(tables: Sequence[Pages], page_tokens: int) -> Tables:
        starts = np.zeros(len(tables) + 1, np.int64)
        np.cumsum([len(table) for table in tables], out=starts[1:])
        return Tables(np.concatenate(tables), starts, page_tokens)

    def ragged(
        self, tokens: Ints, firsts: Ints, counts: Ints, redone: Ints | None = None
    ) -> Ragged:
        """Request r's queries are firsts[r], ... (counts[r] of them); the `redone` first of them
        write to the null page, since their rows are in place and may be shared."""
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(starts[-1]) - starts[owner]
        positions = firsts[owner] + inside
        page = self.pages[self.starts[owner] + positions // self.page_tokens].astype(np.int64)
        rows = page * self.page_tokens + positions % self.page_tokens
        if redone is not None:
            rows = np.where(inside < redone[owner], rows % self.page_tokens, rows)
        return Ragged(tokens, positions, rows, starts, self.pages, self.starts)

    def written(self, firsts: Ints, counts: Ints) -> Written:
        """The pages that rows firsts[r] to firsts[r] + counts[r] - 1 lie in, filled up to there."""
        ends = firsts + counts
        low, high = firsts // self.page_tokens, -(-ends // self.page_tokens)
        spans = np.where(counts > 0, high - low, 0)
        owner = np.repeat(np.arange(len(counts)), spans)
        begins = np.cumsum(spans) - spans
        place = low[owner] + np.arange(len(owner)) - begins[owner]
        rows = np.minimum(ends[owner] - place * self.page_tokens, self.page_tokens)
        return Written(self.pages[self.starts[owner] + place], rows.astype(np.int32))
