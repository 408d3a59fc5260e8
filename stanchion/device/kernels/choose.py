"""Rows of logits to probabilities, to a token, and to log-probabilities, in one pass each.

Sums run in 16 fixed lanes, so a row's result depends on nothing but the row.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.device.kernels.lanes import compiled, exponential
from stanchion.device.kernels.linear import Floats

Doubles = NDArray[np.float64]
LOWEST = np.float32(-87.0)  # below this the exponential is no normal number: it counts as 0


def soften(logits: Floats, heat: Floats) -> Floats:
    """softmax(logits / heat): (rows, vocabulary), one temperature a row. -inf becomes exactly 0."""
    out: Floats = np.empty_like(logits)
    _soften(logits, heat, out)
    return out


def soften_plain(logits: Tensor, heat: Tensor) -> Tensor:
    return torch.softmax(logits / heat[:, None], 1)


def draw(chances: Floats, points: Doubles) -> NDArray[np.int64]:
    """Invert each row's cumulative sum at its point in [0, 1). Rows need not sum to 1; a token
    without a chance is never drawn."""
    out = np.empty(len(chances), np.int64)
    _draw(chances, points, out)
    return out


def draw_plain(chances: Tensor, points: Tensor) -> Tensor:
    sums = chances.double().cumsum(1)
    return torch.searchsorted(sums, points[:, None] * sums[:, -1:], right=True)[:, 0]


def log_norms(logits: Floats) -> Floats:
    """log of the sum of exponentials of each row."""
    out: Floats = np.empty(len(logits), np.float32)
    _log_norms(logits, out)
    return out


def log_norms_plain(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, 1)


@compiled
def _highest(row, parts):  # type: ignore[no-untyped-def]
    for lane in range(16):
        parts[lane] = -np.inf
    whole = len(row) // 16 * 16
    for block in range(0, whole, 16):
        for lane in range(16):
            value = row[block + lane]
            parts[lane] = value if value > parts[lane] else parts[lane]
    highest = np.float32(-np.inf)
    for lane in range(16):
        highest = parts[lane] if parts[lane] > highest else highest
    for at in range(whole, len(row)):
        highest = row[at] if row[at] > highest else highest
    return highest


@compiled
def _total(row, highest, scale, out, parts):  # type: ignore[no-untyped-def]
    """out = exponentials of (row - highest) * scale; return their sum."""
    for at in range(len(row)):
        value = (row[at] - highest) * scale
        out[at] = exponential(value) if value > LOWEST else np.float32(0)
    for lane in range(16):
        parts[lane] = np.float32(0)
    whole = len(row) // 16 * 16
    for block in range(0, whole, 16):
        for lane in range(16):
            parts[lane] += out[block + lane]
    total = np.float32(0)
    for lane in range(16):
        total += parts[lane]
    for at in range(whole, len(row)):
        total += out[at]
    return total


@compiled
def _soften(logits, heat, out):  # type: ignore[no-untyped-def]
    parts = np.empty(16, np.float32)
    for row in range(len(logits)):
        highest = _highest(logits[row], parts)
        scale = np.float32(1) / heat[row]
        share = np.float32(1) / _total(logits[row], highest, scale, out[row], parts)
        for at in range(logits.shape[1]):
            out[row, at] *= share


@compiled
def _draw(chances, points, out):  # type: ignore[no-untyped-def]
    for row in range(len(chances)):
        total = 0.0
        for at in range(chances.shape[1]):
            total += np.float64(chances[row, at])
        aim = points[row] * total
        summed = 0.0
        chosen = 0
        for at in range(chances.shape[1]):
            if chances[row, at] > np.float32(0):
                chosen = at  # the last with a chance, should rounding lead past the end
                summed += np.float64(chances[row, at])
                if summed > aim:
                    break
        out[row] = chosen


@compiled
def _log_norms(logits, out):  # type: ignore[no-untyped-def]
    parts = np.empty(16, np.float32)
    spare = np.empty(logits.shape[1], np.float32)
    for row in range(len(logits)):
        highest = _highest(logits[row], parts)
        total = _total(logits[row], highest, np.float32(1), spare, parts)
        out[row] = highest + np.float32(math.log(total))
