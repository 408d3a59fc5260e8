"""Text to tokens with the place of each in the text, one stretch at a time, and remembered.

Special tokens cut a text into stretches that are encoded by themselves, so a prompt that goes on
where another ended costs its new stretches alone. Only tokenizers that lose nothing are known here:
the bytes of the tokens, put together, are the text.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import ConfigError
from stanchion.gateway.tokens import Vocabulary

REMEMBERED_CHARACTERS = 64 * 2**20
SAMPLE = 'def f(a):\n    return {"b": a + 1}  # Ünïcode, 12345\n'
Ids = NDArray[np.int32]


class Tokenised:
    """Raise ConfigError for a tokenizer that is not of this kind."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        words = [vocabulary.pieces[one].decode() for one in vocabulary.special]
        ordered = sorted(filter(None, words), key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
        self._sizes = np.array([len(piece) for piece in vocabulary.pieces], dtype=np.int64)
        self._known: OrderedDict[str, Ids] = OrderedDict()
        self._characters = 0
        self._check(ordered)

    def _check(self, special: list[str]) -> None:
        text = SAMPLE + "".join(f"{word}{SAMPLE}" for word in special[:4])
        whole = self._vocabulary.encode(text, False)
        if list(self.ids(text)) != whole or self.sizes(whole).sum() != len(text.encode()):
            raise ConfigError("this tokenizer changes text, or joins it over special tokens")
        with_prefix = self._vocabulary.encode(SAMPLE, True)
        plain = self._vocabulary.encode(SAMPLE, False)
        self.prefix = len(with_prefix) - len(plain)  # what it puts before a text, where asked to
        if with_prefix[self.prefix :] != plain:
            raise ConfigError("this tokenizer puts something behind a text")

    def sizes(self, ids: Ids | list[int]) -> NDArray[np.int64]:
        """In bytes, of each token."""
        found: NDArray[np.int64] = self._sizes[np.asarray(ids, dtype=np.int64)]
        return found

    def ids(self, text: str) -> Ids:
        parts = self._cut.split(text) if self._cut is not None else [text]
        found = [self._part(part) for part in parts if part]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def _part(self, part: str) -> Ids:
        known = self._known.get(part)
        if known is not None:
            self._known.move_to_end(part)
            return known
        made = np.array(self._vocabulary.encode(part, False), dtype=np.int32)
        self._known[part] = made
        self._characters += len(part)
        while self._characters > REMEMBERED_CHARACTERS and len(self._known) > 1:
            self._characters -= len(self._known.popitem(last=False)[0])
        return made

    def stretches(self, text: str) -> list[tuple[bool, str]]:
        """(is it a special token?, text), in order, none empty."""
        parts = self._cut.split(text) if self._cut is not None else [text]
        return [(bool(place % 2), part) for place, part in enumerate(parts) if part]

    def text(self, ids: Ids | list[int]) -> bytes:
        pieces = self._vocabulary.pieces
        return b"".join(pieces[one] for one in ids)

    @property
    def pieces(self) -> tuple[bytes, ...]:
        return self._vocabulary.pieces

    @property
    def special(self) -> frozenset[int]:
        return self._vocabulary.special


def begins(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The byte at which each token begins; and, last, where the text ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
