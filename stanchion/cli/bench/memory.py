"""How fast pages move from this process's pool into another's, beside a plain copy of the bytes."""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from stanchion.cli.bench.target import PAGE_TOKENS, PEER, glm5_pages
from stanchion.core.errors import Bug
from stanchion.device.stream import Pages
from stanchion.kv.arena import Address, Arena, Bytes, attach
from stanchion.kv.layout import Layout
from stanchion.kv.transfer.words import Invitation, ShmPlace, Transfer, Write


@dataclass(frozen=True)
class Sizes:
    """Each run moves every page of a pool of GLM-5 pages, `write_pages` of one layer a write."""

    layers: int
    pages: int
    write_pages: int
    repeats: int


class Source:
    """A pool of our own, full of bytes, with a page table that is as scattered as one gets."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.layout = Layout.of(glm5_pages(sizes.layers), sizes.pages)
        self.arena = Arena.private(self.layout.total)
        self.arena.memory[:] = np.random.default_rng(3).integers(
            0, 255, self.layout.total, np.uint8
        )

    @property
    def bytes(self) -> int:
        return sum(self.layout.bytes_of(key) for key in self.layout.buffers)


@dataclass
class Mover:
    source: Source
    transfer: Transfer
    invitation: Invitation
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.transfer.connect(PEER, self.invitation)
        generator = np.random.default_rng(5)
        pages = self.source.sizes.pages
        self._from: Pages = generator.permutation(pages).astype(np.int32)
        self._to: Pages = generator.permutation(pages).astype(np.int32)

    def rate(self) -> float:
        """GiB a second, from the first submit to the end of the last write."""
        sizes = self.source.sizes
        open_ = 0
        began = time.perf_counter()
        for first in range(0, sizes.pages, sizes.write_pages):
            part = slice(first, first + sizes.write_pages)
            for layer in range(sizes.layers):
                self.transfer.submit(
                    Write(
                        next(self._numbers), PEER, layer, self._from[part], self._to[part],
                        PAGE_TOKENS,
                    )
                )  # fmt: skip
                open_ += 1
        while open_:
            select.select([self.transfer], [], [])
            for ended in self.transfer.poll():
                if not ended.whole:
                    raise Bug(f"a write ended, and not all of it came: {ended.why}")
                open_ -= 1
        return self.source.bytes / (time.perf_counter() - began) / 2**30

    def page_copy_rate(self, destination: Bytes) -> float:
        """The same, by one memcpy for each page of each buffer."""
        source, layout = self.source, self.source.layout
        memory, pairs = source.arena.memory, list(zip(self._from.tolist(), self._to.tolist()))
        began = time.perf_counter()
        for place in layout.buffers.values():
            size = place.row_bytes * PAGE_TOKENS
            for ours, theirs in pairs:
                here, there = place.offset + ours * size, place.offset + theirs * size
                destination[there : there + size] = memory[here : here + size]
        return source.bytes / (time.perf_counter() - began) / 2**30


def mapped(invitation: Invitation) -> Bytes:
    """The target's memory, once more, for a copy without a transfer."""
    place = invitation.place
    assert isinstance(place, ShmPlace)
    address = Address(invitation.pid, place.descriptor, invitation.size, invitation.token)
    return attach(address)


def copy_rate(source: Source, destination: Bytes) -> float:
    """GiB a second of one memcpy of as many bytes, between the same two memories."""
    size = source.bytes
    began = time.perf_counter()
    np.copyto(destination[:size], source.arena.memory[:size])
    return size / (time.perf_counter() - began) / 2**30
