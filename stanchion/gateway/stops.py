"""Stop strings, matched on the text stream and not on its chunks.

Promises, for every way the text is cut:
* the match is the one that completes first; of those completing together, the longest;
* no character of it is given out (unless `include`), all characters before it are;
* text held because it might have become a match is given out unchanged once it cannot.

One automaton (Aho-Corasick) for all stops: its state's depth is exactly how much must be held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    depth: int
    after: dict[str, int] = field(default_factory=dict)
    fall: int = 0  # the longest proper suffix that some stop also begins with
    match: int = 0  # characters of the longest stop that ends here


class StopSet:
    """The automaton: immutable once built, shared by the choices of a request."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop would match everywhere"
        self._nodes = [_Node(0)]
        for stop in stops:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self._nodes) > 1

    def _add(self, stop: str) -> None:
        at = 0
        for character in stop:
            node = self._nodes[at]
            if character not in node.after:
                node.after[character] = len(self._nodes)
                self._nodes.append(_Node(node.depth + 1))
            at = node.after[character]
        self._nodes[at].match = len(stop)

    def _link(self) -> None:
        waiting = deque(self._nodes[0].after.values())
        while waiting:
            node = self._nodes[waiting.popleft()]
            for character, child in node.after.items():
                below = self._nodes[child]
                below.fall = self.step(node.fall, character)
                below.match = below.match or self._nodes[below.fall].match
                waiting.append(child)

    def step(self, at: int, character: str) -> int:
        while (found := self._nodes[at].after.get(character)) is None:
            if at == 0:
                return 0
            at = self._nodes[at].fall
        return found

    def depth(self, at: int) -> int:
        return self._nodes[at].depth

    def match(self, at: int) -> int:
        return self._nodes[at].match

    def starts_in(self, text: str) -> bool:
        return any(first in text for first in self._nodes[0].after)


class StopFold:
    def __init__(self, stops: StopSet, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._at = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be given out. After a match nothing more is, and `matched` names the stop."""
        if self.matched is not None:
            return ""
        if self._at == 0 and not self._stops.starts_in(text):
            return text
        buffered = self._held + text
        for seen, character in enumerate(text, start=len(self._held) + 1):
            self._at = self._stops.step(self._at, character)
            if length := self._stops.match(self._at):
                return self._stop(buffered[:seen], length)
        keep = len(buffered) - self._stops.depth(self._at)
        self._held = buffered[keep:]
        return buffered[:keep]

    def finish(self) -> str:
        """The text ended: what was held is no stop."""
        held, self._held, self._at = self._held, "", 0
        return held

    def _stop(self, seen: str, length: int) -> str:
        self.matched = seen[-length:]
        self._held, self._at = "", 0
        return seen if self._include else seen[:-length]
