"""KV rows: from a layer's input projection to what the cache keeps, written in place.

`mixed` is the fused projection of a layer's input, (queries, ...); each function reads its own
columns. Rope pairs (2i, 2i + 1) rotate together and come out as two halves, as the checkpoints'
reference does. `angles` is (queries, rope): cosines, then sines.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.device.kernels.lanes import compiled
from stanchion.device.kernels.linear import Floats, normalise, rms_norm_plain

Integers = NDArray[np.int64]


def latent_rows(
    mixed: Floats,
    start: int,
    gain: Floats,
    epsilon: float,
    angles: Floats,
    out: Floats,
    rows: Integers,
) -> None:
    """out[rows[q]] = normed latent | roped key of query q, from mixed[:, start:]."""
    _latent_rows(mixed, start, gain, np.float32(epsilon), angles, out, rows)


def latent_rows_plain(
    mixed: Tensor, start: int, gain: Tensor, epsilon: float, angles: Tensor
) -> Tensor:
    """The rows that `latent_rows` writes: (queries, latent + rope)."""
    latent = mixed[:, start : start + len(gain)]
    key = mixed[:, start + len(gain) : start + len(gain) + angles.shape[1]]
    return torch.cat([rms_norm_plain(latent, gain, epsilon), rope_plain(key, angles)], 1)


def index_rows(
    mixed: Floats,
    start: int,
    gain: Floats,
    bias: Floats,
    angles: Floats,
    out: Floats,
    rows: Integers,
) -> None:
    """out[rows[q]] = roped LayerNorm of mixed[q, start : start + width]."""
    _index_rows(mixed, start, gain, bias, angles, out, rows)


def index_rows_plain(
    mixed: Tensor, start: int, gain: Tensor, bias: Tensor, angles: Tensor
) -> Tensor:
    """The rows that `index_rows` writes: (queries, index width)."""
    width = len(gain)
    rope = angles.shape[1]
    key = mixed[:, start : start + width]
    key = torch.nn.functional.layer_norm(key, (width,), gain, bias, LAYER_NORM_EPSILON)
    return torch.cat([rope_plain(key[:, :rope], angles), key[:, rope:]], 1)


def rope_heads(
    x: Floats, start: int, stride: int, angles: Floats, out: Floats, out_start: int
) -> None:
    """out[:, h, out_start:] = rope of x[:, start + h * stride :] for every head of out."""
    _rope_heads(x, start, stride, angles, out, out_start)


def rope_plain(x: Tensor, angles: Tensor) -> Tensor:
    """(queries, rope) or (queries, heads, rope), interleaved pairs in, two halves out."""
    half = angles.shape[1] // 2
    shape = (len(x),) + (1,) * (x.dim() - 2) + (half,)
    cosine = angles[:, :half].reshape(shape)
    sine = angles[:, half:].reshape(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cosine - odd * sine, odd * cosine + even * sine], -1)


LAYER_NORM_EPSILON = 1e-6  # transformers, GlmMoeDsaIndexer.k_norm


@compiled
def rotate(x, angles, out):  # type: ignore[no-untyped-def]
    """Rope of one head of one query: the first `angles.size` of x."""
    half = angles.size // 2
    for i in range(half):
        even = x[2 * i]
        odd = x[2 * i + 1]
        out[i] = even * angles[i] - odd * angles[half + i]
        out[half + i] = odd * angles[i] + even * angles[half + i]


@compiled
def _latent_rows(mixed, start, gain, epsilon, angles, out, rows):  # type: ignore[no-untyped-def]
    queries, stride = mixed.shape
    width = out.shape[1]
    flat = mixed.reshape(-1)
    kept = out.reshape(-1)
    parts = np.empty(16, np.float32)
    for query in range(queries):
        at = query * stride + start
        row = rows[query] * width
        normalise(flat, at, gain, epsilon, kept, row, parts)
        rotate(flat[at + gain.size :], angles[query], kept[row + gain.size :])


@compiled
def _index_rows(mixed, start, gain, bias, angles, out, rows):  # type: ignore[no-untyped-def]
    queries, stride = mixed.shape
    width = gain.size
    flat = mixed.reshape(-1)
    kept = out.reshape(-1)
    normed = np.empty(width, np.float32)
    for query in range(queries):
        at = query * stride + start
        mean = np.float32(0)
        for i in range(width):
            mean += flat[at + i]
        mean /= np.float32(width)
        variance = np.float32(0)
        for i in range(width):
            variance += (flat[at + i] - mean) * (flat[at + i] - mean)
        variance /= np.float32(width)
        scale = np.float32(1) / np.sqrt(variance + np.float32(LAYER_NORM_EPSILON))
        for i in range(width):
            normed[i] = (flat[at + i] - mean) * scale * gain[i] + bias[i]
        row = rows[query] * width
        rope = angles.shape[1]
        rotate(normed, angles[query], kept[row:])
        for i in range(rope, width):
            kept[row + i] = normed[i]


@compiled
def _rope_heads(x, start, stride, angles, out, out_start):  # type: ignore[no-untyped-def]
    queries, heads, width = out.shape
    flat = x.reshape(-1)
    kept = out.reshape(-1)
    for query in range(queries):
        for head in range(heads):
            at = query * x.shape[1] + start + head * stride
            place = (query * heads + head) * width + out_start
            rotate(flat[at:], angles[query], kept[place:])
