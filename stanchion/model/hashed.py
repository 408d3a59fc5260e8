"""The hash model: an instrument that tells whether a KV path kept every row right.

It has the schema, the doors and the draft layer of a GLM-5 model, but integers for numbers. A row
of layer l hashes the hidden state of layer l - 1 at that position, which mixes every row it read,
with position, layer and buffer name. So one wrong, stale, missing or foreign row anywhere changes
what follows: the next tokens, their log-probabilities, or the drafts. There is no rounding, so a
request's output must equal that of the same request alone, cold, to the last bit.

Layer 2 shares layer 1's index and owns no index buffer. With `top_k` absent every row is attended;
otherwise the index rows decide which. Tokens are bytes: 32 to 126 follow each other by a rule that
the draft layer can often guess, so acceptance is neither 0 nor 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.kv.schema import Buffer, Door, Schema
from stanchion.model.text import Cache, Found, Ragged, Rows

VOCABULARY = 272  # 256 bytes, then special tokens as in gateway/tokens.py
END_TOKEN = 256
CONTEXT_MAX = 1 << 20
TARGET_LAYERS = 3
SHARED_LAYER = 2  # attends by the selection of the layer before it
_INDEX, _LATENT, _ROPE = 1, 2, 3

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]


def schema(page_tokens: int, draft: bool) -> Schema:
    def buffers(layer: int) -> list[Buffer]:
        attend: Door = "attend"
        own = [
            Buffer("latent", layer, attend, "int64", 1),
            Buffer("rope", layer, attend, "int64", 1),
        ]
        if layer == SHARED_LAYER:
            return own
        return [Buffer("index_key", layer, "index", "int64", 1), *own]

    layers = TARGET_LAYERS + draft
    every = tuple(one for layer in range(layers) for one in buffers(layer))
    return Schema("hashed", page_tokens, layers, draft, every)


@dataclass(frozen=True)
class Selection:
    """Per query: how many positions were chosen, which, and the digest of all index rows."""

    counts: Ints
    chosen: Ints  # (queries, top_k); unused where everything is attended
    digest: Words


class HashModel:
    vocabulary = VOCABULARY
    context_max = CONTEXT_MAX
    hidden_width = 2  # the hash, the token
    eos_ids = (END_TOKEN,)

    def __init__(
        self, page_tokens: int = 16, draft: bool = True, top_k: int | None = None, weights: int = 1
    ) -> None:
        self.schema = schema(page_tokens, draft)
        self.top_k = 0 if top_k is None else top_k
        self._weights = np.uint64(weights)

    def forward(self, batch: Ragged, cache: Cache) -> Tensor:
        hashes = _embed(batch.tokens, self._weights)
        selection: Selection | None = None
        for layer in range(TARGET_LAYERS):
            hashes, selection = self._layer(layer, hashes, selection, batch, cache)
        return _hidden(hashes, batch.tokens)

    def draft(self, batch: Ragged, hidden: Tensor, cache: Cache) -> Tensor:
        before = hidden.numpy()[:, 0].view(np.uint64)
        hashes = _join(_embed(batch.tokens, self._weights), before)
        hashes, _ = self._layer(TARGET_LAYERS, hashes, None, batch, cache)
        return _hidden(hashes, batch.tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.from_numpy(_logits(hidden.numpy(), VOCABULARY, 11))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return torch.from_numpy(_logits(hidden.numpy(), VOCABULARY, 13))

    def no_hidden(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.hidden_width, dtype=torch.int64)

    def _layer(
        self,
        layer: int,
        hashes: Words,
        selection: Selection | None,
        batch: Ragged,
        cache: Cache,
    ) -> tuple[Words, Selection]:
        if layer != SHARED_LAYER or selection is None:
            selection = self._select(layer, hashes, batch, cache)
        chosen = selection
        with cache.writing(layer, "attend") as view:
            if view.rows:
                _write(view.rows["latent"].numpy(), hashes, batch, layer, _LATENT)
                _write(view.rows["rope"].numpy(), hashes, batch, layer, _ROPE)

        def attend(rows: Rows) -> Found:
            latent, rope = (rows[name].numpy().view(np.uint64) for name in ("latent", "rope"))
            read = _attend(
                latent[:, 0], rope[:, 0], batch.positions, batch.starts, batch.tables,
                batch.table_starts, cache.page_tokens, chosen.counts, chosen.chosen,
            )  # fmt: skip
            return (read,)

        (read,) = cache.ask(layer, "attend", attend)
        return _join(_join(hashes, selection.digest), read), selection

    def _select(self, layer: int, hashes: Words, batch: Ragged, cache: Cache) -> Selection:
        with cache.writing(layer, "index") as view:
            if view.rows:
                _write(view.rows["index_key"].numpy(), hashes, batch, layer, _INDEX)

        def select(rows: Rows) -> Found:
            keys = rows["index_key"].numpy().view(np.uint64)
            return _index(
                keys[:, 0], hashes, batch.positions, batch.starts, batch.tables,
                batch.table_starts, cache.page_tokens, self.top_k,
            )  # fmt: skip

        return Selection(*cache.ask(layer, "index", select))


def _hidden(hashes: Words, tokens: Ints) -> Tensor:
    return torch.from_numpy(np.stack([hashes.view(np.int64), tokens], 1))


def _write(column: Ints, hashes: Words, batch: Ragged, layer: int, tag: int) -> None:
    _fill(column, hashes, batch.positions, batch.rows, np.uint64(layer * 16 + tag))


@numba.njit(nogil=True, cache=True)
def _mix(word: np.uint64) -> np.uint64:
    """splitmix64's finaliser: a bijection on 64 bits; every input bit moves every output bit."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@numba.njit(nogil=True, cache=True)
def _embed(tokens: Ints, weights: np.uint64) -> Words:
    out = np.empty(len(tokens), np.uint64)
    for at in range(len(tokens)):
        out[at] = _mix(_mix(np.uint64(tokens[at])) ^ weights)
    return out


@numba.njit(nogil=True, cache=True)
def _join(first: Words, second: Words) -> Words:
    out = np.empty(len(first), np.uint64)
    for at in range(len(first)):
        out[at] = _mix(_mix(first[at]) + second[at])
    return out


@numba.njit(nogil=True, cache=True)
def _fill(column: Ints, hashes: Words, positions: Ints, rows: Ints, salt: np.uint64) -> None:
    for at in range(len(rows)):
        word = _mix(_mix(hashes[at] + salt) ^ _mix(np.uint64(positions[at])))
        column[rows[at], 0] = np.int64(word)


@numba.njit(nogil=True, cache=True)
def _row(tables: NDArray[np.int32], first: int, position: int, page_tokens: int) -> int:
    page = np.int64(tables[first + position // page_tokens])
    return int(page * page_tokens + position % page_tokens)


@numba.njit(nogil=True, cache=True)
def _index(
    keys: Words, hashes: Words, positions: Ints, starts: Ints, tables: NDArray[np.int32],
    table_starts: Ints, page_tokens: int, top_k: int,
) -> tuple[Ints, Ints, Words]:  # fmt: skip
    queries = len(positions)
    counts = np.empty(queries, np.int64)
    chosen = np.empty((queries, max(top_k, 1)), np.int64)
    digest = np.empty(queries, np.uint64)
    for request in range(len(starts) - 1):
        first = table_starts[request]
        total = np.uint64(0)
        summed = 0
        for query in range(starts[request], starts[request + 1]):
            context = positions[query] + 1
            while summed < context:  # every index row counts, chosen or not
                key = keys[_row(tables, first, summed, page_tokens)]
                total += _mix(key + np.uint64(summed) * np.uint64(0xD1342543DE82EF95))
                summed += 1
            digest[query] = total
            counts[query] = context
            if top_k and context > top_k:
                counts[query] = top_k
                _choose(keys, hashes[query], tables, first, context, page_tokens, chosen[query])
    return counts, chosen, digest


@numba.njit(nogil=True, cache=True)
def _choose(
    keys: Words, query: np.uint64, tables: NDArray[np.int32], first: int, context: int,
    page_tokens: int, chosen: Ints,
) -> None:  # fmt: skip
    """The highest scores, ties by lowest position: threshold first, then fill by position."""
    top_k = len(chosen)
    scores = np.empty(context, np.int64)
    for position in range(context):
        word = _mix(keys[_row(tables, first, position, page_tokens)] ^ query)
        scores[position] = np.int64(word >> np.uint64(54))  # 10 bits: ties are common, on purpose
    threshold = np.partition(scores, context - top_k)[context - top_k]
    above = (scores > threshold).sum()
    ties = top_k - above
    at = 0
    for position in range(context):
        if scores[position] > threshold or (scores[position] == threshold and ties > 0):
            ties -= scores[position] == threshold
            chosen[at] = position
            at += 1


@numba.njit(nogil=True, cache=True)
def _attend(
    latent: Words, rope: Words, positions: Ints, starts: Ints, tables: NDArray[np.int32],
    table_starts: Ints, page_tokens: int, counts: Ints, chosen: Ints,
) -> Words:  # fmt: skip
    read = np.empty(len(positions), np.uint64)
    for request in range(len(starts) - 1):
        first = table_starts[request]
        total = np.uint64(0)
        summed = 0
        for query in range(starts[request], starts[request + 1]):
            if counts[query] > positions[query]:  # everything: extend the running sum
                while summed <= positions[query]:
                    row = _row(tables, first, summed, page_tokens)
                    total += _mix((latent[row] ^ _mix(rope[row])) + np.uint64(summed))
                    summed += 1
                read[query] = total
                continue
            some = np.uint64(0)
            for at in range(counts[query]):
                row = _row(tables, first, chosen[query, at], page_tokens)
                some += _mix((latent[row] ^ _mix(rope[row])) + np.uint64(chosen[query, at]))
            read[query] = some
    return read


@numba.njit(nogil=True, cache=True)
def _logits(hidden: Ints, vocabulary: int, likely: int) -> NDArray[np.float32]:
    """Noise for every token, a boost for a few followers of the last one; which, the hash says."""
    out = np.empty((len(hidden), vocabulary), np.float32)
    for row in range(len(hidden)):
        word = _mix(np.uint64(hidden[row, 0]))
        token = hidden[row, 1]
        for other in range(vocabulary):
            noise = np.float32(_mix(word + np.uint64(other)) >> np.uint64(40)) * np.float32(
                2.0**-24
            )
            plain = 32 <= other < 127
            out[row, other] = noise if plain else noise - np.float32(30.0)
        turn = np.int64(word & np.uint64(15))
        main = turn if turn > likely else 0
        for follower in range(4):
            boost = np.float32(9.0 if follower == main % 4 else 6.0)
            out[row, 32 + (token * (2 * follower + 3) + 31 * follower + 7) % 95] += boost
        if (word >> np.uint64(8)) % np.uint64(300) == np.uint64(7):
            out[row, 256] += np.float32(60.0)
    return out
