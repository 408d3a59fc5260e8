"""What one step trains on: raw source text and *quote* tasks, as token ids.

A quote task is a part of a file, then a conversation: the user gives one line of it, the assistant
answers with that line and the lines that follow. It has a known right answer that depends on far
context, so damage to a cache shows. The format is that of the chat template, token by token:
`<|role|>`, a newline, the content, and nothing after it. The end token ends an answer only where
the part itself ends; where an answer is cut short there is no label, nor does a label ever ask for
the next role.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from network import NO_LABEL
from numpy.random import Generator
from numpy.typing import NDArray
from shape import ASSISTANT, END, SYSTEM, USER
from tokenizers import Tokenizer
from torch import Tensor

Ids = NDArray[np.int64]
TESTS_SHARE = 0.4  # of sequences, from the test suite; it is most of the text, and repetitive


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [B, T]
    labels: Tensor  # [B, T], what follows each token, or NO_LABEL
    positions: Tensor  # [B, T]

    def split(self, rows: int) -> list["Batch"]:
        parts = [slice(start, start + rows) for start in range(0, len(self.tokens), rows)]
        return [Batch(self.tokens[p], self.labels[p], self.positions[p]) for p in parts]


@dataclass(frozen=True)
class Sequence:
    tokens: Ids
    labels: Ids
    answers: NDArray[np.bool_]  # labels that lie in an assistant's answer


@dataclass(frozen=True)
class Prompt:
    tokens: Ids
    answer: Ids  # what a perfect quoter says


class Newlines:
    """Which tokens hold a newline, and how the tokenizer writes an indent after one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.get_vocab_size()
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(size)]
        self.holds = np.array(["\n" in text for text in texts])
        self.after_role: dict[int, list[int]] = {}
        self.indent: dict[int, list[int]] = {}
        for token in np.flatnonzero(self.holds).tolist():
            # A line that begins after "\n\n    " begins after "\n    " at the head of a message.
            # The tokenizer glues an indent to the newline before it, so both forms are kept.
            spaces = texts[token].rpartition("\n")[2]
            self.after_role[token] = tokenizer.encode("\n" + spaces).ids
            self.indent[token] = tokenizer.encode(spaces).ids
        (self.newline,) = tokenizer.encode("\n").ids

    def line_starts(self, ids: Ids) -> Ids:
        """Indices of tokens right after a newline, where the first token is not one itself."""
        holds = self.holds[ids]
        return np.flatnonzero(holds[:-1] & ~holds[1:]) + 1


class Quoter:
    """Makes quote tasks from the ids of a corpus part. Same generator, same tasks."""

    def __init__(self, newlines: Newlines) -> None:
        self.newlines = newlines

    def part(self, ids: Ids, length: int, generator: Generator) -> Ids:
        """About `length` tokens: a newline token, then whole lines."""
        while True:
            start = int(generator.integers(0, len(ids) - length - 1))
            part = ids[start : start + length]
            lines = np.flatnonzero(self.newlines.holds[part])
            if len(lines) >= 8 and not (part == END).any():
                return part[lines[0] : lines[-1]]

    def key(self, part: Ids, start: int, most: int = 20) -> Ids:
        """The line at `start` as a user types it, with the newline after the role."""
        end = start + 1
        while end < len(part) and end - start < most and not self.newlines.holds[part[end]]:
            end += 1
        return np.array(self.newlines.after_role[int(part[start - 1])] + part[start:end].tolist())

    def opening(self, part: Ids, generator: Generator) -> list[int]:
        """The part as a system message, as bare text, or at the head of the user's message."""
        head = self.newlines.after_role[int(part[0])]
        kind = generator.choice(3, p=(0.65, 0.25, 0.10))
        role = ([SYSTEM], [], [USER])[kind]
        return [*role, *head, *part[1:].tolist()]

    def answer_head(self, part: Ids, start: int) -> list[int]:
        return [self.newlines.newline, *self.newlines.indent[int(part[start - 1])]]

    def sequence(self, ids: Ids, length: int, generator: Generator) -> Sequence:
        """One training sequence: a part of a file and as many questions on it as fit."""
        share = generator.uniform(0.25, 0.75)
        part = self.part(ids, int(share * length), generator)
        starts = self.newlines.line_starts(part)
        tokens = self.opening(part, generator)
        labels = [*tokens[1:], NO_LABEL]
        in_answer = [False] * len(tokens)
        joined = tokens[0] == USER  # the first question follows in the same message
        while len(tokens) < length:
            start = int(generator.choice(starts))
            key = [*([] if joined else [USER]), *self.key(part, start).tolist()]
            head = [ASSISTANT, *self.answer_head(part, start)]
            end = min(len(part), start + int(generator.integers(24, 320)))
            answer = part[start:end].tolist()
            last = END if end == len(part) else NO_LABEL
            said = head + answer
            tokens += key + said
            # The role tokens are the server's to write: no label asks for them.
            labels += [*key[1:], NO_LABEL, *said[1:], last]
            in_answer += [False] * (len(key) + 1) + [True] * (len(said) - 1)
            joined = False
        return Sequence(
            np.array(tokens[:length]), np.array(labels[:length]), np.array(in_answer[:length])
        )

    def prompt(self, ids: Ids, length: int, answer: int, generator: Generator) -> Prompt:
        """A prompt of exactly `length` tokens whose right answer has at least `answer` tokens."""
        while True:
            start = int(generator.integers(0, len(ids) - length - 1))
            part = ids[start : start + length]
            lines = np.flatnonzero(self.newlines.holds[part])
            if len(lines) < 8 or (part == END).any():
                continue
            part = part[lines[0] :]
            starts = self.newlines.line_starts(part)
            begin = int(generator.choice(starts))
            opening = [SYSTEM, *self.newlines.after_role[int(part[0])]]
            question = [USER, *self.key(part, begin).tolist()]
            # The indent is the model's to say: a server's prompt ends at the newline.
            question += [ASSISTANT, self.newlines.newline]
            indent = self.newlines.indent[int(part[begin - 1])]
            room = length - len(opening) - len(question)
            if room > len(part) - 1 or begin + answer > room:
                continue
            part = part[: room + 1]
            tokens = np.array(opening + part[1:].tolist() + question)
            return Prompt(tokens, np.array([*indent, *part[begin:].tolist()])[:answer])


def raw_sequence(ids: Ids, length: int, generator: Generator) -> Sequence:
    start = int(generator.integers(0, len(ids) - length - 1))
    window = ids[start : start + length + 1]
    return Sequence(window[:-1], window[1:], np.zeros(length, dtype=bool))


def stretched_positions(length: int, span: int, generator: Generator) -> Ids:
    """Positions of a text that was cut in up to four parts and pulled apart to fill `span`.

    Shows the model distances longer than the sequences it can afford to train on.
    """
    cuts = np.sort(generator.integers(1, length, size=int(generator.integers(1, 4))))
    gaps = generator.dirichlet(np.ones(len(cuts) + 1))[:-1] * (span - length)
    positions = np.arange(length)
    for cut, gap in zip(cuts.tolist(), gaps.tolist(), strict=True):
        positions[cut:] += int(gap)
    return positions


def read_ids(path: Path) -> Ids:
    return np.fromfile(path, dtype=np.uint16).astype(np.int64)


class Sampler:
    def __init__(self, work: Path, quote_share: float, seed: int) -> None:
        self.library = read_ids(work / "library.bin")
        self.tests = read_ids(work / "tests.bin")
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.quoter = Quoter(Newlines(self.tokenizer))
        self.quote_share = quote_share
        self.generator = np.random.default_rng(seed)

    def ids(self) -> Ids:
        return self.tests if self.generator.random() < TESTS_SHARE else self.library

    def sequence(self, length: int) -> Sequence:
        if self.generator.random() < self.quote_share:
            return self.quoter.sequence(self.ids(), length, self.generator)
        return raw_sequence(self.ids(), length, self.generator)

    def batch(self, rows: int, length: int, span: int) -> Batch:
        """`span` beyond `length`: half of the rows are stretched to positions up to there."""
        sequences = [self.sequence(length) for _ in range(rows)]
        plain = np.arange(length)
        positions = [
            stretched_positions(length, span, self.generator)
            if span > length and self.generator.random() < 0.5
            else plain
            for _ in range(rows)
        ]
        return stack(sequences, positions)


def stack(sequences: list[Sequence], positions: list[Ids]) -> Batch:
    return Batch(
        torch.from_numpy(np.stack([sequence.tokens for sequence in sequences])),
        torch.from_numpy(np.stack([sequence.labels for sequence in sequences])),
        torch.from_numpy(np.stack(positions)),
    )
