"""KV pages beyond the device: host memory, and disk behind it. Who is where, and what moves. Pure.

    lift    host -> device   a prefix that a request needs; its layers are loaded as compute goes
    spill   device -> host   pages that were published, so that they outlive their eviction
    fetch   disk -> host     a prefix that only the disk has, before its request begins
    store   host -> disk     what has been spilled

A page is one record, whole or absent: what moves is generated from the schema, so no buffer can be
left behind. Copies run on streams of their own, and a `Copier` and a `Disk` carry them out; here a
copy is a handle that has ended or not. Until it has, its source and its target are pinned on both
sides, and what it makes cannot be hit. Only `poll` learns of ends, at a moment that the engine
chooses: so two runs that hear the same do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from stanchion.core.identity import Digest
from stanchion.core.messages import TierProgress
from stanchion.device.stream import Pages
from stanchion.kv.copies import Copier, Disk, Fetching, Lift, Spill, Storing
from stanchion.kv.hosttier import HostTier, Kept
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.record import Prompt, Record

Policy = Literal["through", "selective", "back"]
Prefetch = Literal["wait", "best_effort", "timeout"]
FAILPOINTS = {
    "index_read_before_ready": "the index doors forget to wait for a load (the report's fault 2)",
    "attend_read_before_ready": "the attend doors forget to wait for a load",
    "door_removed": "the one door that lab.removed_door names forgets to wait for a load",
    "restore_without_draft": "a lift leaves the draft layer's buffers out",
    "restore_without_index": "a lift leaves the index keys out",
    "evict_source_in_flight": "a lift does not pin the host pages that it reads",
    "publish_before_complete": "a page counts as kept in the host tier before its bytes are there",
}
log = logging.getLogger(__name__)
FETCH_PAGES = 64  # one fetch reads at most so many, so that some are in when time is up
FETCH_BASE_S, FETCH_TOKEN_S, FETCH_MAX_S = 2.0, 0.1 / 1024, 30.0  # SGLang's (#23309)


@dataclass(eq=False)
class Part:
    fetching: Fetching
    slots: Pin
    flushed: bool = False


@dataclass(eq=False)
class Wanted:
    """What the disk is asked for, for one request. `held` keeps the pages before it in the host."""

    due: float
    parts: list[Part] = field(default_factory=list)
    held: list[Pin] = field(default_factory=list)
    late: bool = False


@dataclass(eq=False)
class Found:
    """A run of pages that the host has, pinned until it is lifted or let go."""

    kept: list[Kept]
    pins: list[Pin]

    def __len__(self) -> int:
        return len(self.kept)

    def release(self) -> None:
        for pin in self.pins:
            pin.drop()
        self.pins = []


@dataclass
class Counters:
    """In pages. `bad_host`: those whose bytes were not what their digests say."""

    lifted: int = 0
    spilled: int = 0
    not_spilled: int = 0
    fetched: int = 0
    timeouts: int = 0
    bad_host: int = 0


@dataclass
class Tiers:
    """`clock` is asked for the disk's timeouts alone."""

    pool: PagePool
    host: HostTier
    copier: Copier
    disk: Disk | None = None
    policy: Policy = "through"
    prefetch: Prefetch = "timeout"
    failpoints: frozenset[str] = frozenset()
    clock: Callable[[], float] = lambda: 0.0
    page_tokens: int = 16
    counters: Counters = field(default_factory=Counters)
    _planned: list[Lift] = field(default_factory=list)
    _lifts: list[Lift] = field(default_factory=list)
    _spills: list[Spill] = field(default_factory=list)
    _spilling: dict[Digest, None] = field(default_factory=dict)
    _stores: list[tuple[Storing, Pin]] = field(default_factory=list)
    _wanted: dict[str, Wanted] = field(default_factory=dict)
    _leaving: list[Part] = field(default_factory=list)  # of requests that wait no more

    @property
    def open(self) -> int:
        """Copies that have not ended, and requests that wait for the disk."""
        copies = len(self._planned) + len(self._lifts) + len(self._spills)
        return copies + len(self._stores) + len(self._wanted) + len(self._leaving)

    # ---- disk -> host -----------------------------------------------------------------------

    def settled(self, name: str, prompt: Prompt, first: int) -> bool:
        """May the request begin, or is there more on disk that it should wait for? `first` of its
        pages are on the device."""
        if self.disk is None:
            return True
        wanted = self._wanted.get(name)
        if wanted is None:
            wanted = self._want(prompt, first)
            if not wanted.parts:
                for pin in wanted.held:
                    pin.drop()
                return True
            self._wanted[name] = wanted
        if self.prefetch == "best_effort" or wanted.late:
            return True
        if all(part.fetching.ended for part in wanted.parts):
            return True
        if self.prefetch == "timeout" and self.clock() >= wanted.due:
            self.counters.timeouts += 1
            wanted.late = True
        return wanted.late

    def _want(self, prompt: Prompt, first: int) -> Wanted:
        assert self.disk is not None
        kept = self.host.match(prompt, first)
        begin = first + len(kept)
        count = self.disk.found(prompt.keys[begin:], prompt.marks(begin))
        due_s = min(FETCH_BASE_S + FETCH_TOKEN_S * count * self.page_tokens, FETCH_MAX_S)
        wanted = Wanted(self.clock() + due_s)
        if not count:
            return wanted
        wanted.held = self.host.hold(kept, "fetch")
        self.host.make_room(count)
        count = min(count, self.host.pool.available)
        for at in range(begin, begin + count, FETCH_PAGES):
            keys = prompt.keys[at : min(at + FETCH_PAGES, begin + count)]
            slots = self.host.pool.take(len(keys), "fetch")
            wanted.parts.append(Part(self.disk.fetch(keys, slots.pages), slots))
        return wanted

    def forget(self, name: str) -> None:
        """The request begins, or ends: what it waited for is kept, if it comes."""
        wanted = self._wanted.pop(name, None)
        if wanted is None:
            return
        for pin in wanted.held:
            pin.drop()
        for part in wanted.parts:
            if not part.fetching.ended and self.prefetch != "best_effort":
                part.fetching.cancel()
            self._leaving.append(part)

    # ---- host -> device ---------------------------------------------------------------------

    def find(self, prompt: Prompt, first: int) -> Found:
        """The longest run of pages from `first` on that the host has, whole. It is pinned."""
        kept = self.host.match(prompt, first)
        if "evict_source_in_flight" in self.failpoints:
            return Found(kept, [])
        return Found(kept, self.host.hold(kept, "lift"))

    def lift(self, found: Found, pages: Pages) -> None:
        """Load what was found into these pages, which somebody holds. `submit` begins it."""
        slots = np.array([one.slot for one in found.kept], np.int32)
        pins = [*found.pins, self.pool.regrip(pages, "lift")]
        records = [one.record for one in found.kept]
        self._planned.append(Lift(records, pages, slots, kept=found.kept, pins=pins))
        self.counters.lifted += len(pages)

    def submit(self) -> None:
        """Begin the loads that were planned since: before the next flight is launched."""
        if self._planned:
            self.copier.load(self._planned)
            self._lifts += self._planned
            self._planned = []

    # ---- device -> host ---------------------------------------------------------------------

    def published(self, prompt: Prompt, pages: Pages, first: int) -> None:
        """The tree shares these pages now, from place `first` on."""
        if self.policy == "through":
            self._save(prompt, pages, first)

    def hit(self, prompt: Prompt, pages: Pages) -> None:
        """The tree had these pages for somebody: once is often enough."""
        if self.policy == "selective":
            self._save(prompt, pages, 0)

    def evicted(self, records: Sequence[Record], pages: Pages) -> None:
        """The tree is about to give up these pages, which it still holds."""
        if self.policy == "back":
            spill = self._spill(records, pages)
            if spill is not None:
                self.copier.finish(spill)
                self._end_spills()  # the pages are wanted now

    def _save(self, prompt: Prompt, pages: Pages, first: int) -> None:
        records = [
            Record(prompt.keys[at], prompt.root, prompt.tokens_of(at), b"")
            for at in range(first, first + len(pages))
        ]
        self._spill(records, pages, prompt.keys[:first])

    def _spill(
        self, records: Sequence[Record], pages: Pages, before: Sequence[Digest] = ()
    ) -> Spill | None:
        """`before` are pages that these hang on: they do not have to leave for these."""
        new = [
            at
            for at, one in enumerate(records)
            if one.key not in self._spilling and one.key not in self.host
        ]
        if len(new) > self.host.pool.available:
            held = self.host.hold(self.host.have(before), "spill")
            self.host.make_room(len(new))
            for pin in held:
                pin.drop()
        room = min(len(new), self.host.pool.available)
        self.counters.not_spilled += len(new) - room
        if not room:
            return None
        chosen = [records[at] for at in new[:room]]
        source, target = pages[new[:room]], self.host.pool.take(room, "spill")
        spill = Spill(chosen, source, target.pages, [target, self.pool.regrip(source, "spill")])
        self._spilling |= dict.fromkeys(one.key for one in chosen)
        if "publish_before_complete" in self.failpoints:
            for record, slot in zip(chosen, target.pages):
                self.host.keep(record, int(slot))
            self._store(spill)
        self.copier.save(spill)
        self._spills.append(spill)
        self.counters.spilled += room
        return spill

    # ---- what has ended ---------------------------------------------------------------------

    def poll(self) -> Pages:
        """Take in what has ended. Return device pages that hold what they should not: whoever read
        them has to begin again."""
        self._end_spills()
        bad = self._end_lifts()
        if self.disk is not None:
            self.disk.poll()
            self._end_stores()
            self._end_fetches()
        return bad

    def _end_spills(self) -> None:
        still = []
        for spill in self._spills:
            if not self.copier.saved(spill):
                still.append(spill)
                continue
            for at, slot in enumerate(spill.slots.tolist()):
                known = spill.records[at]
                del self._spilling[known.key]
                if spill.flushed:
                    continue
                digests = spill.digests[at] if spill.digests else b""
                self.host.keep(Record(known.key, known.root, known.tokens, digests), slot)
            self._store(spill)
            for pin in spill.pins:
                pin.drop()
        self._spills = still

    def _store(self, spill: Spill) -> None:
        if self.disk is None:
            return
        kept = self.host.have([one.key for one in spill.records])
        kept = [one for one, lacks in zip(kept, self.disk.lacking([k.key for k in kept])) if lacks]
        if not kept:
            return
        slots = np.array([one.slot for one in kept], np.int32)
        storing = self.disk.store([one.record for one in kept], slots)
        if storing is not None:
            self._stores.append((storing, self.host.pool.regrip(slots, "store")))

    def _end_lifts(self) -> Pages:
        bad: dict[int, None] = {}
        still = []
        for lift in self._lifts:
            ended = self.copier.loaded(lift)
            if lift.bad:  # also of one that goes on: who read a layer of it may have an answer
                bad |= dict.fromkeys(self._condemn(lift))
            if not ended:
                still.append(lift)
                continue
            for pin in lift.pins:
                pin.drop()
        self._lifts = still
        return np.array(list(bad), np.int32)

    def _condemn(self, lift: Lift) -> list[int]:
        """These pages are not what was kept: no tier serves them again, and neither the memory that
        they came from nor that which they came to is used again."""
        places = []
        while lift.bad:
            places.append(lift.bad.popleft())
        new = [lift.kept[at] for at in dict.fromkeys(places) if lift.kept[at].pin.held]
        pages = lift.pages[list(dict.fromkeys(places))]
        self.counters.bad_host += len(new)
        for one in new:
            log.warning(
                "host tier: the page of key %s, slot %d, is not what was kept: recomputed",
                one.key.hex()[:16],
                one.slot,
            )
        self.pool.quarantine(pages, "loaded from the host tier, and differs")
        self.host.condemn(new)
        if self.disk is not None:
            self.disk.forget([one.key for one in new])
        return [int(page) for page in pages]

    def _end_stores(self) -> None:
        ended = [one for one in self._stores if one[0].ended]
        self._stores = [one for one in self._stores if not one[0].ended]
        for _, pin in ended:
            pin.drop()

    def _end_fetches(self) -> None:
        for wanted in self._wanted.values():
            for part in wanted.parts:
                if part.fetching.ended and part.slots.held:
                    wanted.held += self._keep(part)
        still = []
        for part in self._leaving:
            if not part.fetching.ended:
                still.append(part)
            elif part.slots.held:
                for pin in self._keep(part):
                    pin.drop()
        self._leaving = still

    def _keep(self, part: Part) -> list[Pin]:
        """What arrived is in the host tier now; return pins on it."""
        pins = []
        for record, slot in zip(part.fetching.records, part.slots.pages.tolist(), strict=True):
            if record is not None and not part.flushed:
                kept = self.host.keep(record, slot)
                self.counters.fetched += 1
                pins += self.host.hold([kept], "fetch")
        part.slots.drop()
        return pins

    # ---- the rest ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Nothing that is kept now is hit again. What is in use leaves when it is not."""
        for spill in self._spills:
            spill.flushed = True
        parts = [part for wanted in self._wanted.values() for part in wanted.parts]
        for part in [*parts, *self._leaving]:
            part.flushed = True
        self.host.flush()
        if self.disk is not None:
            self.disk.flush()

    def forget_root(self, root: Digest) -> None:
        """Nothing that is kept of this identity now is hit again."""
        for spill in self._spills:
            spill.flushed = spill.flushed or any(one.root == root for one in spill.records)
        parts = [part for wanted in self._wanted.values() for part in wanted.parts]
        for part in [*parts, *self._leaving]:
            part.flushed = True  # what comes is not known yet
        self.host.forget_root(root)
        if self.disk is not None:
            self.disk.forget_root(root)

    def progress(self) -> TierProgress:
        host, counts, disk = self.host, self.counters, self.disk
        said = TierProgress(
            host_pages=host.pool.size - 1,
            host_free=host.pool.available,
            host_kept=host.pages,
            host_quarantined=host.pool.quarantined,
            copies=self.open,
            lifted=counts.lifted,
            spilled=counts.spilled,
            not_spilled=counts.not_spilled,
            fetched=counts.fetched,
            timeouts=counts.timeouts,
            bad_host=counts.bad_host,
        )
        if disk is None:
            return said
        return msgspec.structs.replace(
            said,
            disk_pages=disk.pages,
            disk_bytes=disk.bytes_kept,
            disk_stored=disk.counters.stored_pages,
            disk_misses=disk.counters.misses,
            disk_dropped=disk.counters.dropped,
            disk_errors=disk.counters.write_errors + disk.counters.read_errors,
            disk_writing=disk.writing,
            disk_warning=disk.warning or "",
        )

    def close(self) -> None:
        self.copier.close()
        if self.disk is not None:
            self.disk.close()

    def audit(self) -> list[str]:
        """With nothing running and nothing in flight: no pin but the tier's own."""
        said = [f"host: {one}" for one in self.host.audit()]
        if self.open or self.copier.open:
            said.append(f"{self.open} copies are open")
        if self._spilling and not self._spills:
            said.append("pages count as being spilled, and no spill is open")
        return said + ([] if self.disk is None else [f"disk: {one}" for one in self.disk.audit()])
