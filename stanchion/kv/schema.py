"""What a page is made of: the one declared list of buffers, draft layer included.

Device pool, tiers, transfers, digests and the handshake are generated from it. Buffers are named,
never addressed by position; a layer that shares another's index owns no index buffer. Each layer
has two doors, and each buffer is behind exactly one of them: `index` (indexer keys and scales) and
`attend` (latent and rope key). Unequal hashes mean "refuse", with the differing fields named.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Literal

Door = Literal["index", "attend"]
DOORS: tuple[Door, ...] = ("index", "attend")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8}


@dataclass(frozen=True)
class Buffer:
    """One named column of a layer's rows. `width` counts elements a row."""

    name: str
    layer: int
    door: Door
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Schema:
    """`layers` counts the draft layer, which is the last one where `draft` is true."""

    model: str
    page_tokens: int
    layers: int
    draft: bool
    buffers: tuple[Buffer, ...]

    def __post_init__(self) -> None:
        names = [(one.layer, one.name) for one in self.buffers]
        assert len(names) == len(set(names)), "two buffers of a layer share a name"
        assert {one.layer for one in self.buffers} == set(range(self.layers)), (
            "a layer owns nothing"
        )

    @property
    def target_layers(self) -> int:
        return self.layers - self.draft

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(one.row_bytes for one in self.buffers)

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * self.page_tokens

    def behind(self, layer: int, door: Door) -> tuple[Buffer, ...]:
        return tuple(one for one in self.buffers if (one.layer, one.door) == (layer, door))

    def digest(self) -> str:
        return blake2b(repr(self).encode(), digest_size=16).hexdigest()

    def differences(self, other: Schema) -> list[str]:
        """Name each field, and each buffer, in which the two differ."""
        said = [
            f"{one.name}: {getattr(self, one.name)} here, {getattr(other, one.name)} there"
            for one in fields(self)
            if one.name != "buffers" and getattr(self, one.name) != getattr(other, one.name)
        ]
        ours = {(one.layer, one.name): one for one in self.buffers}
        theirs = {(one.layer, one.name): one for one in other.buffers}
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                said.append(f"buffer {key[1]} of layer {key[0]}")
        return said
