"""Collectives among processes of one machine: through memory that all of them have mapped.

A rank's bytes are copied in by it and out by the others, a chunk at a time, two chunks under way.
Over loopback, gloo copies each byte about twice more and pays for packets; with a long prefix that
is a good part of a pass on CPUs. Eventfds say that a chunk is there, and that it was taken.
"""

from __future__ import annotations

import mmap
import os
import select

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from stanchion.core.errors import Bug
from stanchion.parallel.group import RankLost
from stanchion.parallel.split import Rank

Bytes = NDArray[np.uint8]
CHUNK_BYTES = 2**20
CHUNKS = 2  # of each rank's own: one is written while another is read


class Board(Struct, frozen=True):
    """Descriptors: the memory, and for each pair of ranks (who says, who hears) two eventfds."""

    size: int
    memory: int
    ready: list[int]
    taken: list[int]

    @classmethod
    def of(cls, size: int) -> Board:
        memory = os.memfd_create("stanchion-ranks", os.MFD_CLOEXEC)
        os.ftruncate(memory, size * CHUNKS * CHUNK_BYTES)
        flags = os.EFD_CLOEXEC | os.EFD_SEMAPHORE
        pairs = range(size * size)
        ready = [os.eventfd(0, flags) for _ in pairs]
        return cls(size, memory, ready, [os.eventfd(CHUNKS, flags) for _ in pairs])

    @property
    def descriptors(self) -> list[int]:
        return [self.memory, *self.ready, *self.taken]

    def close(self) -> None:
        for one in self.descriptors:
            os.close(one)


class BoardGroup:
    """`timeout_s` bounds the wait for each chunk."""

    def __init__(self, board: Board, rank: Rank, timeout_s: float) -> None:
        self.rank = rank
        self.size = board.size
        self._board = board
        self._timeout_ms = int(1000 * timeout_s)
        mapped = mmap.mmap(board.memory, board.size * CHUNKS * CHUNK_BYTES)
        self._chunks = np.frombuffer(mapped, np.uint8).reshape(board.size, CHUNKS, CHUNK_BYTES)
        self._sent = [0] * board.size  # chunks, by rank

    def broadcast(self, memory: Tensor, root: Rank) -> None:
        if not memory.is_contiguous():
            raise Bug("a collective on memory with gaps")
        if self.size == 1 or not memory.numel():
            return
        flat = memory.view(-1).numpy()
        for first in range(0, len(flat), CHUNK_BYTES):
            part = flat[first : first + CHUNK_BYTES]
            chunk = self._chunks[root, self._sent[root] % CHUNKS, : len(part)]
            self._sent[root] += 1
            if root == self.rank:
                self._say(chunk, part)
            else:
                self._wait(self._board.ready, root, self.rank)
                part[:] = chunk
                os.eventfd_write(self._board.taken[root * self.size + self.rank], 1)

    def _say(self, chunk: Bytes, part: Bytes) -> None:
        others = [one for one in range(self.size) if one != self.rank]
        for other in others:
            self._wait(self._board.taken, self.rank, Rank(other))
        chunk[:] = part
        for other in others:
            os.eventfd_write(self._board.ready[self.rank * self.size + other], 1)

    def _wait(self, bells: list[int], says: Rank, hears: Rank) -> None:
        bell = bells[says * self.size + hears]
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        if not poll.poll(self._timeout_ms):
            raise RankLost(f"for {self._timeout_ms // 1000} s nothing was heard of a rank")
        os.eventfd_read(bell)
