"""The feed-forward half of a layer: routed experts and those that everyone chooses.

A shared expert is an expert that every token chooses with weight 1, and a dense layer has nothing
but one such expert; so one kernel serves all layers. Tokens are grouped by expert; each token's
results are added in the order of its own choice, so its bits do not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.device.kernels.lanes import compiled, exponential, fused
from stanchion.device.kernels.linear import (
    Floats,
    Packed,
    multiply,
    normalise,
    rms_norm_plain,
)

TOKENS = 240  # tokens a block, which bounds what is held for them


@dataclass(frozen=True)
class Routing:
    """How a token chooses. `groups` of experts, of which the best `groups_kept` take part."""

    chosen: int
    groups: int = 1
    groups_kept: int = 1
    normalised: bool = True
    scaling: float = 1.0


@dataclass(frozen=True)
class Experts:
    """Routed experts first, then the `always` shared ones."""

    router: Packed  # inputs: hidden, outputs: routed experts
    bias: Floats  # (routed,) added to the scores for the choice alone
    gate_up: Packed  # (experts, ...) outputs: 2 * inner
    down: Packed  # (experts, ...) outputs: hidden
    routing: Routing
    always: int


def experts(hidden: Floats, gain: Floats, epsilon: float, all_of: Experts) -> Floats:
    """hidden + the weighted experts' answers to norm(hidden): (rows, hidden)."""
    out: Floats = np.empty(hidden.shape, np.float32)
    how = all_of.routing
    _experts(
        hidden,
        gain,
        np.float32(epsilon),
        all_of.router.panels,
        all_of.bias,
        all_of.gate_up.panels,
        all_of.down.panels,
        how.chosen,
        how.groups,
        how.groups_kept,
        how.normalised,
        np.float32(how.scaling),
        all_of.always,
        out,
    )
    return out


def route(logits: Floats, bias: Floats, how: Routing) -> tuple[NDArray[np.int64], Floats]:
    """(rows, experts) -> each row's experts and their weights, (rows, chosen)."""
    chosen = np.empty((len(logits), how.chosen), np.int64)
    weights: Floats = np.empty((len(logits), how.chosen), np.float32)
    spare: Floats = np.empty((2, max(1, logits.shape[1])), np.float32)
    for row in range(len(logits)):
        _choose(
            logits[row],
            bias,
            how.groups,
            how.groups_kept,
            how.normalised,
            np.float32(how.scaling),
            spare,
            chosen[row],
            weights[row],
        )
    return chosen, weights


def route_plain(logits: Tensor, bias: Tensor, how: Routing) -> Tensor:
    """The reference of the routing: (rows, experts) of weights, zero for who is not chosen."""
    scores = logits.sigmoid()
    choice = scores + bias
    grouped = choice.view(len(choice), how.groups, -1)
    best_two = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
    kept = torch.zeros_like(best_two).scatter(1, best_two.topk(how.groups_kept).indices, 1.0)
    choice = grouped.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)
    at = choice.topk(how.chosen, -1).indices
    weights = scores.gather(1, at)
    if how.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores).scatter(1, at, weights * how.scaling)


def experts_plain(
    hidden: Tensor,
    gain: Tensor,
    epsilon: float,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    how: Routing,
    always: int,
) -> Tensor:
    """The reference of `experts`:
    gate_up (experts, 2 * inner, hidden), down (experts, hidden, inner)."""
    normed = rms_norm_plain(hidden, gain, epsilon)
    weights = torch.ones(len(hidden), always)
    if how.chosen:
        weights = torch.cat([route_plain(normed @ router.T, bias, how), weights], 1)
    gate, up = torch.einsum("th,eih->tei", normed, gate_up).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * up
    return hidden + torch.einsum("tei,ehi,te->th", inner, down, weights)


@compiled
def _choose(logits, bias, groups, groups_kept, normalised, scaling, spare, chosen, weights):  # type: ignore[no-untyped-def]
    """One token's experts; the lowest index wins a tie. A NaN makes its weights NaN."""
    count = logits.size
    size = count // groups
    scores = spare[0]
    choice = spare[1]
    damaged = False
    for expert in range(count):
        scores[expert] = np.float32(1) / (np.float32(1) + exponential(-logits[expert]))
        choice[expert] = scores[expert] + bias[expert]
        damaged |= logits[expert] != logits[expert]
    if groups > 1:
        _keep_groups(choice, groups, groups_kept, size)
    total = np.float32(0)
    for turn in range(weights.size):
        best = -1
        for expert in range(count):
            if choice[expert] == np.float32(np.inf):
                continue  # chosen already
            if best < 0 or choice[expert] > choice[best]:
                best = expert
        chosen[turn] = best
        choice[best] = np.float32(np.inf)
        weights[turn] = scores[best]
        total += scores[best]
    for turn in range(weights.size):
        if damaged:
            weights[turn] = np.float32(np.nan)
        elif normalised:
            weights[turn] = weights[turn] / (total + np.float32(1e-20)) * scaling
        else:
            weights[turn] *= scaling


@compiled
def _keep_groups(choice, groups, groups_kept, size):  # type: ignore[no-untyped-def]
    """Groups score by their two best; the others' experts are out."""
    sums = np.empty(groups, np.float32)
    for group in range(groups):
        first = np.float32(-np.inf)
        second = np.float32(-np.inf)
        for i in range(group * size, (group + 1) * size):
            if choice[i] > first:
                second = first
                first = choice[i]
            elif choice[i] > second:
                second = choice[i]
        sums[group] = first + second if size > 1 else first
    for _ in range(groups_kept):
        best = -1
        for group in range(groups):
            if sums[group] < np.float32(np.inf) and (best < 0 or sums[group] > sums[best]):
                best = group
        if best >= 0:
            sums[best] = np.float32(np.inf)
    for group in range(groups):
        if sums[group] != np.float32(np.inf):
            for i in range(group * size, (group + 1) * size):
                choice[i] = np.float32(-np.inf)


@compiled
def _experts(  # type: ignore[no-untyped-def]
    hidden,
    gain,
    epsilon,
    router,
    bias,
    gate_up,
    down,
    chosen,
    groups,
    groups_kept,
    normalised,
    scaling,
    always,
    out,
):
    rows, width = hidden.shape
    inner = down.shape[2]
    routed = bias.size
    each = chosen + always
    block = min(TOKENS, rows)
    parts = np.empty(16, np.float32)
    spare = np.empty((2, max(1, routed)), np.float32)
    normed = np.empty(block * width, np.float32)
    logits = np.empty((block, routed), np.float32)
    picks = np.empty((block, each), np.int64)
    weights = np.ones((block, each), np.float32)
    between = np.empty(block * 2 * inner, np.float32)
    answers = np.empty(block * each * width, np.float32)
    for first in range(0, rows, TOKENS):
        count = min(TOKENS, rows - first)
        for row in range(count):
            at = (first + row) * width
            normalise(hidden.reshape(-1), at, gain, epsilon, normed, row * width, parts)
        if chosen:
            places = np.arange(count)
            multiply(normed, places * width, router, routed, logits.reshape(-1), places * routed)
        for row in range(count):
            if chosen:
                _choose(
                    logits[row],
                    bias,
                    groups,
                    groups_kept,
                    normalised,
                    scaling,
                    spare,
                    picks[row, :chosen],
                    weights[row, :chosen],
                )
            for i in range(always):
                picks[row, chosen + i] = routed + i
        for expert in range(routed + always):
            _answer(expert, picks[:count], normed, width, inner, gate_up, down, between, answers)
        for row in range(count):
            for n in range(width):
                total = np.float32(0)
                for i in range(each):
                    total = fused(weights[row, i], answers[(row * each + i) * width + n], total)
                out[first + row, n] = hidden[first + row, n] + total


@compiled
def _answer(expert, picks, normed, width, inner, gate_up, down, between, answers):  # type: ignore[no-untyped-def]
    """One expert's answers to the tokens that chose it, each to its own place."""
    each = picks.shape[1]
    mine = 0
    for row in range(picks.shape[0]):
        for i in range(each):
            mine += picks[row, i] == expert
    if mine == 0:
        return
    lefts = np.empty(mine, np.int64)
    outs = np.empty(mine, np.int64)
    found = 0
    for row in range(picks.shape[0]):
        for i in range(each):
            if picks[row, i] == expert:
                lefts[found] = row * width
                outs[found] = (row * each + i) * width
                found += 1
    places = np.arange(mine) * (2 * inner)
    multiply(normed, lefts, gate_up[expert], 2 * inner, between, places)
    for pair in range(mine):
        at = pair * 2 * inner
        for n in range(inner):
            gate = between[at + n]
            swish = gate / (np.float32(1) + exponential(-gate))
            between[at + n] = swish * between[at + inner + n]
    multiply(between, places, down[expert], width, answers, outs)
