"""What a page is made of: the one declared list of buffers, draft layer included.

Device pool, tiers, transfers, digests and the handshake are generated from it. Buffers are named,
never addressed by position; a layer that shares another's index owns no index buffer. Each layer
has two doors, and each buffer is behind exactly one of them: `index` (indexer keys and scales) and
`attend` (latent and rope key). Unequal hashes mean "refuse", with the differing fields named.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
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
    """`layers` counts the draft layer, which is the last one where `draft` is true. `part`: some
    layers' buffers are not here, but with another rank."""

    model: str
    page_tokens: int
    layers: int
    draft: bool
    buffers: tuple[Buffer, ...]
    part: bool = False

    def __post_init__(self) -> None:
        names = [(one.layer, one.name) for one in self.buffers]
        assert len(names) == len(set(names)), "two buffers of a layer share a name"
        assert {one.layer for one in self.buffers} <= set(range(self.layers)), "no such layer"

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

    def only(self, layers: Set[int]) -> Schema:
        """The same model, and the buffers of these layers: what one of several ranks keeps."""
        kept = tuple(one for one in self.buffers if one.layer in layers)
        return replace(self, buffers=kept, part=len(kept) < len(self.buffers))

    def behind(self, layer: int, door: Door) -> tuple[Buffer, ...]:
        return tuple(one for one in self.buffers if (one.layer, one.door) == (layer, door))

    def digest(self) -> str:
        return blake2b(repr(self).encode(), digest_size=16).hexdigest()

    def described(self) -> dict[str, str]:
        """Every field and every buffer, by name: what two workers of a cluster must agree on."""
        said = {
            "page_tokens": str(self.page_tokens),
            "layers": str(self.layers),
            "draft_layer": str(self.draft).lower(),
        }
        for one in sorted(self.buffers, key=lambda one: (one.layer, one.name)):
            words = f"{one.width} x {one.dtype} behind the {one.door} door"
            said[f"buffer {one.name} of layer {one.layer}"] = words
        return said
