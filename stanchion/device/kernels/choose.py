"""What choosing a token takes: probabilities, draws, log-probabilities, uniforms, NaN checks.

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
Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
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


def judge(
    target: Floats, drawn: Floats, drafts: Integers, counts: Integers, accept: Doubles,
    recover: Doubles,
) -> tuple[Integers, Integers]:  # fmt: skip
    """Rejection sampling over verify windows: how many drafts pass, and the token after them.

    Window w has counts[w] drafts and one row of `target` more, end to end; `drawn` has a row, and
    `accept` a point, for each draft; `recover` has a point for each row. A draft passes while its
    point * q < p; the next token comes from max(p - q, 0), or from p after the last draft. Where
    nothing of that is left, p and q are equal but for rounding, and p itself is right.
    """
    accepted: Integers = np.empty(len(counts), np.int64)
    tokens: Integers = np.empty(len(counts), np.int64)
    _judge(target, drawn, drafts, counts, accept, recover, accepted, tokens)
    return accepted, tokens


def judge_plain(
    target: Tensor, drawn: Tensor, drafts: Integers, counts: Integers, accept: Doubles,
    recover: Doubles,
) -> list[tuple[int, int]]:  # fmt: skip
    said, row, first = [], 0, 0
    for count in counts.tolist():
        passed = 0
        while passed < count:
            token = int(drafts[first + passed])
            p, q = float(target[row + passed, token]), float(drawn[first + passed, token])
            if not accept[first + passed] * q < p:
                break
            passed += 1
        rest = target[row + passed]
        if passed < count and bool((left := (rest - drawn[first + passed]).clamp_min(0)).any()):
            rest = left
        point = torch.tensor([recover[row + passed]])
        said.append((passed, int(draw_plain(rest[None], point)[0])))
        row, first = row + count + 1, first + count
    return said


def log_norms(logits: Floats) -> Floats:
    """log of the sum of exponentials of each row."""
    out: Floats = np.empty(len(logits), np.float32)
    _log_norms(logits, out)
    return out


def log_norms_plain(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, 1)


def finite(rows: Floats) -> NDArray[np.bool_]:
    """Which rows hold neither NaN nor infinity."""
    out = np.empty(len(rows), np.bool_)
    _finite(rows, out)
    return out


def finite_plain(rows: Tensor) -> Tensor:
    return torch.isfinite(rows).all(1)


def uniforms(seeds: Words, stream: int, places: Words) -> Doubles:
    """A number in [0, 1) for each seed and place: splitmix64 of seed, stream and place in turn."""
    out: Doubles = np.empty(len(seeds), np.float64)
    _uniforms(seeds, np.uint64(stream << 56), places, out)
    return out


def uniforms_plain(seeds: Words, stream: int, places: Words) -> list[float]:
    mask = (1 << 64) - 1

    def spread(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) & mask
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    words = [spread(spread(int(seed)) ^ (stream << 56)) for seed in seeds]
    words = [spread((word + int(place)) & mask) for word, place in zip(words, places)]
    return [(word >> 11) * 2.0**-53 for word in words]


@compiled
def _finite(rows, out):  # type: ignore[no-untyped-def]
    for row in range(len(rows)):
        sound = True
        for at in range(rows.shape[1]):
            sound &= np.isfinite(rows[row, at])
        out[row] = sound


@compiled
def _spread(word):  # type: ignore[no-untyped-def]
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled
def _uniforms(seeds, stream, places, out):  # type: ignore[no-untyped-def]
    for at in range(len(seeds)):
        word = _spread(_spread(_spread(seeds[at]) ^ stream) + places[at])
        out[at] = np.float64(word >> np.uint64(11)) * 2.0**-53


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
def _draw_row(chances, point):  # type: ignore[no-untyped-def]
    total = 0.0
    for at in range(len(chances)):
        total += np.float64(chances[at])
    aim = point * total
    summed = 0.0
    chosen = 0
    for at in range(len(chances)):
        if chances[at] > np.float32(0):
            chosen = at  # the last with a chance, should rounding lead past the end
            summed += np.float64(chances[at])
            if summed > aim:
                break
    return chosen


@compiled
def _draw(chances, points, out):  # type: ignore[no-untyped-def]
    for row in range(len(chances)):
        out[row] = _draw_row(chances[row], points[row])


@compiled
def _judge(target, drawn, drafts, counts, accept, recover, accepted, tokens):  # type: ignore[no-untyped-def]
    rest = np.empty(target.shape[1], np.float32)
    row = first = 0
    for window in range(len(counts)):
        passed = 0
        while passed < counts[window]:
            token = drafts[first + passed]
            chance = accept[first + passed] * np.float64(drawn[first + passed, token])
            if not chance < np.float64(target[row + passed, token]):  # NaN never passes
                break
            passed += 1
        left = False
        if passed < counts[window]:
            for at in range(target.shape[1]):
                value = target[row + passed, at] - drawn[first + passed, at]
                rest[at] = value if value > np.float32(0) else np.float32(0)
                left |= value > np.float32(0)
        accepted[window] = passed
        chances = rest if left else target[row + passed]
        tokens[window] = _draw_row(chances, recover[row + passed])
        row += counts[window] + 1
        first += counts[window]


@compiled
def _log_norms(logits, out):  # type: ignore[no-untyped-def]
    parts = np.empty(16, np.float32)
    spare = np.empty(logits.shape[1], np.float32)
    for row in range(len(logits)):
        highest = _highest(logits[row], parts)
        total = _total(logits[row], highest, np.float32(1), spare, parts)
        out[row] = highest + np.float32(math.log(total))
