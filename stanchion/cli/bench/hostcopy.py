"""How fast pages of a GLM-5's size come from host memory to the device's pool, beside a memcpy."""

from __future__ import annotations

import time

import numpy as np

from stanchion.cli.bench.target import glm5_pages
from stanchion.device.cpu import ThreadQueue
from stanchion.kv.arena import Arena
from stanchion.kv.copies import Loading
from stanchion.kv.copy import StoreCopier
from stanchion.kv.record import Record
from stanchion.kv.store import Store

LAYERS = 4


class Board:
    """A host of so many pages, all kept, and a pool to load them into: scattered on both sides."""

    def __init__(self, pages: int) -> None:
        schema = glm5_pages(LAYERS)
        self.pages = pages
        self.bytes = pages * schema.page_bytes
        self._store = Store(schema, pages + 1)
        self._host = Arena.private(schema.page_bytes * (pages + 1))
        generator = np.random.default_rng(3)
        self._host.memory[:] = generator.integers(0, 255, len(self._host.memory), np.uint8)
        self._store.arena.memory.fill(1)  # faulted in
        self._copier = StoreCopier(
            self._store, self._host.memory, ThreadQueue("load"), ThreadQueue("spill")
        )
        self._records = [Record(at.to_bytes(32, "little"), b"", b"", b"") for at in range(pages)]
        self._slots = (1 + generator.permutation(pages)).astype(np.int32)
        self._pages = (1 + generator.permutation(pages)).astype(np.int32)

    def load_rate(self) -> float:
        """GiB a second, from the submission to the end of the last layer."""
        began = time.perf_counter()
        lift = Loading(self._records, self._pages, self._slots)
        self._copier.load([lift])
        queue = self._copier.load_queue
        queue.finish(queue.mark())
        took = time.perf_counter() - began
        self._copier.loaded(lift)
        return self.bytes / took / 2**30

    def memcpy_rate(self) -> float:
        """One copy of as many bytes, between the same two memories."""
        began = time.perf_counter()
        np.copyto(self._store.arena.memory[: self.bytes], self._host.memory[: self.bytes])
        return self.bytes / (time.perf_counter() - began) / 2**30

    def close(self) -> None:
        self._copier.close()
