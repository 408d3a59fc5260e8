"""The disk tier: which pages files keep, within how many bytes, and which leave first.

The index lives on the engine thread; what touches files is given to two queues, one that reads and
one that writes and removes, so that who waits for a page does not wait for what is being stored.
Their jobs touch only what they were given; `poll` looks at what came of those that have ended. A
file in use is not removed. What fails costs a miss, or a page that is not stored, and nothing else:
after a failed write the tier rests for a while and says so.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import ConfigError
from stanchion.core.identity import Digest
from stanchion.device.stream import JobQueue, Mark, Pages
from stanchion.kv import diskfile
from stanchion.kv.diskfile import OBJECT_PAGES, Misfit, Object
from stanchion.kv.record import Record

log = logging.getLogger(__name__)
Bytes = NDArray[np.uint8]
RETRY_S = 30.0


@dataclass(eq=False)
class File:
    object: Object
    reads: int = 0  # that have not ended


@dataclass(eq=False)
class Writing:
    """One file on its way."""

    records: list[Record]
    size: int
    mark: Mark = 0
    made: Object | None = None
    error: OSError | None = None
    unwanted: bool = False  # one of its pages was found bad, or all were given up


@dataclass(eq=False)
class Storing:
    left: int
    ended: bool = False


@dataclass(eq=False)
class Reading:
    """Some pages of one file. `places` are its own, `slots` where they go, `at` of the fetch."""

    file: File
    places: list[int]
    slots: list[int]
    at: list[int]
    mark: Mark = 0
    found: list[bool] = field(default_factory=list)
    why: str = ""


@dataclass(eq=False)
class Fetching:
    records: list[Record | None]
    readings: list[Reading] = field(default_factory=list)
    left: int = 0
    ended: bool = False
    cancelled: bool = False

    def cancel(self) -> None:
        """What has not been read is not read."""
        self.cancelled = True


@dataclass
class Counters:
    """In pages, but for the errors; `misfits` are files that were of no use at the start."""

    stored_pages: int = 0
    fetched_pages: int = 0
    evicted_pages: int = 0
    misses: int = 0
    dropped: int = 0
    misfits: int = 0
    write_errors: int = 0
    read_errors: int = 0


@dataclass
class DiskTier:
    folder: Path
    capacity_bytes: int
    schema: str
    memory: Bytes  # the host arena: slot s begins at s * page_bytes
    page_bytes: int
    reads: JobQueue
    writes: JobQueue
    in_flight_max: int
    clock: Callable[[], float]
    counters: Counters = field(default_factory=Counters)
    bytes_kept: int = 0
    warning: str | None = None
    _lock: int | None = None
    _off_until: float | None = None
    _files: OrderedDict[Path, File] = field(default_factory=OrderedDict)  # least recent first
    _where: dict[Digest, tuple[File, int]] = field(default_factory=dict)
    _writing: list[tuple[Writing, Storing]] = field(default_factory=list)
    _coming: dict[Digest, Writing] = field(default_factory=dict)
    _fetching: list[Fetching] = field(default_factory=list)
    _leaving: dict[Path, File] = field(default_factory=dict)  # once nobody reads them
    _removals: list[tuple[Mark, Path]] = field(default_factory=list)  # that have not ended

    @classmethod
    def open_in(
        cls,
        folder: Path,
        capacity_bytes: int,
        schema: str,
        memory: Bytes,
        page_bytes: int,
        queues: tuple[JobQueue, JobQueue],
        in_flight_max: int,
        clock: Callable[[], float],
    ) -> DiskTier:
        """With what an earlier process left in the folder. `queues`: to read, to write.

        Raise ConfigError where another process has the folder. One that cannot be used makes a tier
        that keeps nothing, and says so.
        """
        tier = cls(
            folder, capacity_bytes, schema, memory, page_bytes, *queues, in_flight_max, clock
        )
        try:
            tier._begin()
        except OSError as error:
            tier._rest(error)
        return tier

    # ---- what is there ----------------------------------------------------------------------

    @property
    def open(self) -> int:
        return len(self._writing) + len(self._fetching)

    @property
    def pages(self) -> int:
        return len(self._where)

    @property
    def writing(self) -> bool:
        return self._off_until is None

    def found(self, keys: Sequence[Digest], marks: Sequence[tuple[Digest, bytes]]) -> int:
        """How many leading pages there are, of these roots and tokens."""
        for count, (key, (root, tokens)) in enumerate(zip(keys, marks, strict=True)):
            known = self._where.get(key)
            if known is None:
                return count
            head = known[0].object.header.pages[known[1]]
            if head.root != root or head.tokens != tokens:
                return count
        return len(keys)

    def lacking(self, keys: Sequence[Digest]) -> list[bool]:
        return [key not in self._where and key not in self._coming for key in keys]

    def _begin(self) -> None:
        lock = diskfile.lock(self.folder)
        try:
            files = list(diskfile.scan(self.folder, self.schema, self.page_bytes))
        except OSError:
            diskfile.unlock(lock)
            raise
        self._lock = lock
        for path, found in files:
            if found is None:
                self.counters.misfits += 1
                diskfile.remove(path)
            else:
                self._add(found)
        self._make_room(0)

    def _add(self, found: Object) -> None:
        file = File(found)
        self._files[found.path] = file
        self.bytes_kept += found.size
        for place, head in enumerate(found.header.pages):
            self._where.setdefault(head.key, (file, place))

    # ---- writing ----------------------------------------------------------------------------

    def store(self, records: Sequence[Record], slots: Pages) -> Storing | None:
        """Write these pages from their slots, which the caller pins until it has ended. None where
        nothing of it is done: what the disk cannot take now is not stored."""
        lacks = self.lacking([one.key for one in records])
        wanted = [(one, int(slot)) for one, slot, lack in zip(records, slots, lacks) if lack]
        if not wanted:
            return None
        room = self.in_flight_max - len(self._coming) if self._may_write() else 0
        self.counters.dropped += max(len(wanted) - room, 0)
        wanted = wanted[: max(room, 0)]
        storing = Storing(0)
        for at in range(0, len(wanted), OBJECT_PAGES):
            self._write(wanted[at : at + OBJECT_PAGES], storing)
        return storing if storing.left else None

    def _write(self, wanted: list[tuple[Record, int]], storing: Storing) -> None:
        records = [one for one, _ in wanted]
        size = diskfile.size_of(self.schema, records, self.page_bytes)
        path = diskfile.path_of(self.folder, records[-1].key)
        if path in self._leaving or not self._make_room(size):
            self.counters.dropped += len(wanted)
            return
        if (namesake := self._files.get(path)) is not None:
            # It has this page too, though the index knew it from a file that has left since.
            self._leave(namesake)
            if namesake.reads:
                self.counters.dropped += len(wanted)
                return
        writing = Writing(records, size)
        self.bytes_kept += size
        self._coming |= dict.fromkeys((one.key for one in records), writing)
        pages = [(one, self._slot(slot)) for one, slot in wanted]
        writing.mark = self.writes.submit(partial(self._carry_out, writing, pages))
        storing.left += 1
        self._writing.append((writing, storing))

    def _carry_out(self, writing: Writing, pages: list[tuple[Record, Bytes]]) -> None:
        """On the writing queue's thread."""
        try:
            writing.made = diskfile.write(self.folder, self.schema, pages)
        except OSError as error:
            writing.error = error

    def _make_room(self, size: int) -> bool:
        """Nothing leaves where all of it would not do."""
        over = self.bytes_kept + size - self.capacity_bytes
        leaving: list[File] = []
        for file in self._files.values():
            if over <= 0:
                break
            if not file.reads:
                leaving.append(file)
                over -= file.object.size
        if over > 0:
            return False
        for file in leaving:
            self.counters.evicted_pages += len(file.object.header.pages)
            self._leave(file)
        return True

    def _may_write(self) -> bool:
        if self._off_until is None:
            return True
        if self.clock() < self._off_until or self._writing:
            return False
        if self._lock is None:
            try:
                self._begin()
            except (ConfigError, OSError) as error:
                self._rest(error)
                return False
        return True  # once: if it fails, it rests again

    def _rest(self, error: ConfigError | OSError) -> None:
        why = error.strerror if isinstance(error, OSError) else None
        said = f"no KV is stored in {self.folder} for {RETRY_S:g} s: {why or error}"
        if self.warning is None:
            log.warning(said)
        self.warning, self._off_until = said, self.clock() + RETRY_S
        self.counters.write_errors += 1

    # ---- reading ----------------------------------------------------------------------------

    def fetch(self, keys: Sequence[Digest], slots: Pages) -> Fetching:
        """Read these pages into their slots, which the caller pins until it has ended."""
        fetching = Fetching([None] * len(keys))
        by_file: dict[File, Reading] = {}
        for at, (key, slot) in enumerate(zip(keys, slots.tolist(), strict=True)):
            if (known := self._where.get(key)) is None:
                continue
            file, place = known
            reading = by_file.setdefault(file, Reading(file, [], [], []))
            reading.places.append(place)
            reading.slots.append(slot)
            reading.at.append(at)
        for file, reading in by_file.items():
            file.reads += 1
            self._files.move_to_end(file.object.path)
            reading.mark = self.reads.submit(partial(self._read, reading, fetching))
        fetching.readings = list(by_file.values())
        fetching.left = len(fetching.readings)
        self._fetching.append(fetching)
        return fetching

    def _read(self, reading: Reading, fetching: Fetching) -> None:
        """On the reading queue's thread."""
        found, slots = reading.file.object, [self._slot(slot) for slot in reading.slots]
        try:
            with open(found.path, "rb", buffering=0) as file:
                for place, slot in zip(reading.places, slots):
                    if fetching.cancelled:
                        return
                    diskfile.read_page(file.fileno(), found, place, slot)
                    reading.found.append(True)
        except (Misfit, OSError) as error:
            reading.why = str(error)

    # ---- what has ended ---------------------------------------------------------------------

    def poll(self) -> None:
        still = []  # each is asked once: it may end while we look
        for writing, storing in self._writing:
            if not self.writes.passed(writing.mark):
                still.append((writing, storing))
                continue
            self._written(writing)
            storing.left -= 1
            storing.ended = not storing.left
        self._writing = still
        self._removals = [one for one in self._removals if not self.writes.passed(one[0])]
        for fetching in self._fetching:
            for reading in [one for one in fetching.readings if self.reads.passed(one.mark)]:
                fetching.readings.remove(reading)
                self._was_read(reading, fetching)
            fetching.ended = not fetching.readings
        self._fetching = [one for one in self._fetching if not one.ended]

    def _written(self, writing: Writing) -> None:
        for one in writing.records:
            del self._coming[one.key]
        self.bytes_kept -= writing.size
        if writing.made is None:
            self.counters.dropped += len(writing.records)
            assert writing.error is not None
            self._rest(writing.error)
            return
        if self.warning is not None:
            log.warning("KV is stored in %s again", self.folder)
        self.warning, self._off_until = None, None
        self.counters.stored_pages += len(writing.records)
        self._add(writing.made)
        if writing.unwanted:
            self._leave(self._files[writing.made.path])

    def _was_read(self, reading: Reading, fetching: Fetching) -> None:
        file = reading.file
        file.reads -= 1
        heads = file.object.header.pages
        for place, at, _ in zip(reading.places, reading.at, reading.found):
            head = heads[place]
            fetching.records[at] = Record(head.key, head.root, head.tokens, head.digests)
        self.counters.fetched_pages += len(reading.found)
        if reading.why:
            self.counters.read_errors += 1
            self.counters.misses += len(reading.places) - len(reading.found)
            log.warning("disk tier: %s is not used again: %s", file.object.path, reading.why)
            if file.object.path in self._files:
                self._leave(file)
                return
        if not file.reads and self._leaving.pop(file.object.path, None) is not None:
            self._unlink(file)

    # ---- leaving ----------------------------------------------------------------------------

    def forget(self, keys: Sequence[Digest]) -> None:
        """Found bad elsewhere: never a hit again. What was written with it goes too."""
        for key in keys:
            if (known := self._where.get(key)) is not None:
                self._leave(known[0])
            if (writing := self._coming.get(key)) is not None:
                writing.unwanted = True

    def forget_root(self, root: Digest) -> None:
        """Files that hold a page of this identity leave, and whatever is being written."""
        for file in list(self._files.values()):
            if any(head.root == root for head in file.object.header.pages):
                self._leave(file)
        for writing in self._coming.values():
            writing.unwanted = True

    def flush(self) -> None:
        """Everything leaves; what is in use, when it is no more."""
        for file in list(self._files.values()):
            self._leave(file)
        for writing in self._coming.values():
            writing.unwanted = True

    def _leave(self, file: File) -> None:
        del self._files[file.object.path]
        for head in file.object.header.pages:
            known = self._where.get(head.key)
            if known is not None and known[0] is file:
                del self._where[head.key]
        if file.reads:
            self._leaving[file.object.path] = file
        else:
            self._unlink(file)

    def _unlink(self, file: File) -> None:
        self.bytes_kept -= file.object.size
        path = file.object.path
        self._removals.append((self.writes.submit(partial(diskfile.remove, path)), path))

    def close(self) -> None:
        """What was to leave does, though its turn never came: a restart must not find it."""
        self.reads.close()
        self.writes.close()
        made = [one.made.path for one, _ in self._writing if one.unwanted and one.made is not None]
        for path in [*made, *self._leaving, *(path for _, path in self._removals)]:
            diskfile.remove(path)
        if self._lock is not None:
            diskfile.unlock(self._lock)
            self._lock = None

    def audit(self) -> list[str]:
        """With nothing open: the bytes are those of the files, and nobody reads one."""
        said = [f"{one.object.path.name} is read" for one in self._files.values() if one.reads]
        said += [f"{path.name} has not left" for path in self._leaving if not self.open]
        known = {file.object.path: file for file, _ in self._where.values()}
        said += [
            f"{path.name} is in the index, and not among the files"
            for path, file in known.items()
            if self._files.get(path) is not file
        ]
        size = sum(one.object.size for one in self._files.values())
        if not self.open and size != self.bytes_kept:
            said.append(f"{self.bytes_kept} bytes are counted, the files have {size}")
        if self.bytes_kept > self.capacity_bytes:
            said.append(f"{self.bytes_kept} bytes are over {self.capacity_bytes}")
        said += [f"{key.hex()} is being written" for key in self._coming if not self._writing]
        return said

    def _slot(self, slot: int) -> Bytes:
        return self.memory[slot * self.page_bytes : (slot + 1) * self.page_bytes]
