"""Held-out loss: of raw text and of quote tasks. Same sequences at every call."""

from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from batches import Ids, Quoter, Sequence
from network import NO_LABEL, Look, Network, shifted, turn_of
from torch import Tensor

LOOK = Look(sparse=True, taught=None)


@dataclass(frozen=True)
class HeldOut:
    """Mean loss in nats a token."""

    raw: float
    raw_draft: float
    quote: float
    quote_answers: float

    def line(self) -> str:
        return " ".join(f"{name} {value:.3f}" for name, value in asdict(self).items())


def raw_windows(ids: Ids, length: int, count: int) -> list[Sequence]:
    starts = np.linspace(0, len(ids) - length - 2, count).astype(int).tolist()
    return [
        Sequence(ids[s : s + length], ids[s + 1 : s + length + 1], np.zeros(length, dtype=bool))
        for s in starts
    ]


def quote_sequences(ids: Ids, quoter: Quoter, length: int, count: int) -> list[Sequence]:
    generator = np.random.default_rng(5)
    return [quoter.sequence(ids, length, generator) for _ in range(count)]


def token_losses(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ head.T).float()
    return F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")


@torch.no_grad()
def model_losses(network: Network, sequence: Sequence) -> Tensor:
    """Of the model alone, [T]."""
    tokens = torch.from_numpy(sequence.tokens)[None]
    turn = turn_of(torch.arange(len(sequence.tokens))[None], network.shape)
    hidden, _ = network.hidden(tokens, turn, LOOK)
    return token_losses(hidden[0], network.lm_head.weight, torch.from_numpy(sequence.labels))


@torch.no_grad()
def losses_by_token(network: Network, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Of the model and of its draft layer, [T] each, zero where there is no label."""
    tokens = torch.from_numpy(sequence.tokens)[None]
    labels = torch.from_numpy(sequence.labels)
    turn = turn_of(torch.arange(len(sequence.tokens))[None], network.shape)
    hidden, _ = network.hidden(tokens, turn, LOOK)
    drafted, _ = network.draft(network.embed(tokens), shifted(hidden), turn, LOOK)
    head = network.lm_head.weight
    return token_losses(hidden[0], head, labels), token_losses(drafted[0], head, labels)


def held_out(
    network: Network, ids: Ids, quoter: Quoter, length: int, count: int, pool: Executor
) -> HeldOut:
    network.eval()
    measure = partial(losses_by_token, network)
    raw = list(pool.map(measure, raw_windows(ids, length, count)))
    quotes = quote_sequences(ids, quoter, length, count)
    total, answered, labels, answers = 0.0, 0.0, 0, 0
    for sequence, (loss, _) in zip(quotes, pool.map(measure, quotes), strict=True):
        there = sequence.labels != NO_LABEL
        chosen = torch.from_numpy(sequence.answers & there)
        total += float(loss.sum())
        answered += float(loss[chosen].sum())
        labels += int(there.sum())
        answers += int(chosen.sum())
    network.train()
    return HeldOut(
        raw=float(torch.stack([own for own, _ in raw]).mean()),
        raw_draft=float(torch.stack([draft for _, draft in raw]).mean()),
        quote=total / labels,
        quote_answers=answered / answers,
    )
