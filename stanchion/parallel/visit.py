"""A pass of few queries: they go to where the rows are, and no row moves.

Every rank computes the whole pass. A layer is written and read by its owner alone, and what the
owner found goes to all others, which did not look. So a verify window over a long context moves
its selections and its attended latents, and neither index keys nor latents of that context.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stanchion.kv.schema import Door
from stanchion.kv.store import Found, Read
from stanchion.parallel.exchange import Passage
from stanchion.parallel.group import Group
from stanchion.parallel.layersplit import Layer, Owners
from stanchion.parallel.split import Rank

ARRAYS_MAX = 4
SIZES_MAX = 4
DESCRIBED_BYTES = ARRAYS_MAX * (2 + SIZES_MAX) * 8
FRAME_BYTES = 16 * 2**10  # goes at once: what is longer takes a second broadcast
KINDS = ("int32", "int64", "uint64", "float32")


class Visiting:
    """One pass. `inner` is the rank's own pool, which has no rows of others' layers."""

    def __init__(self, inner: Any, group: Group, owners: Owners) -> None:
        self.page_tokens: int = inner.page_tokens
        self._inner = inner
        self._group = group
        self._owners = owners

    def writing(self, layer: int, door: Door) -> Passage:
        return self._inner.writing(layer, door)  # type: ignore[no-any-return]

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        owner = self._owners.of_layer(Layer(layer))
        if owner == self._group.rank:
            found: Found = self._inner.ask(layer, door, read)
            self._tell(found, owner)
            return found
        return self._hear(owner)

    def _tell(self, found: Found, owner: Rank) -> None:
        flat = [np.ascontiguousarray(one).view(np.uint8).ravel() for one in found]
        said = np.concatenate([_described(found).view(np.uint8).ravel(), *flat])
        frame = np.zeros(FRAME_BYTES, np.uint8)
        frame[: len(said)] = said[:FRAME_BYTES]
        self._group.broadcast(torch.from_numpy(frame), owner)
        self._group.broadcast(torch.from_numpy(said[FRAME_BYTES:]), owner)

    def _hear(self, owner: Rank) -> Found:
        frame = np.empty(FRAME_BYTES, np.uint8)
        self._group.broadcast(torch.from_numpy(frame), owner)
        lines = frame[:DESCRIBED_BYTES].view(np.int64).reshape(ARRAYS_MAX, -1)
        shapes = [(KINDS[one[0]], tuple(one[2 : 2 + one[1]])) for one in lines if one[0] >= 0]
        sizes = [int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in shapes]
        rest = np.empty(max(DESCRIBED_BYTES + sum(sizes) - FRAME_BYTES, 0), np.uint8)
        self._group.broadcast(torch.from_numpy(rest), owner)
        flat = np.concatenate([frame[DESCRIBED_BYTES:], rest])
        parts = np.split(flat, np.cumsum(sizes))
        return tuple(part.view(kind).reshape(shape) for part, (kind, shape) in zip(parts, shapes))


def _described(found: Found) -> NDArray[np.int64]:
    """A line an array: its kind, its number of sizes, its sizes. A kind of -1: no array."""
    said = np.full((ARRAYS_MAX, 2 + SIZES_MAX), -1, np.int64)
    for line, array in zip(said, found, strict=False):
        line[:2] = KINDS.index(array.dtype.name), array.ndim
        line[2 : 2 + array.ndim] = array.shape
    return said
