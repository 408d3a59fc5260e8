"""The prefix tree: which complete pages may be shared, by whom, and which leave first.

One node is one page. Its key chains the identity and all tokens before it, at full width, and the
page's tokens are compared on a hit, so a collision is a miss. Only pages complete in all layers
enter; tail pages never do. The tree holds its own pin on each page; pages that nobody else holds
are given back least recently used first, leaves before their parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.core.identity import Digest, chain
from stanchion.device.stream import Pages
from stanchion.kv.pages import PagePool, Pin

Tokens = NDArray[np.int32]
Chain = Callable[[Digest, bytes], Digest]


@dataclass(eq=False)
class Node:
    key: Digest
    parent: Node | None
    tokens: bytes
    pin: Pin
    children: int = 0

    @property
    def page(self) -> int:
        return int(self.pin.pages[0])


class PrefixTree:
    def __init__(self, pool: PagePool, page_tokens: int, link: Chain = chain) -> None:
        self.page_tokens = page_tokens
        self._pool = pool
        self._link = link
        self._nodes: OrderedDict[Digest, Node] = OrderedDict()  # least recently used first

    @property
    def pages(self) -> int:
        return len(self._nodes)

    def keys(self, root: Digest, tokens: Tokens, known: list[Digest]) -> list[Digest]:
        """The keys of all whole pages of `tokens`; `known` holds the first of them already."""
        keys = list(known)
        for at in range(len(keys), len(tokens) // self.page_tokens):
            keys.append(self._link(keys[-1] if keys else root, self._page_bytes(tokens, at)))
        return keys

    def match(self, keys: list[Digest], tokens: Tokens) -> Pages:
        """The longest run of leading pages that the tree has; marks them as used."""
        found: list[Digest] = []
        for at, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None or node.tokens != self._page_bytes(tokens, at):
                break
            found.append(key)
        for key in reversed(found):  # a parent counts as used after its child: leaves leave first
            self._nodes.move_to_end(key)
        return np.array([self._nodes[key].page for key in found], np.int32)

    def publish(self, keys: list[Digest], tokens: Tokens, pages: Pages, first: int) -> None:
        """Share pages first, first + 1, ... of a request; `keys` and `pages` start at its first."""
        for at in range(first, len(keys)):
            if keys[at] in self._nodes:
                continue
            parent = self._nodes.get(keys[at - 1]) if at else None
            if at and parent is None:
                return  # its parent left: the run would be unreachable
            pin = self._pool.regrip(pages[at : at + 1], "prefix")
            self._nodes[keys[at]] = Node(keys[at], parent, self._page_bytes(tokens, at), pin)
            if parent is not None:
                parent.children += 1

    def evict(self, count: int) -> int:
        """Give back up to `count` pages that only the tree holds. Return how many."""
        gone: list[Node] = []
        inner: set[Node] = set()  # passed by, because a child still needed them
        for node in self._nodes.values():
            chain: Node | None = node
            while chain is not None and len(gone) < count and self._may_leave(chain):
                chain.pin.drop()
                gone.append(chain)
                if (parent := chain.parent) is not None:
                    parent.children -= 1
                chain = parent if parent in inner else None
            if len(gone) == count:
                break
            inner.add(node)
        for node in gone:
            del self._nodes[node.key]
        return len(gone)

    def evictable(self, most: int) -> int:
        """How many pages `evict` could give back, counted up to `most`."""
        held = 0
        pages = [node.page for node in self._nodes.values()]
        if pages:
            held = int((self._pool.counts(np.array(pages, np.int32)) == 1).sum())
        return min(held, most)

    def flush(self) -> int:
        return self.evict(len(self._nodes))

    def _may_leave(self, node: Node) -> bool:
        return node.children == 0 and int(self._pool.counts(node.pin.pages)[0]) == 1

    def _page_bytes(self, tokens: Tokens, at: int) -> bytes:
        return tokens[at * self.page_tokens : (at + 1) * self.page_tokens].tobytes()
