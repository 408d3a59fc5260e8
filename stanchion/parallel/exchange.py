"""What each rank computed, made known to all ranks: rows of the KV cache, and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stanchion.device.stream import View
from stanchion.kv.schema import Door
from stanchion.kv.store import Found, Read, Rows
from stanchion.parallel.group import Group
from stanchion.parallel.split import Ints, Partition, Rank

Passage = AbstractContextManager[View[Rows]]


class Exchange:
    def __init__(self, group: Group) -> None:
        self._group = group

    def rows(self, partition: Partition, rows: Ints, buffers: Rows) -> None:
        """Every rank wrote its own queries' rows; afterwards all rows are here.

        `rows` (queries,) says where each query's row lies in each of `buffers`, (rows, width).
        """
        columns = [buffers[name].view(torch.uint8) for name in sorted(buffers)]
        widths = [one.shape[1] for one in columns]
        for number, share in enumerate(partition.shares):
            if not len(share):
                continue
            at = torch.from_numpy(rows[share.queries])
            mine = number == self._group.rank
            if mine:
                packed = torch.cat([one[at] for one in columns], 1)  # (local rows, bytes)
            else:
                packed = torch.empty(len(share), sum(widths), dtype=torch.uint8)
            self._group.broadcast(packed, Rank(number))
            if not mine:
                for column, part in zip(columns, torch.split(packed, widths, 1)):
                    column[at] = part

    def hidden(self, partition: Partition, mine: Tensor) -> Tensor:
        """All queries' hidden states, (queries, width), of this rank's and the others'."""
        parts = []
        for number, share in enumerate(partition.shares):
            shape = (len(share), mine.shape[1])
            own = number == self._group.rank
            part = mine.contiguous() if own else torch.empty(shape, dtype=mine.dtype)
            self._group.broadcast(part.view(torch.uint8), Rank(number))
            parts.append(part)
        every = torch.empty(len(partition.owner), mine.shape[1], dtype=mine.dtype)
        every[torch.from_numpy(partition.order)] = torch.cat(parts)
        return every

    def from_first(self, hidden: Tensor) -> None:
        """`hidden` is rank 0's when this returns."""
        self._group.broadcast(hidden.view(torch.uint8), Rank(0))


class Picked:
    """A door, and a view of some of what is behind it."""

    def __init__(
        self, door: AbstractContextManager[View[Any]], pick: Callable[[Any], Rows]
    ) -> None:
        self._door = door
        self._pick = pick
        self._view: View[Rows] | None = None

    def __enter__(self) -> View[Rows]:
        self._view = self._door.__enter__().part(self._pick)
        return self._view

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._view is not None:
            self._view.close()
        self._door.__exit__(kind, *rest)


class Writing(Picked):
    """A door for writing; what was written by all ranks is there before it closes."""

    def __init__(
        self,
        door: AbstractContextManager[View[Any]],
        pick: Callable[[Any], Rows],
        then: Callable[[Rows], None],
    ) -> None:
        super().__init__(door, pick)
        self._then = then

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            if kind is None and self._view is not None:
                self._then(self._view.rows)
        finally:
            super().__exit__(kind, *rest)


class Replicated:
    """A cache of which every rank keeps every row: plain context parallelism."""

    def __init__(self, inner: Any, exchange: Exchange, partition: Partition, rows: Ints) -> None:
        self.page_tokens: int = inner.page_tokens
        self._inner = inner
        self._exchange = exchange
        self._partition = partition
        self._rows = rows

    def writing(self, layer: int, door: Door) -> Passage:
        return Writing(self._inner.writing(layer, door), _all, self._share)

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        return self._inner.ask(layer, door, read)  # type: ignore[no-any-return]

    def _share(self, buffers: Rows) -> None:
        self._exchange.rows(self._partition, self._rows, buffers)


def _all(rows: Rows) -> Rows:
    return rows
