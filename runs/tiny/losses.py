"""Held-out loss: of raw text, of quote tasks, and by position. Same sequences at every call."""

from dataclasses import asdict, dataclass

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
def losses_by_token(network: Network, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Of the model and of its draft layer, [T] each, zero where there is no label."""
    tokens = torch.from_numpy(sequence.tokens)[None]
    labels = torch.from_numpy(sequence.labels)
    turn = turn_of(torch.arange(len(sequence.tokens))[None], network.shape)
    hidden, _ = network.hidden(tokens, turn, LOOK)
    drafted, _ = network.draft(network.embed(tokens), shifted(hidden), turn, LOOK)
    head = network.lm_head.weight
    return token_losses(hidden[0], head, labels), token_losses(drafted[0], head, labels)


def held_out(network: Network, ids: Ids, quoter: Quoter, length: int, count: int) -> HeldOut:
    network.eval()
    raw = [losses_by_token(network, s) for s in raw_windows(ids, length, count)]
    total, answered, labels, answers = 0.0, 0.0, 0, 0
    for sequence in quote_sequences(ids, quoter, length, count):
        loss, _ = losses_by_token(network, sequence)
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


def by_position(network: Network, ids: Ids, length: int, count: int) -> Tensor:
    """Mean loss at every position of windows of `length`. [length]"""
    network.eval()
    windows = raw_windows(ids, length, count)
    mean = torch.stack([losses_by_token(network, window)[0] for window in windows]).mean(0)
    network.train()
    return mean
