"""The device pool: the schema's buffers as tensors, behind doors.

Row r of a buffer is row r % page_tokens of page r // page_tokens. Page 0 is the null page: nobody
is ever given it, and rows that must not be kept are written there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stanchion.core.errors import Bug
from stanchion.device.stream import Guarded, Pages, Stream, View
from stanchion.kv.pages import Pin
from stanchion.kv.schema import DOORS, Door, Schema

Rows = Mapping[str, Tensor]
NULL_PAGE = 0


class Store:
    def __init__(self, schema: Schema, pages: int) -> None:
        self.schema = schema
        self.pages = pages
        rows = pages * schema.page_tokens
        self._guarded: dict[tuple[int, Door], Guarded[Rows]] = {}
        for layer in range(schema.layers):
            for door in DOORS:
                tensors = {
                    one.name: torch.zeros(rows, one.width, dtype=getattr(torch, one.dtype))
                    for one in schema.behind(layer, door)
                }
                self._guarded[layer, door] = Guarded(f"layer {layer} {door}", tensors)

    def behind(self, layer: int, door: Door) -> Guarded[Rows]:
        return self._guarded[layer, door]


class Leased:
    """A flight's way into the store: the pages that its pins cover, and no others."""

    def __init__(self, store: Store, stream: Stream, pins: list[Pin], read: Pages, write: Pages):
        self.page_tokens = store.schema.page_tokens
        self._store = store
        self._stream = stream
        self._pins = pins
        self._read = read
        self._write = write

    def reading(self, layer: int, door: Door) -> AbstractContextManager[View[Rows]]:
        self._check()
        return self._stream.reading(self._store.behind(layer, door), self._read)

    def writing(self, layer: int, door: Door) -> AbstractContextManager[View[Rows]]:
        self._check()
        return self._stream.writing(self._store.behind(layer, door), self._write)

    def _check(self) -> None:
        for pin in self._pins:
            if not pin.held:
                raise Bug(f"{pin.holder} opened a door with a pin that it had dropped")
