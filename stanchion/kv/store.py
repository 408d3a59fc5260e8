"""The device pool: the schema's buffers as tensors, behind doors.

Row r of a buffer is row r % page_tokens of page r // page_tokens. Page 0 is the null page: nobody
is ever given it, and rows that must not be kept are written there.

All tensors are views of one arena, laid out by `layout`: peers write into it where it is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.core.errors import Bug
from stanchion.device.stream import Guarded, Pages, Stream, View
from stanchion.kv.arena import Arena
from stanchion.kv.layout import Layout
from stanchion.kv.pages import Pin
from stanchion.kv.schema import DOORS, Buffer, Door, Schema

Rows = Mapping[str, Tensor]  # buffer name -> the whole pool's rows (pages * page_tokens, width)
Found = tuple[NDArray[Any], ...]
Read = Callable[[Rows], Found]
NULL_PAGE = 0


class Store:
    def __init__(self, schema: Schema, pages: int, arena: Arena | None = None) -> None:
        self.schema = schema
        self.pages = pages
        self.layout = Layout.of(schema, pages)
        self.arena = Arena.private(self.layout.total) if arena is None else arena
        if len(self.arena.memory) < self.layout.total:
            raise Bug(f"a pool of {self.layout.total} bytes in an arena that is smaller")
        self._guarded: dict[tuple[int, Door], Guarded[Rows]] = {}
        for layer in range(schema.layers):
            for door in DOORS:
                tensors = {one.name: self._rows(one) for one in schema.behind(layer, door)}
                self._guarded[layer, door] = Guarded(f"layer {layer} {door}", tensors)

    def behind(self, layer: int, door: Door) -> Guarded[Rows]:
        return self._guarded[layer, door]

    def _rows(self, buffer: Buffer) -> Tensor:
        key = buffer.layer, buffer.name
        start = self.layout.buffers[key].offset
        memory = torch.from_numpy(self.arena.memory[start : start + self.layout.bytes_of(key)])
        # (pool rows, width)
        return memory.view(getattr(torch, buffer.dtype)).view(-1, buffer.width)


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

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        with self.reading(layer, door) as view:
            return read(view.rows)

    def _check(self) -> None:
        for pin in self._pins:
            if not pin.held:
                raise Bug(f"{pin.holder} opened a door with a pin that it had dropped")
