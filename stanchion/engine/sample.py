"""From logits to tokens: the distribution a request asked for, and speculation that keeps it.

Target and draft go through the same steps (penalties, bias, temperature, filters), so rejection
sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318) is lossless
in distribution: accept draft d with probability min(1, p(d) / q(d)), else draw from the residual
max(p - q, 0); after k accepted drafts draw a bonus token from p.

Every uniform is a pure function of (request's seed, stream, position), with one stream each for
drafts, acceptance and recovery. So a draw never depends on the batch, on preemption, or on which
worker makes it, and no uniform is used for two purposes.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.core.messages import TopToken
from stanchion.core.request import Sampling
from stanchion.device.kernels import choose
from stanchion.engine.ask import Ask, Chosen

Uniform = Literal["draft", "accept", "recover"]
_STREAMS: dict[Uniform, int] = {"draft": 1, "accept": 2, "recover": 3}
_MASK = (1 << 64) - 1
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """One request's verify window: drafts, what each was drawn from, and one ask a row."""

    asks: tuple[Ask, ...]  # drafts + 1
    drafts: tuple[int, ...] = ()
    drawn_from: Tensor | None = None  # (drafts, vocabulary); None where drafts are greedy

    @property
    def greedy(self) -> bool:
        return self.asks[0].sampling.greedy


def uniforms(seeds: Sequence[int], stream: Uniform, places: Sequence[int]) -> Doubles:
    """Numbers in [0, 1) that only seed, stream and place decide."""
    words = np.array([one & _MASK for one in seeds], np.uint64)
    return choose.uniforms(words, _STREAMS[stream], np.array(places, np.uint64))


def draft(logits: Tensor, asks: Sequence[Ask]) -> tuple[list[int], list[Tensor | None]]:
    """Propose one token a row. Return them, and the distribution each was drawn from.

    logits: float32 (rows, vocabulary), the draft layer's.
    """
    shaped = _shape(logits, asks)
    drawn: list[Tensor | None] = [None] * len(asks)
    sampled = [row for row, ask in enumerate(asks) if not ask.sampling.greedy]
    tokens: list[int] = [0] * len(asks)
    if len(sampled) < len(asks):
        tokens = shaped.argmax(1).tolist()
    if sampled:
        rows = shaped if len(sampled) == len(asks) else shaped[sampled]
        probabilities = distribution(rows, [asks[row] for row in sampled])
        points = _points("draft", [asks[row] for row in sampled])
        for row, token, one in zip(sampled, _draw(probabilities, points), probabilities):
            tokens[row], drawn[row] = token, one
    return tokens, drawn


def verify(logits: Tensor, windows: Sequence[Window]) -> list[Chosen]:
    """Judge each window's drafts and add one token. `logits` holds their rows in order."""
    asks = [ask for window in windows for ask in window.asks]
    shaped = _shape(logits, asks)
    greedy = any(window.greedy for window in windows)
    best = shaped.argmax(1).tolist() if greedy else []
    sampled = [row for row, ask in enumerate(asks) if not ask.sampling.greedy]
    rows = shaped if len(sampled) == len(asks) else shaped[sampled]
    target = distribution(rows, [asks[row] for row in sampled]) if sampled else shaped
    ends: list[tuple[int, int]] = []
    judged = iter(_judge([one for one in windows if not one.greedy], target))
    first = 0
    for window in windows:
        if window.greedy:
            accepted = _agreed(window.drafts, best[first : first + len(window.asks)])
            ends.append((accepted, best[first + accepted]))
        else:
            ends.append(next(judged))
        first += len(window.asks)
    return _chosen(logits, windows, ends)


def _agreed(drafts: tuple[int, ...], best: list[int]) -> int:
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return accepted


def _judge(windows: Sequence[Window], target: Tensor) -> list[tuple[int, int]]:
    """For each window: how many drafts pass, and the token after them.

    target: (drafts + 1 rows a window, vocabulary), the probabilities at each place.
    """
    if not windows:
        return []
    drafts = np.array([token for one in windows for token in one.drafts], np.int64)
    counts = np.array([len(one.drafts) for one in windows], np.int64)
    sources = [one.drawn_from for one in windows if one.drawn_from is not None]
    drawn = torch.cat(sources) if sources else target[:0]
    accept = _points("accept", [ask for one in windows for ask in one.asks[:-1]])
    recover = _points("recover", [ask for one in windows for ask in one.asks])
    accepted, tokens = choose.judge(target.numpy(), drawn.numpy(), drafts, counts, accept, recover)
    return list(zip(accepted.tolist(), tokens.tolist()))


def _points(stream: Uniform, asks: Sequence[Ask]) -> Doubles:
    return uniforms([ask.seed for ask in asks], stream, [ask.place for ask in asks])


def _chosen(logits: Tensor, windows: Sequence[Window], ends: list[tuple[int, int]]) -> list[Chosen]:
    tokens = [[*one.drafts[:accepted], last] for one, (accepted, last) in zip(windows, ends)]
    rows, first = [], 0
    for window, own in zip(windows, tokens):
        rows += list(range(first, first + len(own)))
        first += len(window.asks)
    kept = logits if len(rows) == len(logits) else logits[rows]
    flat = [token for own in tokens for token in own]
    tops = [window.asks[0].sampling.logprobs for window, own in zip(windows, tokens) for _ in own]
    scores, top = score(kept, flat, tops)
    said, first = [], 0
    for own, (accepted, _) in zip(tokens, ends):
        past = first + len(own)
        said.append(Chosen(own, accepted, scores[first:past], top[first:past]))
        first = past
    return said


def score(
    logits: Tensor, tokens: Sequence[int], tops: Sequence[int | None]
) -> tuple[list[float], list[list[TopToken]]]:
    """Raw log-probability of one token a row, and the row's best where asked for."""
    norms = choose.log_norms(logits.numpy())
    picked = logits.numpy()[np.arange(len(logits)), np.array(tokens, np.int64)]
    scores: list[float] = (picked - norms).tolist()
    top: list[list[TopToken]] = []
    for row, count in enumerate(tops):
        if not count:
            top.append([])
            continue
        best = (logits[row] - float(norms[row])).topk(min(count, logits.shape[1]))
        top.append([TopToken(t, v) for t, v in zip(best.indices.tolist(), best.values.tolist())])
    return scores, top


def distribution(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Probabilities (rows, vocabulary) after temperature, min_p, top_k and top_p, in that order."""
    heat = np.array([ask.sampling.temperature for ask in asks], np.float32)
    probabilities = torch.from_numpy(choose.soften(logits.numpy(), heat))
    rows = [row for row, ask in enumerate(asks) if ask.filtered]
    if rows:
        picked = [asks[row].sampling for row in rows]
        probabilities[rows] = _filtered(probabilities[rows], picked)
    return probabilities


def _filtered(rows: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Zero what the filters exclude. At least the best token stays; ties stay by lowest id."""
    width = rows.shape[1]
    least = torch.tensor([one.min_p for one in samplings])
    keep = torch.tensor([min(one.top_k or width, width) for one in samplings])
    mass = torch.tensor([one.top_p for one in samplings], dtype=torch.float64)
    rows = torch.where(rows >= least[:, None] * rows.amax(1, keepdim=True), rows, 0.0)
    values, ids = rows.sort(dim=1, descending=True, stable=True)
    kept = torch.arange(width)[None] < keep[:, None]
    values = torch.where(kept, values, 0.0)
    sums = values.cumsum(1, dtype=torch.float64)
    before = sums - values
    inside = before < mass[:, None] * sums[:, -1:]
    values = torch.where(inside | (mass[:, None] >= 1.0), values, 0.0)
    rows = torch.zeros_like(rows).scatter(1, ids, values)
    return rows / rows.sum(1, keepdim=True)


def _draw(probabilities: Tensor, points: Doubles) -> list[int]:
    drawn: list[int] = choose.draw(probabilities.numpy(), points).tolist()
    return drawn


def _shape(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Apply what changes logits before the temperature, on a copy where any row needs it."""
    rows = [row for row, ask in enumerate(asks) if ask.shaped]
    if not rows:
        return logits
    shaped = logits.clone()
    picked = [asks[row] for row in rows]
    changed = _penalised(shaped[rows], picked)
    biases = [ask.sampling.logit_bias for ask in picked]
    tokens = [token for bias in biases for token, _ in bias]
    amounts = torch.tensor([amount for bias in biases for _, amount in bias])
    changed.index_put_((_owners(biases), torch.tensor(tokens).long()), amounts, accumulate=True)
    for at, ask in enumerate(picked):
        if ask.generated < ask.sampling.min_tokens:
            changed[at, list(ask.ends)] = -torch.inf
    _restrict(changed, picked)
    shaped[rows] = changed
    return shaped


def _restrict(rows: Tensor, asks: Sequence[Ask]) -> None:
    """Forbid what grammars do not have; (rows, vocabulary), in place."""
    masked = [(at, ask.allowed) for at, ask in enumerate(asks) if ask.allowed is not None]
    if not masked:
        return
    packed = np.stack([np.frombuffer(bits, np.uint8) for _, bits in masked])
    allowed = np.unpackbits(packed, axis=1, count=rows.shape[1], bitorder="little").astype(np.bool_)
    places = [at for at, _ in masked]
    rows[places] = rows[places].masked_fill(torch.from_numpy(~allowed), -torch.inf)


def _penalised(rows: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Apply the three penalties; (rows, vocabulary) in and out."""
    counts = torch.zeros_like(rows)
    _count(counts, [ask.output for ask in asks])
    seen = counts.clone()
    repeats = [ask.sampling.repetition_penalty for ask in asks]
    if any(one != 1.0 for one in repeats):
        _count(seen, [() if ask.prompt is None else ask.prompt for ask in asks])
        repeat = torch.tensor(repeats)[:, None]
        rows = torch.where(seen > 0, torch.where(rows > 0, rows / repeat, rows * repeat), rows)
    frequency = torch.tensor([ask.sampling.frequency_penalty for ask in asks])[:, None]
    presence = torch.tensor([ask.sampling.presence_penalty for ask in asks])[:, None]
    return rows - frequency * counts - presence * (counts > 0)


def _count(counts: Tensor, tokens: Sequence[Sequence[int] | NDArray[np.int32]]) -> None:
    """Add how often each token stands in each row's list."""
    flat = torch.from_numpy(np.concatenate([np.asarray(one, np.int64) for one in tokens]))
    counts.index_put_((_owners(tokens), flat), torch.ones(len(flat)), accumulate=True)


def _owners(lists: Sequence[Sized]) -> Tensor:
    """For each element of the lists end to end, which list it is in."""
    return torch.from_numpy(np.repeat(np.arange(len(lists)), [len(one) for one in lists]))
