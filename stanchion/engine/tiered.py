"""What the loop asks of the KV tiers, in terms of requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stanchion.device.stream import Pages
from stanchion.engine.request import Request
from stanchion.kv.prefix import Node, PrefixTree
from stanchion.kv.ready import Ready
from stanchion.kv.record import Prompt, Record
from stanchion.kv.tiers import Found, Tiers

NOTHING = Found([], [])


@dataclass
class Tiered:
    tiers: Tiers
    tree: PrefixTree
    ready: Ready

    def __post_init__(self) -> None:
        if self.tiers.policy == "back":
            self.tree.on_evict = self._evicted

    def find(self, request: Request, first: int) -> Found | None:
        """What other tiers have of it from page `first` on; None while it waits for the disk."""
        if request.wants_scores:
            return NOTHING
        prompt = self._prompt(request, request.prefill_end // self.ready.page_tokens)
        if not self.tiers.settled(request.name, prompt, first):
            return None
        return self.tiers.find(prompt, first)

    def lift(self, request: Request, found: Found, pages: Pages) -> None:
        """It begins, and has these pages loaded. From here on doors make every reader wait: in the
        device's order they are complete."""
        self.tiers.forget(request.name)
        if request.published:
            prompt = self._prompt(request, request.published)
            self.tiers.hit(prompt, request.pages[: request.published])
        if len(found):
            self.tiers.lift(found, pages)
            full = np.full(len(pages), self.ready.page_tokens, np.int32)
            for layer in range(self.ready.layers):
                self.ready.raise_to(layer, pages, full)

    def published(self, request: Request, first: int) -> None:
        """The tree shares its pages from place `first` on."""
        prompt = self._prompt(request, request.published)
        self.tiers.published(prompt, request.pages[first : request.published], first)

    def _prompt(self, request: Request, pages: int) -> Prompt:
        tokens, page_bytes = request.tokens, self.tree.page_bytes
        return Prompt(request.root, request.keys[:pages], lambda at: page_bytes(tokens, at))

    def _evicted(self, nodes: list[Node]) -> None:
        records = [Record(one.key, one.root, one.tokens, b"") for one in nodes]
        self.tiers.evicted(records, np.array([one.page for one in nodes], np.int32))
