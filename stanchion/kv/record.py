"""What is known of a page that a tier keeps: everything but its bytes."""

from __future__ import annotations

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
