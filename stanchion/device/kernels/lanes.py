"""What every CPU kernel is made of: compiled functions, and multiply-adds in a stated order.

`fused(a, b, c)` is one rounding of a * b + c. A sum of products is a chain of them from zero, over
ascending k; so its bits are fixed by its terms, and tile sizes, batch and machine load cannot
change them. The tiles below hold such chains in vector registers. NaN and infinity pass through.

Tiles take whole arrays, which so outlive them, and places in them as offsets in elements. They
check nothing: their callers own the bounds. What they read may be bfloat16, as uint16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT = ir.FloatType()
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
CODES = 64  # that `count_at_least` reads at a time


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at first use, keep the machine code beside the source, run without the GIL."""
    return cast(Callable[..., Any], njit(cache=True, nogil=True, error_model="numpy")(function))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.f32"
    if isinstance(a.type, ir.VectorType):
        name = f"llvm.fma.v{a.type.count}f32"
    declared = builder.module.globals.get(name)
    if declared is None:
        declared = ir.Function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(declared, [a, b, c])


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(FLOAT, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def _pick(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(INT32, len(places)), places)
    return builder.shuffle_vector(first, second, mask)


def _load(builder: Any, pointer: Any, lanes: int) -> Any:
    """Lanes of float32, or of bfloat16 bits, which are float32's upper half: exact."""
    element = pointer.type.pointee
    wide = builder.bitcast(pointer, ir.VectorType(element, lanes).as_pointer())
    loaded = builder.load(wide, align=4 if element == FLOAT else 2)
    if element == FLOAT:
        return loaded
    whole = ir.VectorType(INT32, lanes)
    upper = builder.shl(builder.zext(loaded, whole), ir.Constant(whole, [16] * lanes))
    return builder.bitcast(upper, ir.VectorType(FLOAT, lanes))


def _scalar(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(pointer)
    if pointer.type.pointee == FLOAT:
        return loaded
    return builder.bitcast(builder.shl(builder.zext(loaded, INT32), INT32(16)), FLOAT)


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def _start(context: Any, builder: Any, kind: Any, array: Any, element: Any = FLOAT) -> Any:
    """Where an array's elements begin: float32 unless said otherwise, or bfloat16 as uint16."""
    if kind.dtype == types.uint16:
        element = INT16
    made = context.make_array(kind)(context, builder, array)
    return builder.bitcast(made.data, element.as_pointer())


@intrinsic
def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fma(builder, *arguments)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def _bits(typing: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], INT32)

    return types.int32(types.float32), code


@intrinsic
def _unbits(typing: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), code


@intrinsic
def _fetch(typing: Any, array: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(_start(context, builder, array, arguments[0]), [arguments[1]])
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        name = "llvm.prefetch.p0i8"
        declared = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(declared, [builder.bitcast(place, byte), INT32(0), INT32(3), INT32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), code


# The typed faces of these: Python never runs them, compiled functions do. `fetch(array, at)` asks
# for the cache line of an element that will be read soon: pages lie where no hardware guesses.
fused = cast(Callable[[Any, Any, Any], Any], _fused)
bits = cast(Callable[[Any], Any], _bits)
unbits = cast(Callable[[Any], Any], _unbits)
fetch = cast(Callable[[Any, Any], None], _fetch)


def _chains(builder: Any, rows: list[Any], right: Any, terms: Any, shape: tuple[int, int]) -> Any:
    """For each row pointer and vector v: the chain over k of row[k] * right(k)[v].

    right(k) points at each of the vectors.
    """
    vectors, lanes = shape
    zero = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
    entry = builder.block
    body = builder.append_basic_block("chain")
    done = builder.append_basic_block("chained")
    builder.cbranch(builder.icmp_signed("<", INT64(0), terms), body, done)
    builder.position_at_end(body)
    k = builder.phi(INT64)
    k.add_incoming(INT64(0), entry)
    held = [[builder.phi(zero.type) for _ in range(vectors)] for _ in rows]
    loaded = [_load(builder, place, lanes) for place in right(k)]
    following = []
    for row, kept in zip(rows, held):
        value = _splat(builder, _scalar(builder, builder.gep(row, [k])), lanes)
        following.append([_fma(builder, value, one, before) for one, before in zip(loaded, kept)])
    stepped = builder.add(k, INT64(1))
    k.add_incoming(stepped, body)
    for kept, after in zip(held, following):
        for phi, value in zip(kept, after):
            phi.add_incoming(zero, entry)
            phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", stepped, terms), body, done)
    builder.position_at_end(done)
    results: list[list[Any]] = []
    for after in following:
        results.append([])
        for value in after:
            phi = builder.phi(zero.type)
            phi.add_incoming(zero, entry)
            phi.add_incoming(value, body)
            results[-1].append(phi)
    return results


def _offsets(builder: Any, table: Any, at: Any, count: int) -> list[Any]:
    """table[at : at + count], each in a register."""
    places = [builder.add(at, INT64(row)) for row in range(count)]
    return [builder.load(builder.gep(table, [place])) for place in places]


def _beside(builder: Any, matrix: Any, place: Any, shape: tuple[int, int]) -> list[Any]:
    """Pointers to the vectors that lie side by side from matrix[place] on."""
    vectors, lanes = shape
    places = [builder.add(place, INT64(v * lanes)) for v in range(vectors)]
    return [builder.gep(matrix, [one]) for one in places]


def _keep(builder: Any, sums: Any, target: Any, places: list[Any], lanes: int) -> None:
    for one, place in zip(sums, places):
        for v, value in enumerate(one):
            _store(builder, value, builder.gep(target, [builder.add(place, INT64(v * lanes))]))


def product_tile(rows: int, vectors: int, lanes: int) -> Callable[..., Any]:
    """out[r, :] = chain over k of left[r, k] * right[k, :], for a tile of rows and lanes.

    tile(left, lefts, right, right_at, right_stride, terms, out, out_at, outs, at): row r of the
    left side begins at left[lefts[at + r]], its result at out[out_at + outs[at + r]].
    """

    @intrinsic
    def tile(
        typing: Any,
        left: Any,
        lefts: Any,
        right: Any,
        right_at: Any,
        right_stride: Any,
        terms: Any,
        out: Any,
        out_at: Any,
        outs: Any,
        at: Any,
    ) -> Any:
        kinds = (left, lefts, right, *[types.int64] * 3, out, types.int64, outs, types.int64)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left_row = _start(context, builder, left, arguments[0])
            left_table = _start(context, builder, lefts, arguments[1], INT64)
            matrix = _start(context, builder, right, arguments[2])
            right_at, stride, terms = arguments[3:6]
            target = _start(context, builder, out, arguments[6])
            out_at = arguments[7]
            out_table = _start(context, builder, outs, arguments[8], INT64)
            at = arguments[9]

            def right_row(k: Any) -> list[Any]:
                place = builder.add(right_at, builder.mul(k, stride))
                return _beside(builder, matrix, place, (vectors, lanes))

            places = _offsets(builder, left_table, at, rows)
            starts = [builder.gep(left_row, [place]) for place in places]
            sums = _chains(builder, starts, right_row, terms, (vectors, lanes))
            places = [builder.add(out_at, one) for one in _offsets(builder, out_table, at, rows)]
            _keep(builder, sums, target, places, lanes)
            return context.get_dummy_value()

        return types.void(*kinds), code

    return cast(Callable[..., Any], tile)


def gathered_tile(rows: int, vectors: int, lanes: int) -> Callable[..., Any]:
    """The same with scattered rows on the right: row k begins at right[right_at + rights[k]].

    tile(left, left_at, left_stride, right, right_at, rights, terms, out, out_at, out_stride)
    """

    @intrinsic
    def tile(
        typing: Any,
        left: Any,
        left_at: Any,
        left_stride: Any,
        right: Any,
        right_at: Any,
        rights: Any,
        terms: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        whole = types.int64
        kinds = (left, whole, whole, right, whole, rights, whole, out, whole, whole)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left_row = _start(context, builder, left, arguments[0])
            left_at, left_stride = arguments[1:3]
            matrix = _start(context, builder, right, arguments[3])
            right_at = arguments[4]
            table = _start(context, builder, rights, arguments[5], INT64)
            target = _start(context, builder, out, arguments[7])
            out_at, out_stride = arguments[8:10]

            def strided(first: Any, stride: Any) -> list[Any]:
                return [builder.add(first, builder.mul(stride, INT64(r))) for r in range(rows)]

            def right_row(k: Any) -> list[Any]:
                place = builder.add(right_at, builder.load(builder.gep(table, [k])))
                return _beside(builder, matrix, place, (vectors, lanes))

            starts = [builder.gep(left_row, [one]) for one in strided(left_at, left_stride)]
            sums = _chains(builder, starts, right_row, arguments[6], (vectors, lanes))
            _keep(builder, sums, target, strided(out_at, out_stride), lanes)
            return context.get_dummy_value()

        return types.void(*kinds), code

    return cast(Callable[..., Any], tile)


def _summed(builder: Any, vectors: list[Any], lanes: int) -> list[Any]:
    """Sum each vector's lanes as a tree over neighbours; the sums stand in order."""
    while lanes > 1:
        if len(vectors) > 1:
            wide = 2 * vectors[0].type.count
            pairs = list(zip(vectors[::2], vectors[1::2]))
        else:
            wide = vectors[0].type.count
            pairs = [(vectors[0], ir.Constant(vectors[0].type, ir.Undefined))]
        vectors = [
            builder.fadd(
                _pick(builder, one, two, list(range(0, wide, 2))),
                _pick(builder, one, two, list(range(1, wide, 2))),
            )
            for one, two in pairs
        ]
        lanes //= 2
    return vectors


def scored_tile(lanes: int) -> Callable[..., Any]:
    """Index scores of 8 keys for one query: the sum over heads of w[h] * relu(key . q[h]).

    tile(keys, offsets, at, turned, weighing, scores, query, group, place): key r begins at
    keys[offsets[at + r]], its score goes to scores[query, place + r]. turned is (queries, groups,
    terms, lanes) and weighing (queries, groups, lanes), with a head a lane; the heads' sum is a
    tree over neighbours. Groups after the first are added.
    """
    rows = 8

    @intrinsic
    def tile(
        typing: Any,
        keys: Any,
        offsets: Any,
        at: Any,
        turned: Any,
        weighing: Any,
        scores: Any,
        query: Any,
        group: Any,
        place: Any,
    ) -> Any:
        kinds = (keys, offsets, types.int64, turned, weighing, scores, *[types.int64] * 3)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            key_row = _start(context, builder, keys, arguments[0])
            table = _start(context, builder, offsets, arguments[1], INT64)
            matrix = _start(context, builder, turned, arguments[3])
            weights = _start(context, builder, weighing, arguments[4])
            target = _start(context, builder, scores, arguments[5])
            _, groups, terms, _ = _shape(context, builder, turned, arguments[3])
            _, scores_width = _shape(context, builder, scores, arguments[5])
            query, group, place = arguments[6:]
            number = builder.add(builder.mul(query, groups), group)

            def query_row(k: Any) -> list[Any]:
                line = builder.add(builder.mul(number, terms), k)
                return [builder.gep(matrix, [builder.mul(line, INT64(lanes))])]

            places = _offsets(builder, table, arguments[2], rows)
            starts = [builder.gep(key_row, [one]) for one in places]
            sums = _chains(builder, starts, query_row, terms, (1, lanes))
            pointer = builder.gep(weights, [builder.mul(number, INT64(lanes))])
            weight = _load(builder, pointer, lanes)
            weighted = [_rectified(builder, value, weight) for (value,) in sums]
            starting = builder.icmp_signed("==", group, INT64(0))
            out = builder.add(builder.mul(query, scores_width), place)
            for vector in _summed(builder, weighted, lanes):
                pointer = builder.gep(target, [out])
                added = builder.fadd(_load(builder, pointer, vector.type.count), vector)
                _store(builder, builder.select(starting, vector, added), pointer)
                out = builder.add(out, INT64(vector.type.count))
            return context.get_dummy_value()

        return types.void(*kinds), code

    return cast(Callable[..., Any], tile)


def _shape(context: Any, builder: Any, kind: Any, array: Any) -> list[Any]:
    shape = context.make_array(kind)(context, builder, array).shape
    unpack: Callable[..., Any] = cgutils.unpack_tuple
    return list(unpack(builder, shape))


def _rectified(builder: Any, value: Any, weight: Any) -> Any:
    """weight * relu(value); NaN compares false, and stays."""
    zero = ir.Constant(value.type, [0.0] * value.type.count)
    negative = builder.fcmp_ordered("<", value, zero)
    return builder.fmul(weight, builder.select(negative, zero, value))


@intrinsic
def _count_at_least(typing: Any, codes: Any, count: Any, floor: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _start(context, builder, codes, arguments[0], INT32)
        count, floor = arguments[1:]
        vector = ir.VectorType(INT32, 16)
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), floor, INT32(0))
        floors = _pick(builder, first, first, [0] * 16)
        zero = ir.Constant(vector, [0] * 16)
        entry = builder.block
        body = builder.append_basic_block("count")
        done = builder.append_basic_block("counted")
        builder.branch(body)
        builder.position_at_end(body)
        at = builder.phi(INT64)
        at.add_incoming(INT64(0), entry)
        totals = [builder.phi(vector) for _ in range(CODES // 16)]
        after = []
        for part, total in enumerate(totals):
            place = builder.gep(pointer, [builder.add(at, INT64(16 * part))])
            loaded = builder.load(builder.bitcast(place, vector.as_pointer()), align=4)
            hits = builder.icmp_signed(">=", loaded, floors)
            after.append(builder.sub(total, builder.sext(hits, vector)))
            total.add_incoming(zero, entry)
            total.add_incoming(after[-1], body)
        stepped = builder.add(at, INT64(CODES))
        at.add_incoming(stepped, body)
        builder.cbranch(builder.icmp_signed("<", stepped, count), body, done)
        builder.position_at_end(done)
        whole = reduce(builder.add, after)
        lanes = [builder.extract_element(whole, INT32(lane)) for lane in range(16)]
        return builder.sext(reduce(builder.add, lanes), INT64)

    return types.int64(codes, types.int64, types.int32), code


# count_at_least(codes, count, floor): how many of the first `count` int32 are at least `floor`;
# count is a multiple of CODES, and more than none.
count_at_least = cast(Callable[[Any, Any, Any], Any], _count_at_least)


@compiled
def exponential(x: Any) -> Any:
    """e to the x in float32, about 1 ulp; clamped to the normal range, NaN stays NaN."""
    if x > np.float32(88.0):
        x = np.float32(88.0)
    if x < np.float32(-87.0):
        x = np.float32(-87.0)
    magic = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer in the low bits
    shifted = fused(x, np.float32(1.4426950408889634), magic)
    power = shifted - magic
    rest = fused(power, np.float32(-0.693145751953125), x)
    rest = fused(power, np.float32(-1.4286068203094173e-06), rest)
    value = np.float32(1.9841270e-4)
    value = fused(value, rest, np.float32(1.3888889e-3))
    value = fused(value, rest, np.float32(8.3333333e-3))
    value = fused(value, rest, np.float32(4.1666667e-2))
    value = fused(value, rest, np.float32(1.6666667e-1))
    value = fused(value, rest, np.float32(0.5))
    value = fused(value, rest, np.float32(1.0))
    value = fused(value, rest, np.float32(1.0))
    exponent = np.int32(bits(shifted) - np.int32(0x4B400000)) + np.int32(127)
    return value * unbits(np.int32(np.int32(exponent) << np.int32(23)))
