"""Digests of KV pages: of their bytes alone, wherever they lie, near the speed of memory.

A row is read in blocks of 64 bytes, each of eight words in a chain of its own; what is left over
is the end of one more block, behind zeros. Each step, and each joining of two chains, can be
undone, so that a change within one word always shows. A page's digest is the sum, mod 2^64, of its
rows' hashes, each mixed with the row's place: so it can be added to as rows come. It finds faults,
and is no defence against an adversary.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.device.kernels.lanes import INT32, INT64, compiled

Bytes = NDArray[np.uint8]
Pages = NDArray[np.int32]
Digest = NDArray[np.uint64]

LANES = 8
BLOCK = 8 * LANES
TURN = 29
STEP = 0x9E3779B97F4A7C15  # odd, as all factors here: so they can be undone
OTHER = 0xD6E8FEB86659FD93
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
SEEDS = (
    *(0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
    *(0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917),
)


def row_digests(
    memory: Bytes, offset: int, row_bytes: int, page_tokens: int, pages: Pages, rows: Pages
) -> Digest:
    """For each page, the digest of its first `rows` rows. Page 0 begins at memory[offset]."""
    _check(memory, offset, row_bytes, page_tokens, pages, rows)
    out = np.empty(len(pages), np.uint64)
    _row_digests(memory, offset, row_bytes, page_tokens, pages, rows, out)
    return out


def row_digests_plain(
    memory: Bytes, offset: int, row_bytes: int, page_tokens: int, pages: Pages, rows: Pages
) -> Digest:
    whole = row_bytes // BLOCK * BLOCK
    blocks = -(-row_bytes // BLOCK)
    page_bytes = page_tokens * row_bytes
    out = np.zeros(len(pages), np.uint64)
    for at, (page, count) in enumerate(zip(pages.tolist(), rows.tolist(), strict=True)):
        start = offset + page * page_bytes
        given = memory[start : start + count * row_bytes].reshape(count, row_bytes)
        padded = np.zeros((count, blocks * BLOCK), np.uint8)
        padded[:, :whole] = given[:, :whole]
        padded[:, blocks * BLOCK - (row_bytes - whole) :] = given[:, whole:]
        words = padded.view("<u8").reshape(count, blocks, LANES)
        chains = np.repeat(np.array([SEEDS], np.uint64) ^ np.uint64(row_bytes), count, 0)
        for block in range(blocks):
            chains = _turned_plain((chains ^ words[:, block]) * np.uint64(STEP))
        while chains.shape[1] > 1:
            half = chains.shape[1] // 2
            left, right = chains[:, :half], chains[:, half:]
            chains = _turned_plain(left * np.uint64(STEP) ^ right * np.uint64(OTHER))
        places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(STEP)
        out[at] = _mixed_plain(chains[:, 0] ^ places).sum(dtype=np.uint64)
    return out


def _check(
    memory: Bytes, offset: int, row_bytes: int, page_tokens: int, pages: Pages, rows: Pages
) -> None:
    if len(pages) != len(rows):
        raise Bug(f"digests of {len(pages)} pages of {len(rows)} lengths")
    if len(pages) == 0:
        return
    end = offset + (int(pages.max()) + 1) * page_tokens * row_bytes
    if min(offset, int(pages.min()), int(rows.min())) < 0 or end > len(memory):
        raise Bug("a digest of memory outside the pool")
    if int(rows.max()) > page_tokens:
        raise Bug(f"a digest of {int(rows.max())} rows of a page of {page_tokens}")


def _turned_plain(value: Digest) -> Digest:
    return (value << np.uint64(TURN)) | (value >> np.uint64(64 - TURN))


def _mixed_plain(value: Digest) -> Digest:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(SECOND)
    return value ^ (value >> np.uint64(31))


emit = cast(Any, cgutils)
BYTE = ir.IntType(8)
WIDE = ir.VectorType(INT64, LANES)


def _every(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _turned(builder: Any, value: Any) -> Any:
    kind = value.type
    name = f"llvm.fshl.v{kind.count}i64"
    declared = builder.module.globals.get(name)
    if declared is None:
        declared = ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(declared, [value, value, _every(kind, TURN)])


def _stepped(builder: Any, chains: Any, words: Any) -> Any:
    return _turned(builder, builder.mul(builder.xor(chains, words), _every(WIDE, STEP)))


def _block(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, WIDE.as_pointer()), align=1)


def _last_block(builder: Any, start: Any, row_bytes: Any, rest: Any) -> Any:
    """The last `rest` bytes of the row, behind zeros. Reads nothing outside the row."""
    kind = ir.ArrayType(BYTE, 2 * BLOCK)
    kept = ir.Constant(kind, [0] * BLOCK + [255] * BLOCK)
    masks = builder.bitcast(emit.global_constant(builder, "digest_masks", kept), BYTE.as_pointer())
    room = emit.alloca_once(builder, WIDE)
    with builder.if_else(builder.icmp_unsigned(">=", row_bytes, INT64(BLOCK))) as (long, short):
        with long:
            end = builder.gep(start, [builder.sub(row_bytes, INT64(BLOCK))])
            mask = _block(builder, builder.gep(masks, [rest]))
            builder.store(builder.and_(_block(builder, end), mask), room)
        with short:
            builder.store(_every(WIDE, 0), room)
            place = builder.bitcast(room, BYTE.as_pointer())
            place = builder.gep(place, [builder.sub(INT64(BLOCK), rest)])
            emit.raw_memcpy(builder, place, start, rest, INT64(1))
    return builder.load(room)


def _joined(builder: Any, chains: Any) -> Any:
    """Halves onto each other until one is left."""
    while chains.type.count > 1:
        half = chains.type.count // 2
        sides = []
        for first, factor in ((0, STEP), (half, OTHER)):
            side = _shuffled(builder, chains, [*range(first, first + half)])
            sides.append(builder.mul(side, _every(side.type, factor)))
        chains = _turned(builder, builder.xor(*sides))
    return builder.extract_element(chains, INT32(0))


def _shuffled(builder: Any, vector: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(INT32, len(places)), places)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


@intrinsic
def _row(typing: Any, memory: Any, at: Any, row_bytes: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        start = builder.gep(builder.bitcast(made.data, BYTE.as_pointer()), [arguments[1]])
        size = arguments[2]
        first = builder.insert_element(ir.Constant(WIDE, ir.Undefined), size, INT32(0))
        sizes = _shuffled(builder, first, [0] * LANES)
        held = emit.alloca_once_value(builder, builder.xor(sizes, ir.Constant(WIDE, SEEDS)))
        blocks = builder.lshr(size, INT64(6))
        with cgutils.for_range(builder, blocks) as loop:
            place = builder.gep(start, [builder.shl(loop.index, INT64(6))])
            builder.store(_stepped(builder, builder.load(held), _block(builder, place)), held)
        rest = builder.and_(size, INT64(BLOCK - 1))
        with builder.if_then(builder.icmp_unsigned("!=", rest, INT64(0))):
            last = _last_block(builder, start, size, rest)
            builder.store(_stepped(builder, builder.load(held), last), held)
        return _joined(builder, builder.load(held))

    return types.uint64(memory, types.int64, types.int64), code


_hashed = cast(Any, _row)


@compiled
def _row_digests(memory, offset, row_bytes, page_tokens, pages, rows, out):  # type: ignore[no-untyped-def]
    for i in range(pages.size):
        start = offset + np.int64(pages[i]) * page_tokens * row_bytes
        total = np.uint64(0)
        for row in range(rows[i]):
            value = _hashed(memory, start + row * row_bytes, row_bytes)
            value ^= np.uint64(row + 1) * np.uint64(STEP)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(FIRST)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(SECOND)
            total += value ^ (value >> np.uint64(31))
        out[i] = total
