"""Who may touch which KV page, and when a page may be used again.

Everything that reads or writes a page holds a Pin on it: the request, the batch in flight, the
prefix tree, later the copy to host and the remote writer. A page is free again when its last pin
drops, and in no other way: there is no `free`. Each taking of a page starts a new generation.

Pins on the same run of pages share one grip, so a share costs the same for one page and for a
thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug, Overloaded
from stanchion.device.stream import Pages

Page = int


class Grip:
    """A run of pages and the pins on it. The pool counts grips a page, not pins."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.pins: list[Pin] = []


class PagePool:
    """Pages 1 to size - 1: page 0 is the null page, which nobody gets."""

    def __init__(self, size: int) -> None:
        assert size > 1
        self.size = size
        # First in, first out: the longer a page rests, the likelier a stray write shows as a bug
        # of ours in a test instead of as somebody else's answer.
        self._free: deque[Page] = deque(range(1, size))
        self._counts: NDArray[np.int32] = np.zeros(size, np.int32)
        self._grips: dict[Grip, None] = {}
        self._kept: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.kept_alone = 0  # kept pages that nobody else holds
        self.generations: NDArray[np.int64] = np.zeros(size, np.int64)
        self._quarantine: list[Pin] = []  # never dropped
        self.on_free: Callable[[Pages], None] | None = None  # poison, where it is asked for

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, count: int, holder: str) -> Pin:
        grip = Grip(self._draw(count, holder))
        self._grips[grip] = None
        return Pin(self, grip, holder)

    def grow(self, pin: Pin, count: int) -> Pages:
        """Add `count` fresh pages to the pin's run, for everyone who shares it."""
        pin.check("grow")
        fresh = self._draw(count, pin.holder)
        pin._grip.pages = np.concatenate([pin._grip.pages, fresh])
        return fresh

    def regrip(self, pages: Pages, holder: str) -> Pin:
        """A pin of its own on pages that somebody holds already."""
        if len(pages) and not self._counts[pages].all():
            raise Bug(f"{holder} wants a pin on pages that nobody holds")
        self.kept_alone -= self._alone(pages)
        self._counts[pages] += 1
        grip = Grip(pages)
        self._grips[grip] = None
        return Pin(self, grip, holder)

    def keep(self, pages: Pages, holder: str) -> Pin:
        """A pin that can be given up whenever nobody else holds the page: `kept_alone` counts."""
        pin = self.regrip(pages, holder)
        self._kept[pages] = True
        self.kept_alone += self._alone(pages)
        return pin

    def quarantine(self, pages: Pages, why: str) -> None:
        """Nobody gets these pages again: what is in them cannot be trusted, or still changes."""
        self._quarantine.append(self.regrip(pages, f"quarantine: {why}"))
        self._kept[pages] = False  # there is nothing to give up any more

    @property
    def quarantined(self) -> int:
        if not self._quarantine:
            return 0
        return len(np.unique(np.concatenate([pin.pages for pin in self._quarantine])))

    def holders(self, page: Page) -> list[str]:
        return sorted(pin.holder for grip in self._grips if page in grip.pages for pin in grip.pins)

    def counts(self, pages: Pages) -> NDArray[np.int32]:
        """How many grips there are on each page."""
        return self._counts[pages]

    def count(self, page: Page) -> int:
        return int(self._counts[page])

    def audit(self) -> list[str]:
        """What is wrong with the books, in words. Free + held must be all pages."""
        counted: NDArray[np.int32] = np.zeros(self.size, np.int32)
        for grip in self._grips:
            counted[grip.pages] += 1
        free = np.zeros(self.size, np.int32)
        free[list(self._free)] += 1
        said = [f"page {page} is free and held" for page in np.flatnonzero(free * counted)]
        said += [f"page {page} is lost" for page in np.flatnonzero((free + counted) == 0) if page]
        said += [f"page {page} is miscounted" for page in np.flatnonzero(counted != self._counts)]
        return said

    def _draw(self, count: int, holder: str) -> Pages:
        if count > len(self._free):
            raise Overloaded(f"{holder} wants {count} pages, {len(self._free)} are free")
        pages = np.array([self._free.popleft() for _ in range(count)], np.int32)
        self._counts[pages] += 1
        self.generations[pages] += 1
        return pages

    def _release(self, grip: Grip) -> None:
        del self._grips[grip]
        pages = grip.pages
        self.kept_alone -= self._alone(pages)
        self._counts[pages] -= 1
        free = pages[self._counts[pages] == 0]
        self._kept[free] = False
        self.kept_alone += self._alone(pages)
        if self.on_free is not None and len(free):
            self.on_free(free)
        self._free.extend(free.tolist())

    def _alone(self, pages: Pages) -> int:
        return int((self._kept[pages] & (self._counts[pages] == 1)).sum())


class Pin:
    """The right to touch `pages` until `drop`. Share it with each further user; never copy it."""

    def __init__(self, pool: PagePool, grip: Grip, holder: str) -> None:
        self.holder = holder
        self.held = True
        self._pool = pool
        self._grip = grip
        grip.pins.append(self)

    @property
    def pages(self) -> Pages:
        return self._grip.pages

    def share(self, holder: str) -> Pin:
        self.check("share")
        return Pin(self._pool, self._grip, holder)

    def drop(self) -> None:
        if not self.held:
            raise Bug(f"{self.holder} dropped its pages twice")
        self.held = False
        self._grip.pins.remove(self)
        if not self._grip.pins:
            self._pool._release(self._grip)

    def check(self, what: str) -> None:
        if not self.held:
            raise Bug(f"{self.holder} wants to {what} pages that it dropped")
