"""A late write of KV by somebody who has lost the right to it: the failpoint `foreign_write`.

Promises: of the requests that an engine decodes, the share that is asked for gets the rows of
another running request written over its first pages, once, within its first 64 tokens, in every
layer. The write goes through the doors like any other, so it is no race: it is what a race leaves
behind (the report's fault 1). Which requests those are is a function of their names and salts.

A damaged page stays shared if it was: whoever reads the same prefix later reads the damage too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from weakref import WeakSet

import numpy as np

from stanchion.device.stream import Pages, Stream
from stanchion.engine.loop import Landing, Launch
from stanchion.engine.request import Request
from stanchion.engine.scheduler import Piece
from stanchion.kv.pages import Pin
from stanchion.kv.schema import DOORS
from stanchion.kv.store import Store

PAGES_MAX = 16
TOKENS_MAX = 64


def overwrite(store: Store, stream: Stream, source: Pages, target: Pages) -> None:
    """Rows of `source` over those of `target`, page by page, in all layers. Readiness is left as
    it is: nobody is told."""
    count = min(len(source), len(target), PAGES_MAX)
    source, target = source[:count], target[:count]
    page_tokens = store.schema.page_tokens
    rows_from, rows_to = (
        (pages[:, None].astype(np.int64) * page_tokens + np.arange(page_tokens)).ravel()
        for pages in (source, target)
    )
    for layer in range(store.schema.layers):
        for door in DOORS:
            with stream.writing(store.behind(layer, door), target) as view:
                for tensor in view.rows.values():
                    tensor[rows_to] = tensor[rows_from]


@dataclass
class Meddler:
    """Stands before an engine's `launch`, where no flight is out. `share`: 0 to 1."""

    inner: Launch
    store: Store
    stream: Stream
    share: float
    struck: WeakSet[Request] = field(default_factory=WeakSet)

    def launch(self, pieces: Sequence[Piece], pins: list[Pin]) -> Landing:
        decoding = [one.request for one in pieces if one.decodes]
        for request in decoding:
            others = [other for other in decoding if other is not request]
            if others and request not in self.struck and self._due(request):
                self.struck.add(request)
                overwrite(self.store, self.stream, others[0].pages, request.pages)
        return self.inner(pieces, pins)

    def _due(self, request: Request) -> bool:
        named = f"{request.name} {request.start.salt}".encode()
        drawn = int.from_bytes(blake2b(named, digest_size=8).digest(), "little")
        chosen = (drawn >> 16) < self.share * 2**48
        return chosen and 1 + drawn % TOKENS_MAX <= request.generated
