"""Chained hashes of a prompt's blocks, under a key that is never written down. Pure.

The chain's root is of key, tenant and cache salt, so two prompts share hashes exactly where the
engine could share their pages; without the key nobody can hash a guess and compare.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

CHAIN_BYTES = 32
SHOWN_BYTES = 8  # of each hash; 10 million blocks then collide with a chance of 1 in 370,000
TOKEN_BYTES = 4


@dataclass(frozen=True)
class Chain:
    """`links[i]`: of all tokens up to the end of block i, whole; `tail`: of all tokens."""

    links: tuple[bytes, ...]
    tail: bytes | None
    tail_tokens: int

    @property
    def blocks(self) -> tuple[str, ...]:
        if not self.links:
            return ()
        every = np.frombuffer(b"".join(self.links), np.uint8).reshape(-1, CHAIN_BYTES)
        return tuple(every[:, :SHOWN_BYTES].tobytes().hex(" ", SHOWN_BYTES).split(" "))

    @property
    def shown_tail(self) -> str | None:
        return None if self.tail is None else self.tail[:SHOWN_BYTES].hex()


def root(key: bytes, tenant: str, salt: str) -> bytes:
    mixed = blake2b(key=key, digest_size=CHAIN_BYTES, person=b"recording")
    for part in (tenant, salt):
        raw = part.encode()
        mixed.update(len(raw).to_bytes(8, "little") + raw)
    return mixed.digest()


def raw_tokens(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)  # the same bytes as of "i", in a third of the time
    assert packed.itemsize == TOKEN_BYTES
    return packed.tobytes()


def link(parent: bytes, raw: bytes) -> bytes:
    return blake2b(raw, key=parent, digest_size=CHAIN_BYTES).digest()


def chain(first: bytes, raw: bytes, block_tokens: int) -> Chain:
    """Of the prompt's tokens, as `raw_tokens` gives them. One hash, read after every block: the
    first link is `link(first, block)`, and each of the others depends on all before it."""
    size = block_tokens * TOKEN_BYTES
    whole = len(raw) // size * size
    state = blake2b(key=first, digest_size=CHAIN_BYTES)
    links: list[bytes] = []
    for at in range(0, whole, size):
        state.update(raw[at : at + size])
        links.append(state.digest())
    rest = raw[whole:]
    state.update(rest)
    return Chain(tuple(links), state.digest() if rest else None, len(rest) // TOKEN_BYTES)


def pseudonym(key: bytes, name: str) -> str:
    """The same name, the same pseudonym; "" stays."""
    if not name:
        return ""
    return blake2b(name.encode(), key=key, digest_size=8, person=b"name").hexdigest()


def digest(*parts: bytes) -> str:
    """Of a vocabulary or a template, so that whoever replays knows whether theirs is the same."""
    mixed = blake2b(digest_size=16, person=b"vocabulary")
    for part in parts:
        mixed.update(len(part).to_bytes(8, "little") + part)
    return mixed.hexdigest()
