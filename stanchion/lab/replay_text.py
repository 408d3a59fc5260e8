"""Prompts of traces that have hashes and lengths but no words. Pure.

Each block becomes a stretch of a corpus, chosen by its hash: the same hash gives the same text, so
who shares which prefix is kept, to the token. A stretch begins at a space before a letter and ends
before white space. Byte-level BPE never merges across such a place, so stretches that are joined
are encoded to exactly the tokens that they were cut from: lengths and block edges are kept too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import ConfigError
from stanchion.core.recording import Recorded
from stanchion.gateway.tokens import Vocabulary

STRETCH_MAX = 1024  # longer ones are put together, so that there is always a choice
KEPT = 1 << 15  # stretches: those of a prefix are asked for again and again
TAIL = "tail of "  # before the request's name, where a tail has no hash
Places = NDArray[np.int64]


class Stretches:
    """`tokens` is what the corpus is encoded to. Raise ConfigError where it is too short to have
    stretches of the lengths asked for."""

    def __init__(self, vocabulary: Vocabulary, tokens: Sequence[int]) -> None:
        self._pieces = vocabulary.pieces
        self._tokens = list(tokens)
        pieces = [vocabulary.pieces[one] for one in tokens]
        ascii_ = np.array([one.isascii() for one in pieces])
        white = np.array([one[:1].isspace() for one in pieces])
        solid = np.array([not one[-1:].isspace() for one in pieces])
        after = [one[1:2] or two[:1] for one, two in zip(pieces, [*pieces[1:], b""])]
        word = np.array([one[:1] == b" " and two.isalpha() for one, two in zip(pieces, after)])
        cut = np.zeros(len(pieces) + 1, bool)
        cut[1:-1] = white[1:] & solid[:-1]  # before token i: nothing is merged across it
        if all(len(one) == 1 for one in pieces):
            cut[:] = word[:] = True  # bytes: nothing is ever merged
        self._ends = cut
        self._starts: Places = np.flatnonzero(cut[:-1] & word)
        self._foreign = np.concatenate([[0], np.cumsum(~ascii_)])
        self._chosen: dict[int, Places] = {}
        self._stretch = lru_cache(KEPT)(self._one)

    def tokens(self, name: str, count: int, salt: str = "") -> list[int]:
        """`count` tokens of text for this name; another salt gives another text."""
        found: list[int] = []
        while len(found) < count:
            length = min(count - len(found), STRETCH_MAX)
            found += self._stretch(f"{salt}\0{name}\0{len(found)}", length)
        return found

    def _one(self, name: str, length: int) -> list[int]:
        key = blake2b(name.encode(), digest_size=8).digest()
        places = self._of(length)
        first = int(places[int.from_bytes(key, "little") % len(places)])
        return self._tokens[first : first + length]

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self._pieces[one] for one in tokens).decode()

    def _of(self, length: int) -> Places:
        """Where stretches of this length may begin."""
        if length not in self._chosen:
            starts = self._starts[self._starts + length < len(self._ends)]
            plain = self._foreign[starts + length] == self._foreign[starts]
            self._chosen[length] = starts[self._ends[starts + length] & plain]
        if not len(self._chosen[length]):
            raise ConfigError(f"the corpus has no stretch of {length} tokens: it is too short")
        return self._chosen[length]


@dataclass(frozen=True)
class Scale:
    """A recorded block of `block_tokens` becomes `tokens`; the rest of a prompt, and an answer,
    shrink alike. Equal ones keep all lengths as they are."""

    block_tokens: int
    tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.block_tokens:
            raise ConfigError(
                f"block-tokens is {self.tokens}; it must be from 1 to {self.block_tokens}, which "
                "is what a block of the trace has"
            )

    def of(self, tokens: int) -> int:
        """At least one of something."""
        return max(1, tokens * self.tokens // self.block_tokens) if tokens else 0


def prompt(one: Recorded, stretches: Stretches, scale: Scale, salt: str = "") -> list[int]:
    """The prompt's tokens: its blocks and its tail; without blocks, as many tokens of its own."""
    made = [token for part in _parts(one, stretches, scale, salt) for token in part]
    return made or stretches.tokens(one.request, 1, salt)


def _parts(one: Recorded, stretches: Stretches, scale: Scale, salt: str) -> Iterator[list[int]]:
    for block in one.blocks:
        yield stretches.tokens(block, scale.tokens, salt)
    rest = max(one.input_tokens - len(one.blocks) * scale.block_tokens, 0)
    yield stretches.tokens(one.tail or TAIL + one.request, scale.of(rest), salt)
