"""Which pages of a handoff are checked by digest, and where two lists of digests differ. Pure.

Both ends choose by the same rule, so that no choice crosses the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stanchion.device.stream import Pages
from stanchion.kv.schema import Schema

Mode = Literal["off", "sampled", "full"]
Digests = NDArray[np.uint64]
SAMPLED_ONE_IN = 16
# (layer, pages, rows of each page) -> (buffers of the layer by name, pages).
DigestsOf = Callable[[int, Pages, NDArray[np.int32]], Digests]


@dataclass(frozen=True)
class Differs:
    """A page that is not what its writer said it would be."""

    place: int  # which of the handoff's pages, from 0
    layer: int
    buffer: str
    expected: int
    actual: int


@dataclass(frozen=True)
class Check:
    """`digests_of` reads through doors; without it (mode off) nothing is chosen."""

    mode: Mode
    schema: Schema
    digests_of: DigestsOf | None = None

    def chosen(self, number: int, first: int, count: int) -> NDArray[np.int64]:
        """Of prompt pages first, first + 1, ... (`count` of them): which are checked in handoff
        `number`, as places from 0. Every page has its turn."""
        places = np.arange(count if self.digests_of is not None else 0)
        if self.mode == "full":
            return places
        turn: NDArray[np.int64] = places[(places + first + number) % SAMPLED_ONE_IN == 0]
        return turn

    def of_layer(self, layer: int, pages: Pages, rows: NDArray[np.int32]) -> Digests:
        assert self.digests_of is not None
        return self.digests_of(layer, pages, rows)

    def of_all(self, pages: Pages, rows: NDArray[np.int32]) -> Digests:
        """(buffers, pages), in the order of `names`."""
        layers = range(self.schema.layers)
        return np.concatenate([self.of_layer(layer, pages, rows) for layer in layers])

    def names(self) -> list[tuple[int, str]]:
        return sorted((one.layer, one.name) for one in self.schema.buffers)

    def nothing(self, pages: int) -> list[Digests]:
        """Per layer, digests of so many pages, to be filled in."""
        counts = [0] * self.schema.layers
        for one in self.schema.buffers:
            counts[one.layer] += 1
        return [np.zeros((count, pages), np.uint64) for count in counts]

    def difference(
        self, places: Sequence[int] | NDArray[np.int64], expected: Digests, actual: Digests
    ) -> Differs | None:
        if np.array_equal(expected, actual):
            return None
        buffer, column = (int(one) for one in np.argwhere(expected != actual)[0])
        layer, name = self.names()[buffer]
        said, found = int(expected[buffer, column]), int(actual[buffer, column])
        return Differs(int(places[column]), layer, name, said, found)


def rows_of(tokens: int, first_page: int, page_tokens: int) -> NDArray[np.int32]:
    """Rows in each page from `first_page` on, of a prompt of so many tokens."""
    total = -(-tokens // page_tokens)
    before = np.arange(first_page, total) * page_tokens
    return np.minimum(tokens - before, page_tokens).astype(np.int32)
