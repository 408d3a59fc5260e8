"""Whose KV a page holds: the one cache key, an injective encoding of everything that matters.

Every field is tagged and length-prefixed, so no two tuples of fields share an encoding. The tenant
comes from the authenticated key, never from a request's body. A page's key chains its parent's,
so it stands for the whole prefix; the full 256-bit digest is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b

Digest = bytes
DIGEST_BYTES = 32


@dataclass(frozen=True)
class CacheIdentity:
    tenant: str
    salt: str
    model: str
    revision: str
    schema: str

    def digest(self) -> Digest:
        """The root of this identity's prefix chain."""
        mixed = blake2b(digest_size=DIGEST_BYTES, person=b"stanchion.cache")
        for one in fields(self):
            for part in (one.name, getattr(self, one.name)):
                raw = part.encode()
                mixed.update(len(raw).to_bytes(8, "little"))
                mixed.update(raw)
        return mixed.digest()


def chain(parent: Digest, tokens: bytes) -> Digest:
    """The key of the page that holds `tokens` (int32, little endian) after `parent`."""
    return blake2b(tokens, digest_size=DIGEST_BYTES, key=parent).digest()
