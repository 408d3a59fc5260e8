"""LayerSplit: which rank keeps which layer, and which pages of a layer a pass needs.

A layer's rows are stored by one rank, its owner. What a pass reads of it lies in scratch on every
rank, batch-sized: page 0 is scratch's null page, then come the pages that have rows from earlier
passes (the owner broadcasts those), then the pages that only this pass writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.device.stream import Pages
from stanchion.kv.schema import Schema
from stanchion.parallel.split import Rank

Ints = NDArray[np.int64]
Layer = NewType("Layer", int)
ScratchPages = NewType("ScratchPages", NDArray[np.int32])  # pages of scratch, not of any pool


@dataclass(frozen=True)
class Owners:
    """The owner of each layer, draft layer included: balanced by the bytes of a row."""

    ranks: tuple[Rank, ...]  # by layer

    @classmethod
    def of(cls, schema: Schema, ranks: int) -> Owners:
        """The heaviest layer first, to the rank that has least. Raise Bug for a rank with none."""
        if ranks > schema.layers:
            raise Bug(f"{schema.layers} layers for {ranks} ranks")
        sizes = [
            sum(one.row_bytes for one in schema.buffers if one.layer == layer)
            for layer in range(schema.layers)
        ]
        kept = [0] * ranks
        owners = [Rank(0)] * schema.layers
        for layer in sorted(range(schema.layers), key=lambda layer: (-sizes[layer], layer)):
            rank = min(range(ranks), key=lambda rank: (kept[rank], rank))
            owners[layer] = Rank(rank)
            kept[rank] += sizes[layer]
        return cls(tuple(owners))

    def of_layer(self, layer: Layer) -> Rank:
        return self.ranks[layer]

    def schema(self, whole: Schema, rank: Rank) -> Schema:
        """What this rank's pool, tiers and transfers are made of."""
        return whole.only({layer for layer, owner in enumerate(self.ranks) if owner == rank})

    def page_bytes(self, whole: Schema) -> int:
        """Of one page on the rank that keeps most: it bounds how many pages all have."""
        ranks = sorted(set(self.ranks))
        return max(self.schema(whole, rank).page_bytes for rank in ranks)


@dataclass(frozen=True, eq=False)
class Needed:
    """The pages of a pass, and where they lie in scratch."""

    pages: Pages  # (pages,) of the pool: scratch page i + 1 is pages[i]
    prefix: int  # the first so many have rows that the owner must send
    tables: ScratchPages  # the pass's tables, in scratch
    rows: Ints  # (queries,) where each query's row is written, in scratch
    written: ScratchPages  # scratch pages that the pass writes

    @property
    def sent(self) -> ScratchPages:
        return ScratchPages(np.arange(1, self.prefix + 1, dtype=np.int32))

    @property
    def every(self) -> ScratchPages:
        return ScratchPages(np.arange(len(self.pages) + 1, dtype=np.int32))


def needed(
    positions: Ints, rows: Ints, starts: Ints, tables: Pages, table_starts: Ints, page_tokens: int
) -> Needed:
    """Of a ragged pass in a pool's pages (see model/text). Rows on the null page are not kept."""
    before, after = [], []
    for request in range(len(starts) - 1):
        first, past = starts[request], starts[request + 1]
        fresh = np.flatnonzero(rows[first:past] >= page_tokens)  # not on the null page
        last = int(positions[past - 1]) + 1
        kept = int(positions[first + fresh[0]]) if len(fresh) else last
        table = tables[table_starts[request] : table_starts[request + 1]]
        before.append(table[: -(-kept // page_tokens)])
        after.append(table[: -(-last // page_tokens)])
    sent = np.unique(np.concatenate(before))
    new = np.setdiff1d(np.concatenate(after), sent)
    pages = np.concatenate([sent, new]).astype(np.int32)
    place = np.zeros(int(max(pages.max(initial=0), tables.max(initial=0))) + 1, np.int32)
    place[pages] = np.arange(1, len(pages) + 1, dtype=np.int32)
    at = place[rows // page_tokens].astype(np.int64)
    return Needed(
        pages,
        len(sent),
        ScratchPages(place[tables]),
        at * page_tokens + rows % page_tokens,
        ScratchPages(np.unique(at).astype(np.int32)),
    )
