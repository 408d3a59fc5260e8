"""Which rows of which page are in place, per layer, and the proof that a request may sample.

A watermark says: rows 0 to watermark - 1 of this page are ready in this layer. Writers raise it
when a layer's rows are in; rejected drafts lower it. Only a page that is complete in all layers
may be published, and only a proof over every page lets a request sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.device.stream import Pages


@dataclass(frozen=True)
class KvProof:
    """Every page of `request` was ready in every layer up to `tokens`, of the right generation."""

    request: str
    tokens: int


class Ready:
    def __init__(self, pages: int, target_layers: int, layers: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._target_layers = target_layers
        self.layers = layers
        self._rows: NDArray[np.int32] = np.zeros((layers, pages), np.int32)

    def reset(self, pages: Pages) -> None:
        """The pages begin a new generation: nothing in them counts."""
        self._rows[:, pages] = 0

    def raise_to(self, layer: int, pages: Pages, rows: NDArray[np.int32]) -> None:
        """The first `rows` rows of each page are now in place in this layer."""
        marks = self._rows[layer]
        marks[pages] = np.maximum(marks[pages], rows)

    def lower_to(self, pages: Pages, target: NDArray[np.int32], draft: NDArray[np.int32]) -> None:
        """What lies above was rejected: in the target layers above `target` rows of each page, in
        the draft layer, which is a slot ahead, above `draft`."""
        for layers, rows in (
            (self._rows[: self._target_layers], target),
            (self._rows[self._target_layers :], draft),
        ):
            layers[:, pages] = np.minimum(layers[:, pages], rows)

    def rows(self, layer: int, page: int) -> int:
        return int(self._rows[layer, page])

    def complete(self, pages: Pages) -> NDArray[np.bool_]:
        """For each page: is it full in all layers?"""
        full: NDArray[np.bool_] = (self._rows[:, pages] == self.page_tokens).all(0)
        return full

    def prove(
        self,
        request: str,
        pages: Pages,
        target_tokens: int,
        draft_tokens: int,
        generations: NDArray[np.int64],
        now: NDArray[np.int64],
    ) -> KvProof:
        """Rows are ready: `target_tokens` in the target layers, `draft_tokens` in the others.

        `generations` are those the request was given, `now` the pool's. Raise Bug otherwise.
        """
        used = pages[: -(-target_tokens // self.page_tokens)]
        if not np.array_equal(generations[: len(used)], now[used]):
            raise Bug(f"{request} holds a page of another generation")
        before = np.arange(len(used)) * self.page_tokens
        for layers, tokens in (
            (self._rows[: self._target_layers], target_tokens),
            (self._rows[self._target_layers :], draft_tokens),
        ):
            short = (layers[:, used] < np.minimum(tokens - before, self.page_tokens)).any(0)
            if short.any():
                page = int(used[int(np.argmax(short))])
                raise Bug(f"{request} would sample from page {page}, which is not ready")
        return KvProof(request, target_tokens)
