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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.core.messages import TopToken
from stanchion.core.request import Sampling

Uniform = Literal["draft", "accept", "recover"]
_STREAMS: dict[Uniform, int] = {"draft": 1, "accept": 2, "recover": 3}
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Ask:
    """One row's question: which token comes at `place`, after `generated` output tokens."""

    sampling: Sampling
    seed: int
    place: int
    generated: int = 0
    ends: tuple[int, ...] = ()  # token ids that end the answer, banned below min_tokens
    prompt: NDArray[np.int32] | None = None  # for the repetition penalty
    output: tuple[int, ...] = ()  # for the penalties: output tokens so far, drafts included

    @property
    def shaped(self) -> bool:
        """Do the logits change before the temperature?"""
        one = self.sampling
        penalised = one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1.0
        return bool(penalised or one.logit_bias or self.generated < one.min_tokens)


@dataclass(frozen=True)
class Window:
    """One request's verify window: drafts, what each was drawn from, and one ask a row."""

    asks: tuple[Ask, ...]  # drafts + 1
    drafts: tuple[int, ...] = ()
    drawn_from: Tensor | None = None  # (drafts, vocabulary); None where drafts are greedy


@dataclass(frozen=True)
class Chosen:
    """What a window came to: accepted drafts, then one more token; each with its raw logprob."""

    tokens: list[int]
    accepted: int
    logprobs: list[float]
    top: list[list[TopToken]] = field(default_factory=list)


def uniform(seed: int, stream: Uniform, place: int) -> float:
    """A number in [0, 1) that only these three decide (splitmix64, applied to each in turn)."""
    word = _spread(seed & _MASK)
    word = _spread(word ^ (_STREAMS[stream] << 56))
    return (_spread((word + place) & _MASK) >> 11) * 2.0**-53


def _spread(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def draft(logits: Tensor, asks: Sequence[Ask]) -> tuple[list[int], list[Tensor | None]]:
    """Propose one token a row. Return them, and the distribution each was drawn from.

    logits: float32 (rows, vocabulary), the draft layer's.
    """
    shaped = _shape(logits, asks)
    tokens: list[int] = shaped.argmax(1).tolist()
    drawn: list[Tensor | None] = [None] * len(asks)
    sampled = [row for row, ask in enumerate(asks) if not ask.sampling.greedy]
    if sampled:
        probabilities = distribution(shaped[sampled], [asks[row] for row in sampled])
        points = [uniform(asks[row].seed, "draft", asks[row].place) for row in sampled]
        for row, token, one in zip(sampled, _draw(probabilities, points), probabilities):
            tokens[row], drawn[row] = token, one
    return tokens, drawn


def verify(logits: Tensor, windows: Sequence[Window]) -> list[Chosen]:
    """Judge each window's drafts and add one token. `logits` holds their rows in order."""
    asks = [ask for window in windows for ask in window.asks]
    shaped = _shape(logits, asks)
    best = shaped.argmax(1).tolist()
    sampled = [row for row, ask in enumerate(asks) if not ask.sampling.greedy]
    target = distribution(shaped[sampled], [asks[row] for row in sampled]) if sampled else shaped
    ends, first, first_sampled = [], 0, 0
    finals: list[tuple[int, Tensor, float]] = []
    for at, window in enumerate(windows):
        rows = len(window.asks)
        if window.asks[0].sampling.greedy:
            accepted = _agreed(window.drafts, best[first : first + rows])
            ends.append((accepted, best[first + accepted]))
        else:
            own = target[first_sampled : first_sampled + rows]
            accepted, rest = _judge(window, own)
            place = window.asks[accepted]
            finals.append((at, rest, uniform(place.seed, "recover", place.place)))
            ends.append((accepted, 0))
            first_sampled += rows
        first += rows
    if finals:
        drawn = _draw(torch.stack([rest for _, rest, _ in finals]), [u for _, _, u in finals])
        for (at, _, _), token in zip(finals, drawn):
            ends[at] = ends[at][0], token
    return _chosen(logits, windows, ends)


def _agreed(drafts: tuple[int, ...], best: list[int]) -> int:
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return accepted


def _judge(window: Window, target: Tensor) -> tuple[int, Tensor]:
    """How many drafts pass, and the distribution that the next token comes from."""
    for at, token in enumerate(window.drafts):
        assert window.drawn_from is not None
        ask, p, q = window.asks[at], target[at], window.drawn_from[at]
        if uniform(ask.seed, "accept", ask.place) * float(q[token]) < float(p[token]):
            continue
        return at, _residual(p, q)
    return len(window.drafts), target[len(window.drafts)]


def _residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp_min(0.0)
    return rest if float(rest.sum()) > 0.0 else p


def _chosen(
    logits: Tensor, windows: Sequence[Window], ends: list[tuple[int, int]]
) -> list[Chosen]:
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
    norms = torch.logsumexp(logits, 1)
    picked = logits[torch.arange(len(logits)), torch.tensor(tokens, dtype=torch.long)]
    scores: list[float] = (picked - norms).tolist()
    top: list[list[TopToken]] = []
    for row, count in enumerate(tops):
        if not count:
            top.append([])
            continue
        best = (logits[row] - norms[row]).topk(min(count, logits.shape[1]))
        top.append([TopToken(t, v) for t, v in zip(best.indices.tolist(), best.values.tolist())])
    return scores, top


def distribution(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Probabilities (rows, vocabulary) after temperature, min_p, top_k and top_p, in that order."""
    heat = torch.tensor([ask.sampling.temperature for ask in asks])
    probabilities = torch.softmax(logits / heat[:, None], 1)
    for row, ask in enumerate(asks):
        one = ask.sampling
        if one.min_p > 0.0 or one.top_k is not None or one.top_p < 1.0:
            probabilities[row] = _filtered(probabilities[row], one)
    return probabilities


def _filtered(row: Tensor, sampling: Sampling) -> Tensor:
    """Zero what the filters exclude. At least the best token stays; ties stay by lowest id."""
    if sampling.min_p > 0.0:
        row = torch.where(row >= sampling.min_p * row.max(), row, 0.0)
    if sampling.top_k is not None or sampling.top_p < 1.0:
        values, ids = row.sort(descending=True, stable=True)
        keep = len(values) if sampling.top_k is None else min(sampling.top_k, len(values))
        if sampling.top_p < 1.0:
            before = values.cumsum(0, dtype=torch.float64) - values
            within = int((before < sampling.top_p * float(values[:keep].sum())).sum())
            keep = max(1, min(keep, within))
        row = torch.zeros_like(row).scatter(0, ids[:keep], values[:keep])
    return row / row.sum()


def _draw(probabilities: Tensor, points: Sequence[float]) -> list[int]:
    """Invert each row's cumulative distribution at its point."""
    sums = probabilities.cumsum(1, dtype=torch.float64)
    aims = torch.tensor(points, dtype=torch.float64) * sums[:, -1]
    tokens: list[int] = torch.searchsorted(sums, aims[:, None], right=True)[:, 0].tolist()
    for row, token in enumerate(tokens):
        if token >= probabilities.shape[1] or not float(probabilities[row, token]) > 0.0:
            tokens[row] = int(probabilities[row].nonzero()[-1, 0])  # rounding at the very end
    return tokens


def _shape(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Apply what changes logits before the temperature, on copies of the rows that need it."""
    rows = [row for row, ask in enumerate(asks) if ask.shaped]
    if not rows:
        return logits
    shaped = logits.clone()
    for row in rows:
        _penalise(shaped[row], asks[row])
    return shaped


def _penalise(row: Tensor, ask: Ask) -> None:
    one = ask.sampling
    output = torch.tensor(ask.output, dtype=torch.long)
    if one.repetition_penalty != 1.0:
        seen = output
        if ask.prompt is not None:
            seen = torch.cat([torch.from_numpy(ask.prompt).long(), output])
        seen = seen.unique()
        value = row[seen]
        row[seen] = torch.where(
            value > 0, value / one.repetition_penalty, value * one.repetition_penalty
        )
    if len(output) and (one.presence_penalty or one.frequency_penalty):
        counts = torch.bincount(output, minlength=len(row))
        row -= one.frequency_penalty * counts + one.presence_penalty * (counts > 0)
    for token, bias in one.logit_bias:
        row[token] += bias
    if ask.generated < one.min_tokens:
        row[list(ask.ends)] = -torch.inf
