"""The lightning indexer: score every row of a query's context, keep the best `top`.

score(query, row) = sum over heads of w[h] * relu(q[h] . key). Each query is scored by itself, over
keys read where they lie in their pages, so neither the batch nor the chunk changes a bit. Equal
scores go to the lowest position: a threshold, then a fill in positional order. A context of at
most `top` rows is taken whole, unscored. A NaN among the scores selects nothing: attention over
nothing is NaN, so the damage reaches the logits instead of hiding behind the selection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.device.kernels.lanes import (
    CODES,
    bits,
    compiled,
    count_at_least,
    fetch,
    scored_tile,
    unbits,
)
from stanchion.device.kernels.linear import Floats
from stanchion.device.kernels.rows import Integers, rope_plain, rotate

Places = NDArray[np.int32]

KEYS = 128  # keys a block: their vectors stay in the first-level cache for all queries of a block
AHEAD = 48  # keys between asking for one and reading it: measured, 32 to 64 are alike
SCORES = 1 << 20  # float32 scores held at once, which bounds the queries a block
QUERIES = 64

_tile_4 = scored_tile(4)
_tile_8 = scored_tile(8)
_tile_16 = scored_tile(16)


@dataclass(frozen=True)
class Context:
    """Where each query's context lies: the geometry of a Ragged batch, for kernels."""

    positions: Integers  # (queries,)
    starts: Integers  # (requests + 1,)
    tables: Places  # (pages of all requests,)
    table_starts: Integers  # (requests + 1,)
    page_tokens: int
    arrays: tuple[Integers, Integers, Places, Integers] = field(init=False)  # the four above
    longest: int = field(init=False)  # rows of the longest context
    widest: int = field(init=False)  # queries of the widest request

    def __post_init__(self) -> None:
        """Worked out once a pass, for all layers."""
        arrays = (self.positions, self.starts, self.tables, self.table_starts)
        object.__setattr__(self, "arrays", arrays)
        longest = int(self.positions.max()) + 1 if len(self.positions) else 0
        object.__setattr__(self, "longest", longest)
        widest = int(np.diff(self.starts).max()) if len(self.starts) > 1 else 0
        object.__setattr__(self, "widest", widest)


@dataclass(frozen=True)
class Selection:
    """Query q attends positions[q, : counts[q]], in ascending order."""

    positions: Places  # (queries, at most top)
    counts: Places  # (queries,)


def select(
    mixed: Floats,
    query_start: int,
    heads: int,
    weights: Floats,
    weight_start: int,
    angles: Floats,
    keys: Tensor,
    scales: Tensor | None,
    context: Context,
    top: int,
) -> Selection:
    """Index queries are mixed[:, query_start:], a head after another, not yet roped; head weights
    are weights[:, weight_start : weight_start + heads]. Keys: (pool rows, width), any dtype of the
    schema; scales (pool rows, 1) if they are fp8."""
    queries = len(context.positions)
    positions: Places = np.empty((queries, min(top, context.longest)), np.int32)
    counts: Places = np.empty(queries, np.int32)
    if context.longest <= top:
        _take_all(context.positions, positions, counts)
        return Selection(positions, counts)
    lanes = 4 if heads <= 4 else 8 if heads <= 8 else 16
    width = int(keys.shape[1])
    scale = np.float32(width**-0.5 * heads**-0.5)
    held = max(1, min(QUERIES, SCORES // context.longest, context.widest))
    asked = (mixed, query_start, heads, lanes, weights, weight_start, scale, angles)
    fp8_scales = NO_VALUES if scales is None else scales.view(-1).numpy()
    kept = (plain_bits(keys), fp8_scales, byte_values(keys), width)
    _select(asked, kept, context.arrays, context.page_tokens, top, held, positions, counts)
    return Selection(positions, counts)


def select_plain(
    mixed: Tensor,
    query_start: int,
    heads: int,
    weights: Tensor,
    weight_start: int,
    angles: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    context: Context,
    top: int,
) -> list[list[int]]:
    """The reference: each query's chosen positions, by a stable sort."""
    width = keys.shape[1]
    chosen: list[list[int]] = []
    for request in range(len(context.starts) - 1):
        table = context.tables[context.table_starts[request] : context.table_starts[request + 1]]
        for query in range(context.starts[request], context.starts[request + 1]):
            places = np.arange(context.positions[query] + 1)
            if len(places) <= top:
                chosen.append(places.tolist())
                continue
            rows = table[places // context.page_tokens].astype(np.int64) * context.page_tokens
            at = torch.from_numpy(rows + places % context.page_tokens)
            key = keys[at].float() if scales is None else keys[at].float() * scales[at]
            q = mixed[query, query_start : query_start + heads * width].view(heads, width)
            turned = rope_plain(q[None, :, : angles.shape[1]], angles[query : query + 1])[0]
            q = torch.cat([turned, q[:, angles.shape[1] :]], 1)
            weight = weights[query, weight_start : weight_start + heads]
            score = weight @ torch.relu(q @ key.T)
            if bool(score.isnan().any()):
                chosen.append([])
                continue
            order = torch.sort(score, descending=True, stable=True).indices[:top]
            chosen.append(sorted(order.tolist()))
    return chosen


def plain_bits(rows: Tensor) -> NDArray[np.generic]:
    """Rows, end to end, as numpy can hold them: float32, or the bits of bfloat16 or fp8."""
    flat = rows.view(-1)
    if rows.dtype is torch.float32:
        return flat.numpy()
    return flat.view(torch.uint16 if rows.dtype is torch.bfloat16 else torch.uint8).numpy()


def byte_values(rows: Tensor) -> Floats:
    """What each of the 256 fp8 codes stands for; nothing for other dtypes."""
    if rows.dtype is not torch.float8_e4m3fn:
        return NO_VALUES
    values: Floats = torch.arange(256, dtype=torch.uint8).view(rows.dtype).float().numpy()
    return values


NO_VALUES: Floats = np.empty(0, np.float32)
LOWEST = np.int32(-(2**31))


@compiled
def value_at(rows, place, values):  # type: ignore[no-untyped-def]
    """One element in float32, whatever the dtype; `values` are those of fp8."""
    if rows.itemsize == 4:
        return np.float32(rows[place])
    if rows.itemsize == 2:
        return unbits(np.int32(np.int32(rows[place]) << np.int32(16)))
    return values[np.int64(rows[place]) & 255]


@compiled
def _take_all(positions, chosen, counts):  # type: ignore[no-untyped-def]
    for query in range(positions.size):
        counts[query] = positions[query] + 1
        for i in range(positions[query] + 1):
            chosen[query, i] = i


@compiled
def _select(asked, kept, arrays, page_tokens, top, held, chosen, counts):  # type: ignore[no-untyped-def]
    positions, starts, tables, table_starts = arrays
    heads, lanes, width = asked[2], asked[3], kept[3]
    groups = (heads + lanes - 1) // lanes
    turned = np.zeros((held, groups, width, lanes), np.float32)
    weighing = np.zeros((held, groups, lanes), np.float32)
    longest = positions.max() + 1
    scores = np.empty((held, longest + 8), np.float32)  # tiles write up to 7 beyond the end
    order = np.empty(longest + CODES, np.int32)
    for request in range(starts.size - 1):
        table = tables[table_starts[request] : table_starts[request + 1]]
        first = starts[request]
        while first < starts[request + 1]:
            last = min(first + held, starts[request + 1])
            for query in range(first, last):
                _turn(asked, query, turned[query - first], weighing[query - first])
            _score(kept, table, page_tokens, positions[first:last], top, turned, weighing, scores)
            for query in range(first, last):
                length = positions[query] + 1
                if length <= top:
                    counts[query] = length
                    for i in range(length):
                        chosen[query, i] = i
                else:
                    counts[query] = _best(scores[query - first], length, top, order, chosen[query])
            first = last


@compiled
def _turn(asked, query, turned, weighing):  # type: ignore[no-untyped-def]
    """One query's index vectors, roped, as (groups, width, lanes), and its scaled head weights."""
    mixed, query_start, heads, lanes, weights, weight_start, scale, angles = asked
    width = turned.shape[1]
    rope = angles.shape[1]
    flat = mixed.reshape(-1)
    head_turned = np.empty(rope, np.float32)
    for head in range(heads):
        group = head // lanes
        lane = head % lanes
        at = query * mixed.shape[1] + query_start + head * width
        rotate(flat[at:], angles[query], head_turned)
        for i in range(rope):
            turned[group, i, lane] = head_turned[i]
        for i in range(rope, width):
            turned[group, i, lane] = flat[at + i]
        weighing[group, lane] = weights[query, weight_start + head] * scale


@compiled
def _score(kept, table, page_tokens, positions, top, turned, weighing, scores):  # type: ignore[no-untyped-def]
    """Scores of successive queries of one request; one that takes all is left out."""
    keys, scales, values, width = kept
    groups = turned.shape[1]
    end = positions[-1] + 1
    direct = keys.itemsize > 1  # fp8 goes through a widened block
    offsets = np.empty(end + KEYS + AHEAD, np.int64)
    _place(table, page_tokens, width, offsets)
    block = np.empty(0 if direct else KEYS * width, np.float32)
    packed = np.arange(KEYS) * width
    for first in range(0, end, KEYS):
        soon = direct  # the first query to come asks for the keys ahead, for all of them
        if not direct:
            for i in range(min(KEYS, end - first)):
                at = offsets[first + i]
                for k in range(width):
                    block[i * width + k] = value_at(keys, at + k, values) * scales[at // width]
        for query in range(positions.size):
            length = positions[query] + 1
            count = min(KEYS, length - first)
            if length <= top or count <= 0:
                continue
            for group in range(groups):
                if direct:
                    _score_run(
                        keys, offsets, first, count, turned, weighing, scores, query, group, first,
                        soon,
                    )  # fmt: skip
                    soon = False
                else:
                    _score_run(
                        block, packed, 0, count, turned, weighing, scores, query, group, first,
                        soon,
                    )  # fmt: skip


@compiled
def _place(table, page_tokens, width, offsets):  # type: ignore[no-untyped-def]
    """offsets[p] = where position p's row begins. Past the table any row will do: unread."""
    page = 0
    within = 0
    for place in range(offsets.size):
        offsets[place] = (np.int64(table[page]) * page_tokens + within) * width
        within += 1
        if within == page_tokens:
            within = 0
            page = min(page + 1, table.size - 1)


@compiled
def _score_run(  # type: ignore[no-untyped-def]
    keys, offsets, at, count, turned, weighing, scores, query, group, place, soon
):
    """One query and one group of heads against `count` keys, 8 at a time, and what fills the 8.

    With `soon`, ask for the keys ahead.
    """
    width, lanes = turned.shape[2:]
    for i in range(0, count, 8):
        if soon:
            for key in range(at + i + AHEAD, at + i + AHEAD + 8):
                for line in range(0, width, 64 // keys.itemsize):
                    fetch(keys, offsets[key] + line)
        if lanes == 4:
            _tile_4(keys, offsets, at + i, turned, weighing, scores, query, group, place + i)
        elif lanes == 8:
            _tile_8(keys, offsets, at + i, turned, weighing, scores, query, group, place + i)
        else:
            _tile_16(keys, offsets, at + i, turned, weighing, scores, query, group, place + i)


@compiled
def _best(scores, length, top, order, chosen):  # type: ignore[no-untyped-def]
    """Write the positions of the `top` best scores, ascending; return how many (0: a NaN)."""
    padded = (length + CODES - 1) // CODES * CODES
    damaged = 0
    high = LOWEST
    low = np.int32(2**31 - 1)
    for i in range(length):
        value = scores[i] + np.float32(0)  # minus zero becomes zero
        damaged |= value != value
        code = bits(value)
        code = np.int32(code ^ np.int32((code >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        order[i] = code
        high = max(high, code)
        low = min(low, code)
    if damaged:
        return 0
    for i in range(length, padded):
        order[i] = LOWEST
    under = np.int64(low)  # at least `top` codes are >= under
    over = np.int64(high) + 1  # fewer than `top` are >= over
    above = 0
    while over - under > 1:
        middle = (under + over) >> 1
        reached = count_at_least(order, padded, np.int32(middle))
        if reached >= top:
            under = middle
            if reached == top:
                above = -1
                break
        else:
            over = middle
            above = reached
    floor = np.int32(under)
    ties = top if above < 0 else top - above
    kept = 0
    for block in range(0, padded, 16):
        found = 0
        for i in range(16):
            found |= order[block + i] >= floor
        if found:
            for i in range(block, min(block + 16, length)):
                code = order[i]
                if code > floor or (code == floor and ties > 0):
                    if code == floor:
                        ties -= 1
                    chosen[kept] = i
                    kept += 1
    return kept
