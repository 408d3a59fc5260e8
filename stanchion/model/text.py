"""What the engine asks of a model, and what a model asks of the engine's KV cache.

A model is a text: `forward` takes one ragged batch and opens a door for every row it touches.
Slot p of the draft layer holds f(token p, target hidden of p - 1), slot 0 with a hidden of zeros.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stanchion.device.stream import View
from stanchion.kv.schema import Door, Schema
from stanchion.kv.store import Found, Read, Rows

__all__ = ["Cache", "Found", "Model", "Ragged", "Read", "Rows"]


@dataclass(frozen=True)
class Ragged:
    """The queries of one pass. Request r owns queries starts[r] to starts[r + 1].

    Queries of a request have successive positions, and its context is every row from 0 up to and
    including the query's own position, found through its table: row of position p =
    tables[table_starts[r] + p // page_tokens] * page_tokens + p % page_tokens.
    """

    tokens: NDArray[np.int64]  # (queries,)
    positions: NDArray[np.int64]  # (queries,)
    rows: NDArray[np.int64]  # (queries,) where each query's own KV row is written
    starts: NDArray[np.int64]  # (requests + 1,)
    tables: NDArray[np.int32]  # (pages of all requests,)
    table_starts: NDArray[np.int64]  # (requests + 1,)

    @property
    def requests(self) -> int:
        return len(self.starts) - 1


class Cache(Protocol):
    """The KV of one flight: every access says which layer, which door, and read or write."""

    page_tokens: int

    def writing(self, layer: int, door: Door) -> AbstractContextManager[View[Rows]]:
        """The view has no rows where another rank keeps the layer: then it writes them."""
        ...

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        """What `read` finds in a layer's rows. It runs where they are, which may be elsewhere."""
        ...


class Model(Protocol):
    schema: Schema
    vocabulary: int
    context_max: int
    hidden_width: int

    def forward(self, batch: Ragged, cache: Cache) -> Tensor:
        """Run the target layers; return the hidden after the norm, (queries, hidden_width)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_width) -> float32 (rows, vocabulary)."""
        ...

    def draft(self, batch: Ragged, hidden: Tensor, cache: Cache) -> Tensor:
        """Run the draft layer over (token p, hidden of p - 1); return its hidden after its norm."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor: ...
    def no_hidden(self, rows: int) -> Tensor:
        """What stands for the target hidden before position 0: (rows, hidden_width) zeros."""
        ...
