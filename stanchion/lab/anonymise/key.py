"""An export's secret, and what is made with it: pseudonyms, hashes, digits. Pure.

It is drawn for one export, never written, and gone with the object. Two exports of one recording
share no name and no hash; within one, what was equal stays equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from stanchion.core.errors import ConfigError

KEY_BYTES = 32
SHOWN_BYTES = 8
DIGIT = re.compile("[0-9]")


@dataclass(frozen=True)
class Key:
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ConfigError(f"an export's key has {KEY_BYTES} bytes, not {len(self.secret)}")

    def draw(self, domain: str, *parts: bytes) -> bytes:
        """32 bytes: a function of all parts, and another one in each domain (16 letters)."""
        mixed = blake2b(key=self.secret, digest_size=32, person=domain.encode())
        for part in parts:
            mixed.update(len(part).to_bytes(8, "little") + part)
        return mixed.digest()

    def number(self, domain: str, *parts: bytes) -> int:
        return int.from_bytes(self.draw(domain, *parts)[:8], "little")

    def name(self, said: str) -> str:
        """ "" stays."""
        return self.draw("name", said.encode())[:SHOWN_BYTES].hex() if said else ""

    def hasher(self, tenant: str) -> Callable[[str], str]:
        """Of a tenant's hashes: others have other ones."""
        own = self.draw("block", tenant.encode())
        return lambda said: blake2b(said.encode(), key=own, digest_size=SHOWN_BYTES).hexdigest()

    def digits(self, tenant: str, said: str) -> str:
        """Other digits in the same places; the first of several is none of 0."""
        drawn = self.draw("digits", tenant.encode(), said.encode())
        places = list(DIGIT.finditer(said))
        made = list(said)
        for count, place in enumerate(places):
            byte = drawn[count % len(drawn)] + count // len(drawn)
            first = count == 0 and len(places) > 1
            made[place.start()] = str(1 + byte % 9 if first else byte % 10)
        return "".join(made)
