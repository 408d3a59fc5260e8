"""Attention of absorbed queries over chosen rows of latent | rope, read where they lie.

Scores, softmax and the weighted sum of latents of one query, over its own rows in ascending order:
no context is copied, and the time depends on how many rows are chosen, not on how long the context
is. Rows in bfloat16 are widened, the chosen ones only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stanchion.device.kernels.index_select import (
    Context,
    Selection,
    plain_bits,
    value_at,
)
from stanchion.device.kernels.lanes import (
    compiled,
    exponential,
    fetch,
    fused,
    gathered_tile,
    product_tile,
)
from stanchion.device.kernels.linear import Floats

_scores_4 = product_tile(8, 1, 4)
_scores_8 = product_tile(8, 1, 8)
_scores_16 = product_tile(8, 1, 16)
_values_4x4 = gathered_tile(4, 4, 16)
_values_4x1 = gathered_tile(4, 1, 16)
_values_1x4 = gathered_tile(1, 4, 16)
_values_1x1 = gathered_tile(1, 1, 16)


def sparse_attention(
    queries: Floats, rows: Tensor, context: Context, selection: Selection, latent: int, scale: float
) -> Floats:
    """queries: (queries, heads, latent + rope); rows: (pool rows, latent + rope), float32 or
    bfloat16. Returns the attended latents, (queries, heads, latent)."""
    out: Floats = np.empty((*queries.shape[:2], latent), np.float32)
    heads = queries.shape[1]
    lanes = 4 if heads <= 4 else 8 if heads <= 8 else 16
    _sparse_attention(
        queries,
        plain_bits(rows),
        context.arrays,
        context.page_tokens,
        selection.positions,
        selection.counts,
        lanes,
        np.float32(scale),
        out,
    )
    return out


def sparse_attention_plain(
    queries: Tensor,
    rows: Tensor,
    context: Context,
    chosen: list[list[int]],
    latent: int,
    scale: float,
) -> Tensor:
    """The reference: (queries, heads, latent)."""
    out = torch.empty(queries.shape[0], queries.shape[1], latent)
    for request in range(len(context.starts) - 1):
        table = context.tables[context.table_starts[request] : context.table_starts[request + 1]]
        for query in range(context.starts[request], context.starts[request + 1]):
            places = np.array(chosen[query], np.int64)
            at = table[places // context.page_tokens].astype(np.int64) * context.page_tokens
            row = rows[torch.from_numpy(at + places % context.page_tokens)].float()
            share = torch.softmax(queries[query] @ row.T * scale, -1)
            out[query] = share @ row[:, :latent] if len(places) else torch.nan
    return out


@compiled
def _sparse_attention(  # type: ignore[no-untyped-def]
    queries, rows, arrays, page_tokens, chosen, counts, lanes, scale, out
):
    _, starts, tables, table_starts = arrays
    count, heads, width = queries.shape
    groups = (heads + lanes - 1) // lanes
    most = (chosen.shape[1] + 15) // 16 * 16
    offsets = np.zeros((2, most), np.int64)  # of this query's rows, and of the next one's
    turned = np.zeros((groups, width, lanes), np.float32)
    scores = np.empty(most * lanes, np.float32)
    places = np.arange(most) * lanes
    shares = np.empty((heads, most), np.float32)
    inverse = np.empty(heads, np.float32)
    parts = np.empty(16, np.float32)
    request = 0
    for following in range(count + 1):
        if following < count:
            while following >= starts[request + 1]:
                request += 1
            table = tables[table_starts[request] : table_starts[request + 1]]
            places_of, wanted = chosen[following], counts[following]
            _find(places_of, wanted, table, page_tokens, width, offsets[following & 1])
        query = following - 1
        if query < 0:
            continue
        mine, ahead = offsets[query & 1], offsets[following & 1]
        chosen_rows = np.int64(counts[query])
        for head in range(heads):
            for k in range(width):
                turned[head // lanes, k, head % lanes] = queries[query, head, k] * scale
        for group in range(groups):
            soon = group == 0 and following < count
            _row_scores(rows, mine, ahead, soon, turned, group, chosen_rows, scores, places)
            for head in range(group * lanes, min(heads, (group + 1) * lanes)):
                for i in range(chosen_rows):
                    shares[head, i] = scores[i * lanes + head - group * lanes]
                inverse[head] = _soften(shares[head], chosen_rows, parts)
        _weigh(rows, mine, chosen_rows, shares, out, query)
        for head in range(heads):
            for d in range(out.shape[2]):
                out[query, head, d] *= inverse[head]


@compiled
def _find(chosen, count, table, page_tokens, width, offsets):  # type: ignore[no-untyped-def]
    """Where each chosen row begins; the last one's place repeats up to whole tiles."""
    for i in range((np.int64(count) + 15) // 16 * 16):
        place = chosen[min(i, np.int64(count) - 1)]
        page = place // np.int32(page_tokens)
        row = np.int64(table[page]) * page_tokens + (place - page * page_tokens)
        offsets[i] = row * width


@compiled
def _row_scores(rows, mine, ahead, soon, turned, group, count, out, places):  # type: ignore[no-untyped-def]
    """out[i, lane] for one group of heads and every chosen row; with `soon`, ask for rows ahead."""
    width, lanes = turned.shape[1:]
    right_at = group * width * lanes
    for i in range(0, count, 8):
        if soon:
            for row in range(i, i + 8):
                for line in range(0, width, 64 // rows.itemsize):
                    fetch(rows, ahead[row] + line)
        if lanes == 4:
            _scores_4(rows, mine, turned, right_at, lanes, width, out, 0, places, i)
        elif lanes == 8:
            _scores_8(rows, mine, turned, right_at, lanes, width, out, 0, places, i)
        else:
            _scores_16(rows, mine, turned, right_at, lanes, width, out, 0, places, i)


@compiled
def _soften(shares, count, parts):  # type: ignore[no-untyped-def]
    """Scores become exponentials above the highest; return 1 / their sum. In 16 fixed lanes."""
    lowest = np.float32(-np.inf)
    padded = (count + 15) // 16 * 16
    for i in range(count, padded):
        shares[i] = lowest
    for lane in range(16):
        parts[lane] = lowest
    for block in range(0, padded, 16):
        for lane in range(16):
            value = shares[block + lane]
            parts[lane] = value if value > parts[lane] else parts[lane]
    highest = lowest
    for lane in range(16):
        highest = parts[lane] if parts[lane] > highest else highest
    for i in range(count):
        shares[i] = exponential(shares[i] - highest)
    for i in range(count, padded):
        shares[i] = np.float32(0)
    for lane in range(16):
        parts[lane] = np.float32(0)
    for block in range(0, padded, 16):
        for lane in range(16):
            parts[lane] += shares[block + lane]
    total = np.float32(0)
    for lane in range(16):
        total += parts[lane]
    return np.float32(1) / total


@compiled
def _weigh(rows, offsets, count, shares, out, query):  # type: ignore[no-untyped-def]
    """out[query, h] = chain over the chosen rows of share * latent."""
    heads = out.shape[1]
    latent = out.shape[2]
    stride = shares.shape[1]
    head = 0
    while head < heads:
        four = head + 4 <= heads
        left = head * stride
        d = 0
        while d + 16 <= latent:
            at = (query * heads + head) * latent + d
            if d + 64 <= latent:
                if four:
                    _values_4x4(shares, left, stride, rows, d, offsets, count, out, at, latent)
                else:
                    _values_1x4(shares, left, stride, rows, d, offsets, count, out, at, latent)
                d += 64
            else:
                if four:
                    _values_4x1(shares, left, stride, rows, d, offsets, count, out, at, latent)
                else:
                    _values_1x1(shares, left, stride, rows, d, offsets, count, out, at, latent)
                d += 16
        for one in range(head, head + (4 if four else 1)):
            _weigh_rest(rows, offsets, count, shares[one], d, out[query, one])
        head += 4 if four else 1


@compiled
def _weigh_rest(rows, offsets, count, shares, first, out):  # type: ignore[no-untyped-def]
    """The columns that fill no vector."""
    for d in range(first, out.size):
        total = np.float32(0)
        for i in range(count):
            total = fused(shares[i], value_at(rows, offsets[i] + d, shares), total)
        out[d] = total
