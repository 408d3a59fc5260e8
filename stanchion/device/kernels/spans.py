"""Byte ranges from one run of memory to another, as fast as memcpy, without the GIL.

Large copies are stored past the caches: what they bring is not read at once, and whoever computes
meanwhile keeps what it has there. libc's memcpy does so too, but only for one large range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.device.kernels.lanes import INT64, compiled

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
LINE = 64
STREAMED_BYTES = 1 << 18  # what is less stays in a core's own cache


def copy_spans(
    source: Bytes, destination: Bytes, source_at: Offsets, destination_at: Offsets, sizes: Offsets
) -> None:
    """destination[destination_at[i] :][: sizes[i]] = source[source_at[i] :][: sizes[i]], all i.

    The two do not overlap.
    """
    span_copy(source, destination, source_at, destination_at, sizes)()


def span_copy(
    source: Bytes, destination: Bytes, source_at: Offsets, destination_at: Offsets, sizes: Offsets
) -> Callable[[], None]:
    """`copy_spans` for later: checked now, and then of hardly any Python."""
    for memory, at in ((source, source_at), (destination, destination_at)):
        if len(at) != len(sizes):
            raise Bug("a span has no end")
        if len(at) and (min(at.min(), sizes.min()) < 0 or (at + sizes).max() > len(memory)):
            raise Bug(f"a span outside memory of {len(memory)} bytes")
    if sizes.sum() < STREAMED_BYTES:
        return partial(_copy_spans, source, destination, source_at, destination_at, sizes)
    place = destination_at + destination.ctypes.data
    streams = (place % LINE == 0) & (sizes % LINE == 0)
    return partial(_stream_spans, source, destination, streams, source_at, destination_at, sizes)


def copy_spans_plain(
    source: Bytes, destination: Bytes, source_at: Offsets, destination_at: Offsets, sizes: Offsets
) -> None:
    for here, there, size in zip(source_at, destination_at, sizes, strict=True):
        destination[there : there + size] = source[here : here + size]


@intrinsic
def _move(typing: Any, source: Any, here: Any, destination: Any, there: Any, size: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        here, there = (
            builder.gep(
                context.make_array(signature.args[at])(context, builder, arguments[at]).data,
                [arguments[at + 1]],
            )
            for at in (0, 2)
        )
        cgutils.raw_memcpy(builder, there, here, arguments[4], INT64(1))  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(source, types.int64, destination, types.int64, types.int64), code


@intrinsic
def _stream(typing: Any, source: Any, here: Any, destination: Any, there: Any) -> Any:
    """LINE bytes to a place that is aligned to them, past the caches."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), LINE).as_pointer()
        here, there = (
            builder.bitcast(
                builder.gep(
                    context.make_array(signature.args[at])(context, builder, arguments[at]).data,
                    [arguments[at + 1]],
                ),
                line,
            )
            for at in (0, 2)
        )
        stored = builder.store(builder.load(here, align=1), there, align=LINE)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(source, types.int64, destination, types.int64), code


@intrinsic
def _settle(typing: Any) -> Any:
    """What was stored past the caches is in place for everybody."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


_moved, _streamed, _settled = cast(Any, _move), cast(Any, _stream), cast(Any, _settle)


@compiled
def _copy_spans(source, destination, source_at, destination_at, sizes):  # type: ignore[no-untyped-def]
    for i in range(sizes.size):
        _moved(source, source_at[i], destination, destination_at[i], sizes[i])


@compiled
def _stream_spans(source, destination, streams, source_at, destination_at, sizes):  # type: ignore[no-untyped-def]
    """`streams`: the spans of whole lines, to places that are aligned to them."""
    for i in range(sizes.size):
        if not streams[i]:
            _moved(source, source_at[i], destination, destination_at[i], sizes[i])
            continue
        for at in range(0, sizes[i], LINE):
            _streamed(source, source_at[i] + at, destination, destination_at[i] + at)
    _settled()
