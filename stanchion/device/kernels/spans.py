"""Byte ranges from one run of memory to another, as fast as memcpy, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.device.kernels.lanes import INT64, compiled

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


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
    return partial(_copy_spans, source, destination, source_at, destination_at, sizes)


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


_moved = cast(Any, _move)


@compiled
def _copy_spans(source, destination, source_at, destination_at, sizes):  # type: ignore[no-untyped-def]
    for i in range(sizes.size):
        _moved(source, source_at[i], destination, destination_at[i], sizes[i])
