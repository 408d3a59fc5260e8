"""What tiers know of a prefix, and of a page that one keeps: everything but its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stanchion.core.identity import Digest


@dataclass(frozen=True)
class Record:
    """`key` stands for the identity and all tokens up to this page's end; `root` for the identity
    alone; `tokens` are the page's own, compared on a hit. `digests` has 8 bytes a buffer, little
    endian, in the order of (layer, name): the device page's, when it was copied from there. Empty
    where pages are not checked."""

    key: Digest
    root: Digest
    tokens: bytes
    digests: bytes


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prefix: the keys of its whole pages, and `tokens_of` each by its place."""

    root: Digest
    keys: Sequence[Digest]
    tokens_of: Callable[[int], bytes]

    def marks(self, first: int) -> list[tuple[Digest, bytes]]:
        """(root, tokens) of each page from `first` on: what a record of it must say."""
        return [(self.root, self.tokens_of(at)) for at in range(first, len(self.keys))]
