"""A row times a weight: each output is one chain over the inputs, whatever else is in the batch.

Weights are packed once into panels of 64 outputs, so that a tile streams them in order. On the CPU
this is both the fast form and the deterministic one. Weights in bfloat16 are widened, exactly, as
they are read: they halve the memory, and the arithmetic is float32 all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.device.kernels.lanes import compiled, fused, product_tile

PANEL = 64
Floats = NDArray[np.float32]

_tile_6 = product_tile(6, 4, 16)
_tile_4 = product_tile(4, 4, 16)
_tile_2 = product_tile(2, 4, 16)
_tile_1 = product_tile(1, 4, 16)


@dataclass(frozen=True)
class Packed:
    """One weight, or a stack of equal ones: (..., panels, inputs, 64), padded with zeros."""

    panels: NDArray[np.float32] | NDArray[np.uint16]  # uint16: the bits of bfloat16
    outputs: int


def pack(weight: Tensor) -> Packed:
    """(..., outputs, inputs) -> panels. float32 and bfloat16 stay what they are."""
    outputs, inputs = weight.shape[-2:]
    panels = -(-outputs // PANEL)
    padded = torch.zeros(*weight.shape[:-2], panels * PANEL, inputs, dtype=weight.dtype)
    padded[..., :outputs, :] = weight
    split = padded.view(*weight.shape[:-2], panels, PANEL, inputs).transpose(-1, -2).contiguous()
    narrow = weight.dtype is torch.bfloat16
    return Packed((split.view(torch.uint16) if narrow else split.float()).numpy(), outputs)


def linear(
    x: Floats,
    weight: Packed,
    start: int = 0,
    gain: Floats | None = None,
    epsilon: float = 0.0,
    add: Floats | None = None,
) -> Floats:
    """add + norm(x[:, start : start + inputs]) @ weight.T; no `gain` means no norm."""
    out: Floats = np.empty((x.shape[0], weight.outputs), np.float32)
    _linear(
        x,
        start,
        weight.panels,
        NOTHING if gain is None else gain,
        np.float32(epsilon),
        NO_ROWS if add is None else add,
        out,
    )
    return out


def linear_plain(
    x: Tensor,
    weight: Tensor,
    start: int = 0,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    add: Tensor | None = None,
) -> Tensor:
    """The reference of `linear`; weight is (outputs, inputs)."""
    x = x[:, start : start + weight.shape[1]]
    if gain is not None:
        x = gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))
    product = x @ weight.T
    return product if add is None else add + product


def rms_norm(x: Floats, gain: Floats, epsilon: float) -> Floats:
    out: Floats = np.empty(x.shape, np.float32)
    _rms_norm(x, gain, np.float32(epsilon), out)
    return out


def rms_norm_plain(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def linear_heads(
    x: Floats, heads: int, start: int, stride: int, weight: Packed, out: Floats
) -> None:
    """out[:, h, :outputs] = x[:, start + h * stride : ... + inputs] @ weight[h].T."""
    _linear_heads(x, heads, start, stride, weight.panels, weight.outputs, out)


def linear_heads_plain(x: Tensor, heads: int, start: int, stride: int, weight: Tensor) -> Tensor:
    """The reference: (rows, heads, outputs) from weight (heads, outputs, inputs)."""
    inputs = weight.shape[2]
    parts = [x[:, start + h * stride : start + h * stride + inputs] for h in range(heads)]
    return torch.einsum("rhi,hoi->rho", torch.stack(parts, 1), weight)


NOTHING: Floats = np.empty(0, np.float32)
NO_ROWS: Floats = np.empty((0, 0), np.float32)


@compiled
def multiply(left, lefts, panels, outputs, out, outs):  # type: ignore[no-untyped-def]
    """out[outs[r] + n] = chain of left[lefts[r] + k] * panels; left and out are flat arrays."""
    whole = outputs // PANEL
    _panels(left, lefts, panels[:whole], out, outs)
    if whole < panels.shape[0]:
        rows = lefts.size
        spare = np.empty(rows * PANEL, np.float32)
        _panels(left, lefts, panels[whole:], spare, np.arange(rows) * PANEL)
        for row in range(rows):
            at = outs[row] + whole * PANEL
            for n in range(outputs - whole * PANEL):
                out[at + n] = spare[row * PANEL + n]


@compiled
def _panels(left, lefts, panels, out, outs):  # type: ignore[no-untyped-def]
    rows = lefts.size
    terms = panels.shape[1]
    for panel in range(panels.shape[0]):
        right = panel * terms * PANEL
        at = panel * PANEL
        row = 0
        while row + 6 <= rows:
            _tile_6(left, lefts, panels, right, PANEL, terms, out, at, outs, row)
            row += 6
        if row + 4 <= rows:
            _tile_4(left, lefts, panels, right, PANEL, terms, out, at, outs, row)
            row += 4
        while row + 2 <= rows:
            _tile_2(left, lefts, panels, right, PANEL, terms, out, at, outs, row)
            row += 2
        if row < rows:
            _tile_1(left, lefts, panels, right, PANEL, terms, out, at, outs, row)


@compiled
def scale_to_unit(x, start, width, epsilon, parts):  # type: ignore[no-untyped-def]
    """1 / root mean square of x[start : start + width], summed in 16 fixed lanes."""
    for lane in range(16):
        parts[lane] = np.float32(0)
    whole = width // 16
    for block in range(whole):
        at = start + block * 16
        for lane in range(16):
            parts[lane] = fused(x[at + lane], x[at + lane], parts[lane])
    for lane in range(width - whole * 16):
        value = x[start + whole * 16 + lane]
        parts[lane] = fused(value, value, parts[lane])
    total = np.float32(0)
    for lane in range(16):
        total += parts[lane]
    return np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)


@compiled
def normalise(x, start, gain, epsilon, out, out_start, parts):  # type: ignore[no-untyped-def]
    """out[out_start + i] = gain[i] * (x[start + i] / rms); x and out are flat."""
    scale = scale_to_unit(x, start, gain.size, epsilon, parts)
    for i in range(gain.size):
        out[out_start + i] = gain[i] * (x[start + i] * scale)


@compiled
def _rms_norm(x, gain, epsilon, out):  # type: ignore[no-untyped-def]
    rows, width = x.shape
    parts = np.empty(16, np.float32)
    for row in range(rows):
        normalise(x.reshape(-1), row * width, gain, epsilon, out.reshape(-1), row * width, parts)


@compiled
def _linear(x, start, panels, gain, epsilon, add, out):  # type: ignore[no-untyped-def]
    rows, stride = x.shape
    terms = panels.shape[1]
    outputs = out.shape[1]
    block = 240
    parts = np.empty(16, np.float32)
    normed = np.empty(min(rows, block) * terms if gain.size else 0, np.float32)
    flat = x.reshape(-1)
    out_flat = out.reshape(-1)
    for first in range(0, rows, block):
        count = min(block, rows - first)
        outs = (first + np.arange(count)) * outputs
        if gain.size:
            for row in range(count):
                at = (first + row) * stride + start
                normalise(flat, at, gain, epsilon, normed, row * terms, parts)
            multiply(normed, np.arange(count) * terms, panels, outputs, out_flat, outs)
        else:
            lefts = (first + np.arange(count)) * stride + start
            multiply(flat, lefts, panels, outputs, out_flat, outs)
    if add.size:
        for row in range(rows):
            for n in range(outputs):
                out[row, n] = add[row, n] + out[row, n]


@compiled
def _linear_heads(x, heads, start, stride, panels, outputs, out):  # type: ignore[no-untyped-def]
    rows, width = x.shape
    places = np.arange(rows)
    for head in range(heads):
        lefts = places * width + (start + head * stride)
        outs = places * (out.shape[1] * out.shape[2]) + head * out.shape[2]
        multiply(x.reshape(-1), lefts, panels[head], outputs, out.reshape(-1), outs)
