"""What tiers ask of those who move KV: copies as handles, and who carries them out. No I/O here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stanchion.core.identity import Digest
from stanchion.device.stream import Pages
from stanchion.kv.hosttier import Kept
from stanchion.kv.pages import Pin
from stanchion.kv.record import Record


@dataclass(eq=False)
class Loading:
    """Load what `slots` of host memory keep into device `pages`. The load puts into `bad` each
    place whose bytes differ from their digests, before it lets anybody read them."""

    records: Sequence[Record]
    pages: Pages
    slots: Pages
    bad: deque[int] = field(default_factory=deque)


@dataclass(eq=False)
class Lift(Loading):
    """One that a request asked for."""

    kept: list[Kept] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)


@dataclass(eq=False)
class Spill:
    """Copy device `pages` into host `slots`. `digests`, one for each page, are made on the way."""

    records: list[Record]
    pages: Pages
    slots: Pages
    pins: list[Pin]
    digests: list[bytes] = field(default_factory=list)
    flushed: bool = False


class Copier(Protocol):
    """Copies between the device's pages and the host's, through the device's doors."""

    def load(self, lifts: Sequence[Loading]) -> None:
        """All of them layer by layer: the first layer of each before the second of any."""

    def save(self, spill: Spill) -> None: ...

    def loaded(self, lift: Loading) -> bool:
        """Has it ended?"""

    def saved(self, spill: Spill) -> bool: ...

    def finish(self, spill: Spill) -> None:
        """Stand still until it has ended."""

    def close(self) -> None: ...

    @property
    def open(self) -> int: ...


class Storing(Protocol):
    ended: bool


class Fetching(Protocol):
    ended: bool
    records: list[Record | None]

    def cancel(self) -> None: ...


class DiskCounters(Protocol):
    """In pages, but for the errors."""

    stored_pages: int
    misses: int
    dropped: int
    write_errors: int
    read_errors: int


class Disk(Protocol):
    def found(self, keys: Sequence[Digest], marks: Sequence[tuple[Digest, bytes]]) -> int: ...
    def lacking(self, keys: Sequence[Digest]) -> list[bool]: ...
    def store(self, records: Sequence[Record], slots: Pages) -> Storing | None: ...
    def fetch(self, keys: Sequence[Digest], slots: Pages) -> Fetching: ...
    def forget(self, keys: Sequence[Digest]) -> None: ...
    def forget_root(self, root: Digest) -> None: ...
    def flush(self) -> None: ...
    def poll(self) -> None: ...
    def close(self) -> None: ...
    def audit(self) -> list[str]: ...
    @property
    def open(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def bytes_kept(self) -> int: ...
    @property
    def writing(self) -> bool: ...
    @property
    def warning(self) -> str | None: ...
    @property
    def counters(self) -> DiskCounters: ...
