"""Where each buffer of a schema lies in one arena, and what a write of some pages is in bytes.

Two workers of one cluster have the same buffers and rows, but pools of any size: so the offsets
differ, and a write is a list of spans from ours to theirs. Buffers are addressed by (layer, name).
No memory is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.device.stream import Pages
from stanchion.kv.schema import Schema

ALIGNMENT = 4096
Key = tuple[int, str]  # layer, name
Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """One buffer: its first row's offset in the arena, and bytes a row."""

    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Layout:
    """`buffers` are in the order of (layer, name); `total` is the arena's size in bytes."""

    pages: int
    page_tokens: int
    buffers: Mapping[Key, Place]
    total: int
    part: bool = False  # of a schema that is one

    @classmethod
    def of(cls, schema: Schema, pages: int) -> Layout:
        end = 0
        buffers: dict[Key, Place] = {}
        for one in sorted(schema.buffers, key=lambda one: (one.layer, one.name)):
            buffers[one.layer, one.name] = Place(end, one.row_bytes)
            end += _aligned(one.row_bytes * schema.page_tokens * pages)
        return cls(pages, schema.page_tokens, buffers, end, schema.part)

    def bytes_of(self, key: Key) -> int:
        return self.buffers[key].row_bytes * self.page_tokens * self.pages

    def of_layer(self, layer: int) -> list[Key]:
        return [key for key in self.buffers if key[0] == layer]

    def differences(self, other: Layout) -> list[str]:
        """Why pages of one cannot be written to the other: each buffer that differs, by name. Where
        ours are a part, what only the other has is another rank's to write."""
        said = []
        if self.page_tokens != other.page_tokens:
            said.append(f"page_tokens: {self.page_tokens} here, {other.page_tokens} there")
        ours_or_theirs = self.buffers.keys() | (set() if self.part else other.buffers.keys())
        for key in sorted(ours_or_theirs):
            ours, theirs = _row_words(self, key), _row_words(other, key)
            if ours != theirs:
                said.append(f"buffer {key[1]} of layer {key[0]}: {ours} here, {theirs} there")
        return said


@dataclass(frozen=True, eq=False)
class Spans:
    """Byte ranges to copy: three arrays of one length. No two destinations overlap."""

    source: Offsets
    destination: Offsets
    bytes: Offsets

    @property
    def total(self) -> int:
        return int(self.bytes.sum())


def spans(
    ours: Layout, theirs: Layout, layer: int, source: Pages, destination: Pages, last_rows: int
) -> Spans:
    """All buffers of one layer of `source` pages, to `destination` pages; neighbours in one span.

    The last page has `last_rows` rows, the others are whole.
    """
    _check(ours, theirs, source, destination, last_rows)
    keys = ours.of_layer(layer)
    if not keys:
        raise Bug(f"a write of layer {layer}, which the layout does not have")
    apart = (np.diff(source) != 1) | (np.diff(destination) != 1)
    starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    rows = np.diff(np.append(starts, len(source))) * ours.page_tokens
    rows[-1] -= ours.page_tokens - last_rows
    row_bytes = np.array([ours.buffers[key].row_bytes for key in keys], np.int64)[:, None]
    page_bytes = row_bytes * ours.page_tokens  # (buffers, 1); below (buffers, runs)
    here = np.array([ours.buffers[key].offset for key in keys], np.int64)[:, None]
    there = np.array([theirs.buffers[key].offset for key in keys], np.int64)[:, None]
    return Spans(
        (here + page_bytes * source[starts].astype(np.int64)).reshape(-1),
        (there + page_bytes * destination[starts].astype(np.int64)).reshape(-1),
        (row_bytes * rows).reshape(-1),
    )


def _check(ours: Layout, theirs: Layout, source: Pages, destination: Pages, last_rows: int) -> None:
    """A write that leaves its pool would land in somebody else's rows."""
    if not 0 < len(source) == len(destination):
        raise Bug(f"a write of {len(source)} pages to {len(destination)}")
    if not 0 < last_rows <= ours.page_tokens:
        raise Bug(f"a write of {last_rows} rows of a page of {ours.page_tokens}")
    for pages, layout in ((source, ours), (destination, theirs)):
        if int(pages.min()) < 0 or int(pages.max()) >= layout.pages:
            raise Bug(f"a write outside a pool of {layout.pages} pages")
    if len(np.unique(destination)) < len(destination):
        raise Bug("a write names a destination page twice")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _row_words(layout: Layout, key: Key) -> str:
    place = layout.buffers.get(key)
    return "absent" if place is None else f"{place.row_bytes} bytes a row"
