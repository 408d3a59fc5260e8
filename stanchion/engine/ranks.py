"""Context parallelism: the queries of a pass, computed by several ranks of one worker.

Rank 0 has the engine. To its runner the ranks together are a model: `Ranked` sends each pass to
the others, computes its own share of it, and returns the hidden states of all queries. The others
follow (`engine/follower`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stanchion.core.errors import Bug, ConfigError
from stanchion.core.request import DRAFT_TOKENS_MAX
from stanchion.device.stream import JobQueue, Stream
from stanchion.engine.orders import Pass, encode, said
from stanchion.kv.schema import DOORS, Schema
from stanchion.kv.store import Store
from stanchion.model.text import Cache, Found, Model, Ragged, Rows
from stanchion.parallel.exchange import Exchange, Replicated
from stanchion.parallel.group import Group
from stanchion.parallel.layersplit import Owners, needed
from stanchion.parallel.shared import Broadcasts, Shared
from stanchion.parallel.split import Ints, Partition, Share, Split
from stanchion.parallel.visit import Visiting

Send = Callable[[bytes], None]
FEW = DRAFT_TOKENS_MAX + 1  # queries of a request: a verify window's


@dataclass(frozen=True)
class Ranks:
    """How a worker's ranks work together, as one of them sees it.

    `exchange` is for what is computed, on the engine's thread. `broadcast` is there under
    LayerSplit, and used by the thread of `queue` alone.
    """

    exchange: Group
    split: Split = "zigzag"
    broadcast: Group | None = None
    queue: JobQueue | None = None
    failpoints: frozenset[str] = frozenset()
    slow_s: float = 0.0
    sleep: Callable[[float], None] | None = None
    few: int = FEW

    def schema(self, whole: Schema) -> Schema:
        """What this rank keeps."""
        if self.broadcast is None:
            return whole
        return owners(whole, self.exchange.size).schema(whole, self.exchange.rank)

    def side(self, model: Model, store: Store, compute: Stream) -> Side:
        exchange = Exchange(self.exchange)
        broadcasts = None
        if self.broadcast is not None:
            if self.queue is None:
                raise Bug("LayerSplit without a queue for its broadcasts")
            broadcasts = Broadcasts(
                model.schema, owners(model.schema, self.exchange.size), store, self.broadcast,
                self.queue, self.failpoints, self.slow_s, self.sleep,
            )  # fmt: skip
        return Side(model, self.exchange, exchange, compute, self.split, broadcasts, self.few)


@dataclass
class Side:
    """One rank's way through a pass. `broadcasts` is there under LayerSplit. Where no request has
    more than `few` queries, every rank computes all of them, and no row moves."""

    model: Model
    group: Group
    exchange: Exchange
    compute: Stream
    split: Split = "zigzag"
    broadcasts: Broadcasts | None = None
    few: int = FEW

    def run(self, batch: Ragged, inner: Cache, hidden: Tensor | None) -> Tensor:
        """The hidden states of all queries, on every rank. `hidden` is for the draft layer, and
        of use on rank 0 alone; the others get it from there."""
        schema = self.model.schema
        if hidden is None:
            layers = range(schema.target_layers)
        else:
            layers = range(schema.target_layers, schema.layers)
            hidden = hidden.contiguous()
            self.exchange.from_first(hidden)
        if np.diff(batch.starts).max() <= self.few:
            return self._visit(batch, inner, hidden)
        partition = Partition.of(batch.starts, self.group.size, self.split)
        share = partition.shares[self.group.rank]
        local, cache = self._cache(batch, inner, partition, layers)
        mine = lanes(local, share)
        if not len(share):
            self._walk(cache, layers)
            none = self.model.no_hidden(0)
            return self.exchange.hidden(partition, none)
        if hidden is None:
            out = self.model.forward(mine, cache)
        else:
            out = self.model.draft(mine, hidden[torch.from_numpy(share.queries)], cache)
        return self.exchange.hidden(partition, out)

    def _visit(self, batch: Ragged, inner: Cache, hidden: Tensor | None) -> Tensor:
        cache = inner
        if self.broadcasts is not None:
            cache = Visiting(inner, self.group, self.broadcasts.owners)
        if hidden is None:
            return self.model.forward(batch, cache)
        return self.model.draft(batch, hidden, cache)

    def _cache(
        self, batch: Ragged, inner: Cache, partition: Partition, layers: range
    ) -> tuple[Ragged, Cache]:
        if self.broadcasts is None:
            return batch, Replicated(inner, self.exchange, partition, batch.rows)
        need = needed(
            batch.positions, batch.rows, batch.starts, batch.tables, batch.table_starts,
            inner.page_tokens,
        )  # fmt: skip
        cache = Shared(
            inner, self.compute, self.broadcasts, self.exchange, partition, need, batch.rows, layers
        )
        return replace(batch, rows=need.rows, tables=need.tables), cache

    def _walk(self, cache: Cache, layers: Iterable[int]) -> None:
        """Through all doors, as a model goes, with nothing to write or read."""
        for layer in layers:
            for door in DOORS:
                if self.model.schema.behind(layer, door):
                    with cache.writing(layer, door):
                        pass
                    cache.ask(layer, door, _nothing)


def _nothing(rows: Rows) -> Found:
    return ()


class Ranked:
    """All ranks, as one model."""

    def __init__(self, side: Side, send: Send) -> None:
        self._side = side
        self._send = send
        self._model = side.model
        self.schema = side.model.schema
        self.vocabulary = side.model.vocabulary
        self.context_max = side.model.context_max
        self.hidden_width = side.model.hidden_width
        self.broadcasts = side.broadcasts

    def forward(self, batch: Ragged, cache: Cache) -> Tensor:
        self._send(order(batch, draft=False))
        return self._side.run(batch, cache, None)

    def draft(self, batch: Ragged, hidden: Tensor, cache: Cache) -> Tensor:
        self._send(order(batch, draft=True))
        return self._side.run(batch, cache, hidden)

    def apart(self, counts: Ints) -> list[Ints]:
        """Requests of few queries go by themselves: the others' prefixes move, theirs need not."""
        few = counts <= self._side.few
        return [group for group in (np.flatnonzero(few), np.flatnonzero(~few)) if len(group)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self._model.draft_logits(hidden)

    def no_hidden(self, rows: int) -> Tensor:
        return self._model.no_hidden(rows)


def owners(whole: Schema, ranks: int) -> Owners:
    """Raise ConfigError where a rank would have no layer."""
    if ranks > whole.layers:
        raise ConfigError(
            f"parallel.cp is {ranks}; with layer_split it must be from 2 to {whole.layers}, the "
            "layers of this model"
        )
    return Owners.of(whole, ranks)


def page_bytes(whole: Schema, ranks: int, layer_split: bool) -> int:
    """Of a page on the rank that keeps most of it. Raise ConfigError as `owners` does."""
    return owners(whole, ranks).page_bytes(whole) if layer_split else whole.page_bytes


def lanes(batch: Ragged, share: Share) -> Ragged:
    """A rank's queries of a pass: each lane as if it were a request, with its request's table."""
    tables = [
        batch.tables[batch.table_starts[one] : batch.table_starts[one + 1]]
        for one in share.requests
    ]
    ends = np.cumsum([0, *(len(one) for one in tables)]).astype(np.int64)
    return Ragged(
        tokens=batch.tokens[share.queries],
        positions=batch.positions[share.queries],
        rows=batch.rows[share.queries],
        starts=share.starts,
        tables=np.concatenate([*tables, np.empty(0, np.int32)]).astype(np.int32),
        table_starts=ends,
    )


def order(batch: Ragged, draft: bool) -> bytes:
    return encode(
        Pass(
            draft,
            said(batch.tokens, np.int64),
            said(batch.positions, np.int64),
            said(batch.rows, np.int64),
            said(batch.starts, np.int64),
            said(batch.tables, np.int32),
            said(batch.table_starts, np.int64),
        )
    )
