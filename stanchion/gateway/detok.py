"""Token ids to text, a little at a time: the same text for every way the tokens are cut.

Promise: the concatenation of all that `push` and `finish` return is the one-shot decode of the
tokens' bytes, character for character. U+FFFD appears only where the one-shot decode has it, that
is where the bytes are wrong, never where a character was only not complete yet.

The fold works on bytes, not on re-decoded windows of text: a window's prefix may change once its
bytes complete, bytes already given out may not. Knows nothing of tokenizers: it is given each
token's bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextFold:
    """Feed it tokens one at a time; `finish` exactly once, at the end."""

    def __init__(self, pieces: Sequence[bytes], skipped: Collection[int] = ()) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._decoder = _utf8("replace")

    def push(self, token: int) -> str:
        """The text that this token makes certain. Empty while a character is incomplete."""
        if token in self._skipped or token >= len(self._pieces):
            return ""  # ids past the vocabulary are padding rows of the model's head: no text
        return self._decoder.decode(self._pieces[token])

    def finish(self) -> str:
        """What an incomplete tail decodes to, now that nothing can complete it."""
        return self._decoder.decode(b"", True)


def decode(pieces: Sequence[bytes], tokens: Iterable[int], skipped: Collection[int] = ()) -> str:
    """The one-shot decode that `TextFold` equals."""
    shown = (token for token in tokens if token not in skipped and token < len(pieces))
    return b"".join(pieces[token] for token in shown).decode("utf-8", "replace")
