"""The host tier's books: which pages host memory keeps, and which leave first. Pure.

Each kept page has a slot of the host arena, under the tier's own pin; whoever copies from or to a
slot holds a pin of his own. A page that is pinned by somebody else is not evicted. A run is marked
as used from its end to its start, so the pages that others hang on leave last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stanchion.core.identity import Digest
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.record import Prompt, Record


@dataclass(eq=False)
class Kept:
    record: Record
    pin: Pin
    slot: int

    @property
    def key(self) -> Digest:
        return self.record.key


class HostTier:
    """`slots` pages; slot 0 is nobody's, as in every pool."""

    def __init__(self, slots: int) -> None:
        self.pool = PagePool(slots + 1)
        self.evicted = 0
        self._kept: OrderedDict[Digest, Kept] = OrderedDict()  # least recently used first

    def __contains__(self, key: Digest) -> bool:
        return key in self._kept

    @property
    def pages(self) -> int:
        return len(self._kept)

    def match(self, prompt: Prompt, first: int) -> list[Kept]:
        """The longest run of kept pages from place `first` on; marks them as used."""
        found: list[Kept] = []
        for at in range(first, len(prompt.keys)):
            one = self._kept.get(prompt.keys[at])
            if one is None:
                break
            if one.record.root != prompt.root or one.record.tokens != prompt.tokens_of(at):
                break  # a collision is a miss
            found.append(one)
        for one in reversed(found):
            self._kept.move_to_end(one.key)
        return found

    def have(self, keys: Sequence[Digest]) -> list[Kept]:
        return [self._kept[key] for key in keys if key in self._kept]

    def hold(self, kept: Sequence[Kept], holder: str) -> list[Pin]:
        """A pin on all of them, for as long as somebody copies."""
        if not kept:
            return []
        return [self.pool.regrip(np.array([one.slot for one in kept], np.int32), holder)]

    def keep(self, record: Record, slot: int) -> Kept:
        """The slot, which somebody holds, has this page whole. Who was first stays."""
        known = self._kept.get(record.key)
        if known is not None:
            return known
        kept = Kept(record, self.pool.keep(np.array([slot], np.int32), "host tier"), slot)
        self._kept[record.key] = kept
        return kept

    def make_room(self, count: int) -> None:
        """Evict until so many slots are free, or nothing more can be."""
        missing = min(count - self.pool.available, self.pool.kept_alone)
        if missing <= 0:
            return
        free: list[Kept] = []
        held: list[Kept] = []
        for kept in self._kept.values():
            if len(free) == missing:
                break
            (held if self.pool.count(kept.slot) > 1 else free).append(kept)
        for kept in free:
            self._drop(kept)
        self.evicted += len(free)
        for kept in reversed(held):  # in use: they count as used now
            self._kept.move_to_end(kept.key)

    def condemn(self, kept: Sequence[Kept]) -> None:
        """Never hit these again, nor use their memory."""
        for one in kept:
            if not one.pin.held:
                continue
            self.pool.quarantine(one.pin.pages, "differs from its digest")
            if self._kept.get(one.key) is one:
                self._drop(one)

    def forget_root(self, root: Digest) -> None:
        for kept in [one for one in self._kept.values() if one.record.root == root]:
            self._drop(kept)

    def flush(self) -> None:
        for kept in list(self._kept.values()):
            self._drop(kept)

    def audit(self) -> list[str]:
        """With no copy in flight: no pin but the tier's own."""
        said = self.pool.audit()
        kept = len(self._kept) + self.pool.quarantined
        if self.pool.available + kept != self.pool.size - 1:
            said.append(
                f"{self.pool.available} free slots, {len(self._kept)} kept and "
                f"{self.pool.quarantined} in quarantine are not all of {self.pool.size - 1}"
            )
        held = len(self._kept) - self.pool.kept_alone
        return said + ([f"{held} kept slots are held by somebody else"] if held else [])

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.key]
        kept.pin.drop()
