"""A model and a device for the simulator: one number a row, and no torch.

Row p of layer l holds mix(token p, p, l). A sampled token depends on every row that was read, in
every layer: one row that is wrong, missing, foreign or stale when it is read, and the text is not
what `answer` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.device.stream import Pages
from stanchion.engine.ask import Chosen
from stanchion.engine.flight import Landed
from stanchion.engine.request import Request
from stanchion.engine.scheduler import Piece
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.ready import Ready
from stanchion.kv.schema import Buffer, Schema

VOCABULARY = 1 << 16
LAYERS = 2  # the second is the draft layer: it must be moved like any other
Rows = NDArray[np.uint64]
OnRows = Callable[[int, Sequence[tuple[Request, int]]], None]


def schema(page_tokens: int) -> Schema:
    rows = tuple(Buffer("row", layer, "attend", "int64", 1) for layer in range(LAYERS))
    return Schema("simulated", page_tokens, LAYERS, True, rows)


def mix(words: Rows) -> Rows:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Rows = words ^ (words >> np.uint64(31))
    return mixed


def rows_of(tokens: NDArray[np.int32], first: int, layer: int) -> Rows:
    positions = np.arange(first, first + len(tokens), dtype=np.uint64)
    return mix(
        (tokens.astype(np.uint64) << np.uint64(32)) + (positions << np.uint64(4)) + np.uint64(layer)
    )


def token_of(read: Rows) -> int:
    """The token that follows the rows read, (layers, positions)."""
    return int(mix(read.sum(1)).sum() % np.uint64(VOCABULARY))


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What a request alone would get."""
    tokens = np.zeros(len(prompt) + count, np.int32)
    tokens[: len(prompt)] = prompt
    sums = np.array([rows_of(tokens[: len(prompt)], 0, layer).sum() for layer in range(LAYERS)])
    for at in range(len(prompt), len(tokens)):
        tokens[at] = int(mix(sums).sum() % np.uint64(VOCABULARY))
        sums += np.array([rows_of(tokens[at : at + 1], at, layer)[0] for layer in range(LAYERS)])
    return [int(token) for token in tokens[len(prompt) :]]


class Memory:
    """A worker's pool: (layers, rows)."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.rows: Rows = np.zeros((LAYERS, pages * page_tokens), np.uint64)

    def at(self, pages: Pages, first: int, end: int) -> NDArray[np.int64]:
        """Row numbers of positions first to end - 1."""
        positions = np.arange(first, end)
        page = pages[positions // self.page_tokens].astype(np.int64)
        found: NDArray[np.int64] = page * self.page_tokens + positions % self.page_tokens
        return found

    def copy_to(
        self, other: Memory, layer: int, ours: Pages, theirs: Pages, last_rows: int
    ) -> None:
        count = (len(ours) - 1) * self.page_tokens + last_rows
        mine, its = self.at(ours, 0, count), other.at(theirs, 0, count)
        other.rows[layer, its] = self.rows[layer, mine]


@dataclass
class Device:
    """`launch` for an engine. `late` says whether a flight is computed when it is waited for."""

    memory: Memory
    pool: PagePool
    ready: Ready
    late: Callable[[], bool]
    on_rows: OnRows | None = None

    def launch(self, pieces: Sequence[Piece], pins: list[Pin]) -> Flown:
        flown = Flown(self, pieces, pins)
        if not self.late():
            flown.compute()
        return flown


@dataclass
class Flown:
    device: Device
    pieces: Sequence[Piece]
    pins: list[Pin]
    landed: list[Landed] | None = None

    def wait(self) -> list[Landed]:
        if self.landed is None:
            self.compute()
        assert self.landed is not None
        return self.landed

    def compute(self) -> None:
        assert all(pin.held for pin in self.pins), "a flight without its pins"
        ends = [(one.request, one.first + one.count) for one in self.pieces]
        for layer in range(LAYERS):
            for piece in self.pieces:
                self._write(piece, layer)
            if self.device.on_rows is not None:
                self.device.on_rows(layer, ends)
        self.landed = [Landed(piece, chosen=self._sample(piece)) for piece in self.pieces]

    def _write(self, piece: Piece, layer: int) -> None:
        memory, page_tokens = self.device.memory, self.device.memory.page_tokens
        first, end = piece.first + piece.redone, piece.first + piece.count
        if first >= end:
            return
        tokens = piece.request.tokens[first:end]
        memory.rows[layer, memory.at(piece.pages, first, end)] = rows_of(tokens, first, layer)
        places = np.arange(first // page_tokens, -(-end // page_tokens))
        filled = np.minimum(end - places * page_tokens, page_tokens).astype(np.int32)
        self.device.ready.raise_to(layer, piece.pages[places], filled)

    def _sample(self, piece: Piece) -> Chosen | None:
        if not piece.samples:
            return None
        request, end = piece.request, piece.first + piece.count
        self.device.ready.prove(
            request.name, piece.pages, end, piece.first, request.generations,
            self.device.pool.generations,
        )  # fmt: skip
        read = self.device.memory.rows[:, self.device.memory.at(piece.pages, 0, end)]
        return Chosen([token_of(read)], 0, [0.0])
