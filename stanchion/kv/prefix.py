"""The prefix tree: which complete pages may be shared, by whom, and which leave first.

One node is one page. Its key chains the identity and all tokens before it, at full width, and the
page's tokens are compared on a hit, so a collision is a miss. Only pages complete in all layers
enter; tail pages never do. The tree holds its own pin on each page, and gives back pages that
nobody else holds, leaves before their parents: the longest unused first, where a page that was ever
found may be unused for longer than one that only its maker had. A page that left and was computed
again counts as found: it would have been (the ghost list of 2Q, Johnson and Shasha 1994). Otherwise
the end of a long prefix, which is the dear part, would be the first to leave each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from stanchion.core.identity import Digest, chain
from stanchion.device.stream import Pages
from stanchion.kv.pages import PagePool, Pin

Tokens = NDArray[np.int32]
Chain = Callable[[Digest, bytes], Digest]
FOUND_LASTS = 8  # so many times longer does a page stay unused that was found


@dataclass(eq=False)
class Node:
    key: Digest
    root: Digest
    parent: Node | None
    tokens: bytes
    pin: Pin
    used: int  # the tree's clock when it was last found
    found: bool  # by somebody after its maker, or would have been
    children: int = 0

    @property
    def page(self) -> int:
        return int(self.pin.pages[0])


Leaves = list[tuple[int, int, Node]]


class PrefixTree:
    def __init__(self, pool: PagePool, page_tokens: int, link: Chain = chain) -> None:
        self.page_tokens = page_tokens
        self._pool = pool
        self._link = link
        self._nodes: dict[Digest, Node] = {}
        self._gone: OrderedDict[Digest, None] = OrderedDict()  # keys that left: a pool's worth
        # Leaves by last use: those never found, and the others. An entry is stale once its node was
        # used again, got a child, or left.
        self._leaves: tuple[Leaves, Leaves] = ([], [])
        self._clock = 0
        self._serial = 0
        self.on_evict: Callable[[list[Node]], None] | None = None  # before their pages are free

    @property
    def pages(self) -> int:
        return len(self._nodes)

    @property
    def evictable(self) -> int:
        """How many pages `evict` can give back: those that only the tree holds. Whoever holds a
        page holds all before it, so below such a page there is no other."""
        return self._pool.kept_alone

    def keys(self, root: Digest, tokens: Tokens, known: list[Digest]) -> list[Digest]:
        """The keys of all whole pages of `tokens`; `known` holds the first of them already."""
        keys = list(known)
        for at in range(len(keys), len(tokens) // self.page_tokens):
            keys.append(self._link(keys[-1] if keys else root, self.page_bytes(tokens, at)))
        return keys

    def match(self, keys: list[Digest], tokens: Tokens) -> Pages:
        """The longest run of leading pages that the tree has; marks them as used."""
        self._clock += 1
        found: list[Node] = []
        for at, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None or node.tokens != self.page_bytes(tokens, at):
                break
            node.used, node.found = self._clock, True
            found.append(node)
        if found and not found[-1].children:
            self._offer(found[-1])
        return np.array([node.page for node in found], np.int32)

    def publish(
        self, root: Digest, keys: list[Digest], tokens: Tokens, pages: Pages, first: int
    ) -> Pages:
        """Share pages first, first + 1, ... of a request; `keys` and `pages` start at its first.

        Return the tree's own pages for those that it has already, from somebody who computed the
        same: the request must hold them, since what it publishes later hangs below them.
        """
        self._clock += 1
        known: list[int] = []
        for at in range(first, len(keys)):
            node = self._nodes.get(keys[at])
            if node is not None:
                known.append(node.page)
                continue
            parent = self._nodes.get(keys[at - 1]) if at else None
            if at and parent is None:
                break  # its parent left: the run would be unreachable
            pin = self._pool.keep(pages[at : at + 1], "prefix")
            again = keys[at] in self._gone
            raw = self.page_bytes(tokens, at)
            node = Node(keys[at], root, parent, raw, pin, self._clock, again)
            self._nodes[node.key] = node
            self._gone.pop(node.key, None)
            if parent is not None:
                parent.children += 1
            if at == len(keys) - 1:
                self._offer(node)
        return np.array(known, np.int32)

    def evict(self, count: int) -> int:
        """Give back up to `count` pages that only the tree holds, least recently used first,
        leaves before their parents. Return how many."""
        gone: list[Node] = []
        held = []
        while len(gone) < count and (node := self._next_to_go()) is not None:
            if int(self._pool.counts(node.pin.pages)[0]) > 1:
                held.append(node)  # in use: it counts as used now
                continue
            self._forget(node)
            gone.append(node)
        self._clock += 1
        for node in held:
            node.used = self._clock
            self._offer(node)
        if self.on_evict is not None and gone:
            self.on_evict(gone)
        for node in gone:
            self._gone[node.key] = None
            node.pin.drop()
        while len(self._gone) > self._pool.size:
            self._gone.popitem(last=False)
        return len(gone)

    def flush(self) -> int:
        """Give back all that only the tree holds, for good."""
        kept, self.on_evict = self.on_evict, None
        gone = self.evict(len(self._nodes))
        self.on_evict = kept
        self._gone.clear()
        return gone

    def forget(self, pages: Pages) -> int:
        """Share these pages no more, nor what hangs below them. Return how many nodes left."""
        bad: dict[Digest, Node] = {}
        for node in self._nodes.values():  # parents were published before their children
            if node.page in pages or (node.parent is not None and node.parent.key in bad):
                bad[node.key] = node
        for node in reversed(bad.values()):
            self._forget(node)
            node.pin.drop()
        return len(bad)

    def _forget(self, node: Node) -> None:
        del self._nodes[node.key]
        if (parent := node.parent) is not None:
            parent.children -= 1
            if not parent.children:
                self._offer(parent)

    def _next_to_go(self) -> Node | None:
        """Take the leaf that leaves next from its heap."""
        for leaves in self._leaves:
            while leaves and self._stale(*leaves[0]):
                heappop(leaves)
        once, again = self._leaves
        if once and again:
            age, other = (1 + self._clock - leaves[0][0] for leaves in (once, again))
            return heappop(once if age * FOUND_LASTS >= other else again)[2]
        return heappop(once or again)[2] if once or again else None

    def _stale(self, used: int, serial: int, node: Node) -> bool:
        left = self._nodes.get(node.key) is not node
        return left or node.used != used or node.children > 0

    def _offer(self, leaf: Node) -> None:
        if sum(map(len, self._leaves)) > 4 * len(self._nodes) + 64:  # mostly stale: start afresh
            self._leaves = ([], [])
            for node in self._nodes.values():
                if not node.children and node is not leaf:
                    self._push(node)
        self._push(leaf)

    def _push(self, leaf: Node) -> None:
        self._serial += 1
        heappush(self._leaves[leaf.found], (leaf.used, self._serial, leaf))

    def page_bytes(self, tokens: Tokens, at: int) -> bytes:
        """The tokens of one whole page, as its key and its record have them."""
        return tokens[at * self.page_tokens : (at + 1) * self.page_tokens].tobytes()
