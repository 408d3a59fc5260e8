"""The disk tier: what it offers is what was stored, whatever happens to the files, the disk or the
process; it keeps to its bytes; and where it fails, it costs a miss and says so."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stanchion.core.errors import ConfigError
from stanchion.device.cpu import ThreadQueue
from stanchion.device.stream import Mark
from stanchion.kv import diskfile
from stanchion.kv.disk import RETRY_S, DiskTier, Fetching, Storing
from stanchion.kv.diskfile import OBJECT_PAGES, Header, Object, PageHead
from stanchion.kv.record import Record
from stanchion.sim.choices import Choices, seeded
from stanchion.sim.late import LateQueue
from tests.kv import diskwriter
from tests.kv.diskwriter import CHAINS, LENGTH, PAGE_BYTES, SCHEMA, content, put, run, tier_in

SMALL = 100  # bytes of a page, where each of them is tried
FIRST = np.arange(LENGTH, dtype=np.int32)


def marks(records: Sequence[Record]) -> list[tuple[bytes, bytes]]:
    return [(one.root, one.tokens) for one in records]


def keys(records: Sequence[Record]) -> list[bytes]:
    return [one.key for one in records]


def offers(tier: DiskTier, records: Sequence[Record]) -> list[Record]:
    return [one for one in records if tier.found([one.key], marks([one]))]


def finish(tier: DiskTier) -> None:
    tier.reads.finish(tier.reads.mark())
    tier.writes.finish(tier.writes.mark())
    tier.poll()


@dataclass
class Rig:
    """A tier whose jobs are done when `finish` says."""

    folder: Path
    capacity: int = 1 << 24
    page_bytes: int = PAGE_BYTES
    schema: str = SCHEMA
    in_flight_max: int = 1024
    now: float = 0.0
    slots: int = 64
    opened: list[DiskTier] = field(default_factory=list)

    def open(self) -> DiskTier:
        """As after a restart: what an earlier one did not get to do is not done."""
        self.close()
        memory = np.zeros(self.slots * self.page_bytes, np.uint8)
        tier = DiskTier.open_in(
            self.folder, self.capacity, self.schema, memory, self.page_bytes,
            (LateQueue(), LateQueue()), self.in_flight_max, lambda: self.now,
        )  # fmt: skip
        self.opened.append(tier)
        return tier

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.kv"))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "kv")


def begin_store(tier: DiskTier, records: Sequence[Record]) -> Storing | None:
    for slot, record in enumerate(records):
        put(tier, slot, record)
    return tier.store(records, np.arange(len(records), dtype=np.int32))


def store(tier: DiskTier, records: Sequence[Record]) -> None:
    storing = begin_store(tier, records)
    assert storing is not None
    finish(tier)
    assert storing.ended


def fetch(tier: DiskTier, records: Sequence[Record]) -> list[Record]:
    """Those of them that come, each with the right bytes."""
    tier.memory[:] = 170
    fetching = tier.fetch(keys(records), np.arange(len(records), dtype=np.int32))
    finish(tier)
    assert fetching.ended
    return came(tier, fetching, records, range(len(records)))


def came(
    tier: DiskTier, fetching: Fetching, records: Sequence[Record], slots: Sequence[int]
) -> list[Record]:
    good = []
    for record, got, slot in zip(records, fetching.records, slots, strict=True):
        if got is None:
            continue
        assert got == record
        page = tier.memory[slot * tier.page_bytes : (slot + 1) * tier.page_bytes]
        assert np.array_equal(page, content(record.key, tier.page_bytes)), "a wrong byte"
        good.append(got)
    return good


# ---- what is stored comes back, and nothing else ----------------------------------------------


def test_what_is_stored_comes_back_also_after_a_restart(rig: Rig) -> None:
    records, others = run(1), run(2)
    tier = rig.open()
    store(tier, records)
    store(tier, others)
    assert tier.store(records, FIRST) is None, "it has them"
    assert fetch(tier, records) == records
    tier = rig.open()
    assert tier.pages == 2 * LENGTH and tier.audit() == []
    assert tier.bytes_kept == sum(path.stat().st_size for path in rig.files())
    assert tier.found(keys(records), marks(records)) == LENGTH
    assert fetch(tier, records[3:7]) == records[3:7]
    assert fetch(tier, [others[5], records[0], run(3)[0]]) == [others[5], records[0]]
    assert (tier.counters.misses, tier.counters.misfits) == (0, 0)


def test_a_run_larger_than_a_file_is_many_files(rig: Rig) -> None:
    rig.page_bytes, rig.slots = 64, 2 * OBJECT_PAGES + 2
    records = run(1, 2 * OBJECT_PAGES + 1)
    tier = rig.open()
    store(tier, records)
    assert len(rig.files()) == 3
    assert rig.files() == sorted(
        diskfile.path_of(rig.folder, records[at].key) for at in (63, 127, 128)
    )
    assert fetch(rig.open(), records) == records


def test_writes_and_reads_that_do_only_a_part_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda file, view: write(file, view[:1000]))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:999]], at))
    tier = rig.open()
    store(tier, run(1))
    assert fetch(tier, run(1)) == run(1)


def test_another_root_or_other_tokens_are_a_miss(rig: Rig) -> None:
    records = run(1)
    tier = rig.open()
    store(tier, records)
    said = marks(records)
    other = [*said[:4], (said[0][0], b"other tokens"), *said[5:]]
    assert tier.found(keys(records), other) == 4
    other = [*said[:2], (run(2)[0].root, said[2][1]), *said[3:]]
    assert tier.found(keys(records), other) == 2


@pytest.mark.parametrize("change", [{"schema": "another"}, {"page_bytes": PAGE_BYTES + 1}])
def test_pages_of_another_schema_or_size_are_no_hit(rig: Rig, change: dict[str, object]) -> None:
    store(rig.open(), run(1))
    for name, value in change.items():
        setattr(rig, name, value)
    tier = rig.open()
    assert (tier.pages, tier.counters.misfits) == (0, 1)
    assert rig.files() == [], "it is of no use to us"


def one_file(rig: Rig) -> tuple[list[Record], Path, bytes]:
    rig.page_bytes = SMALL
    records = run(1, 2)
    store(rig.open(), records)
    rig.close()
    (path,) = rig.files()
    return records, path, path.read_bytes()


def test_every_flipped_byte_is_a_miss_and_never_a_wrong_byte(rig: Rig) -> None:
    records, path, whole = one_file(rig)
    header_ends = diskfile.START_BYTES + int.from_bytes(whole[12:16], "little") + 8
    payload = len(whole) - 2 * SMALL
    for at in [*range(header_ends), *range(payload, len(whole))]:
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        path.write_bytes(broken)
        tier = rig.open()
        if at < header_ends:
            assert (tier.pages, tier.counters.misfits) == (0, 1), at
        else:
            assert fetch(tier, records) == records[: (at - payload) // SMALL], at
            assert tier.counters.misses and offers(tier, records) == [] and tier.audit() == []
            finish(tier)
        assert rig.files() == []
    path.write_bytes(whole)
    assert fetch(rig.open(), records) == records


def test_a_file_cut_anywhere_is_no_hit(rig: Rig) -> None:
    records, path, whole = one_file(rig)
    payload = len(whole) - 2 * SMALL
    lengths = [*range(700), *range(payload - 3, len(whole))]
    for length in lengths:
        path.write_bytes(whole[:length])
        tier = rig.open()
        assert (tier.pages, tier.counters.misfits) == (0, 1), length
    path.write_bytes(whole + b"\0")
    assert rig.open().pages == 0
    path.write_bytes(whole)
    path.rename(diskfile.path_of(rig.folder, records[0].key))
    assert rig.open().pages == 0, "under another's name"


@pytest.mark.parametrize("place", [0, 8], ids=["magic", "version"])
def test_a_file_of_another_kind_is_no_hit_though_its_hash_is_right(rig: Rig, place: int) -> None:
    _, path, whole = one_file(rig)
    ends = diskfile.START_BYTES + int.from_bytes(whole[12:16], "little")
    said = bytearray(whole[:ends])
    said[place] ^= 2
    path.write_bytes(bytes(said) + xxhash.xxh3_64_digest(bytes(said)) + whole[ends + 8 :])
    assert rig.open().pages == 0


@pytest.mark.parametrize("harm", ["cut", "gone", "zeros"])
def test_what_happens_to_a_file_in_use_is_a_miss(
    rig: Rig, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    records, others = run(1), run(2)
    tier = rig.open()
    store(tier, records)
    store(tier, others)
    path = diskfile.path_of(rig.folder, records[-1].key)
    if harm == "cut":
        os.truncate(path, path.stat().st_size - 5 * PAGE_BYTES - 1)
    elif harm == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))
    good = records[:6] if harm == "cut" else []
    assert fetch(tier, records) == good
    assert tier.counters.misses == LENGTH - len(good)
    assert str(path) in caplog.text
    assert offers(tier, records) == [] and tier.lacking(keys(records)) == [True] * LENGTH
    assert tier.audit() == [] and tier.pages == LENGTH
    store(tier, records)
    assert fetch(tier, records + others) == records + others


def test_what_was_cancelled_is_neither_a_miss_nor_lost(rig: Rig) -> None:
    tier = rig.open()
    store(tier, run(1))
    fetching = tier.fetch(keys(run(1)), FIRST)
    fetching.cancel()
    finish(tier)
    assert fetching.ended and fetching.records == [None] * LENGTH
    assert tier.counters.misses == 0
    assert fetch(tier, run(1)) == run(1)


def test_a_job_that_ends_while_we_look_is_not_lost(rig: Rig) -> None:
    class Ends(LateQueue):
        """Its jobs are done right after the answer that they are not."""

        def passed(self, mark: Mark) -> bool:
            said = super().passed(mark)
            self.finish(mark)
            return said

    tier = rig.open()
    tier.writes, tier.reads = Ends(), Ends()
    storing = begin_store(tier, run(1))
    assert storing is not None
    tier.poll()
    tier.poll()
    assert storing.ended and tier.open == 0
    fetching = tier.fetch(keys(run(1)), FIRST)
    tier.poll()
    tier.poll()
    assert fetching.ended and len(came(tier, fetching, run(1), range(LENGTH))) == LENGTH


# ---- what leaves --------------------------------------------------------------------------------


def test_the_least_recently_used_leave_first_and_never_those_in_use(rig: Rig) -> None:
    tier = rig.open()
    store(tier, run(0))
    rig.capacity = tier.bytes_kept * 3
    tier = rig.open()
    store(tier, run(1))
    store(tier, run(2))
    assert fetch(tier, run(0)[:1]) == run(0)[:1]
    store(tier, run(3))
    assert [len(offers(tier, run(one))) for one in range(4)] == [LENGTH, 0, LENGTH, LENGTH]
    assert tier.counters.evicted_pages == LENGTH and len(rig.files()) == 3
    fetching = tier.fetch(keys(run(2)), FIRST + LENGTH)
    storing = begin_store(tier, run(4))
    tier.writes.finish(tier.writes.mark())
    assert storing is not None and diskfile.path_of(rig.folder, run(2)[-1].key).exists()
    finish(tier)
    assert len(came(tier, fetching, run(2), range(LENGTH, 2 * LENGTH))) == LENGTH
    assert tier.audit() == []


def test_what_is_too_large_is_dropped_and_nothing_leaves_for_it(rig: Rig) -> None:
    tier = rig.open()
    store(tier, run(0, 2))
    rig.capacity = tier.bytes_kept + 1
    tier = rig.open()
    assert begin_store(tier, run(1)) is None
    assert tier.counters.dropped == LENGTH
    assert fetch(tier, run(0, 2)) == run(0, 2)
    tier.fetch(keys(run(0, 2)), FIRST[:2])
    assert begin_store(tier, run(1, 2)) is None, "there is room, but it is in use"
    finish(tier)
    store(tier, run(1, 2))


def test_a_smaller_capacity_holds_from_the_start(rig: Rig) -> None:
    tier = rig.open()
    for one in range(4):
        store(tier, run(one))
        path = diskfile.path_of(rig.folder, run(one)[-1].key)
        os.utime(path, ns=(one, one))
    os.utime(diskfile.path_of(rig.folder, run(1)[-1].key), ns=(9, 9))
    rig.capacity = tier.bytes_kept // 2
    tier = rig.open()
    assert [len(offers(tier, run(one))) for one in range(4)] == [0, LENGTH, 0, LENGTH]
    finish(tier)
    assert len(rig.files()) == 2 and tier.audit() == []


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("when", ["at rest", "while read", "while written", "written"])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_what_was_forgotten_is_never_a_hit_again(
    rig: Rig, when: str, all_of_it: bool, at_the_end: bool
) -> None:
    """`at_the_end`: the process ends, in order, before its queues have got on."""
    tier = rig.open()
    fetching = None
    store(tier, run(2))
    if "written" in when:
        begin_store(tier, run(1))
    else:
        store(tier, run(1))
    if when == "while read":
        fetching = tier.fetch(keys(run(1)), FIRST + LENGTH)
    if all_of_it:
        tier.flush()
    else:
        tier.forget([run(1)[2].key])
    if when == "written":
        tier.writes.finish(tier.writes.mark())
    if not at_the_end:
        finish(tier)
        assert tier.audit() == []
        if fetching is not None:
            assert len(came(tier, fetching, run(1), range(LENGTH, 2 * LENGTH))) == LENGTH
    assert offers(tier, run(1)) == []
    tier = rig.open()
    assert offers(tier, run(1)) == []
    assert len(offers(tier, run(2))) == (0 if all_of_it else LENGTH)


def test_what_was_flushed_while_read_can_be_stored_again_at_once(rig: Rig) -> None:
    tier = rig.open()
    store(tier, run(1))
    fetching = tier.fetch(keys(run(1)), FIRST + LENGTH)
    tier.flush()
    begin_store(tier, run(1))
    finish(tier)
    assert len(came(tier, fetching, run(1), range(LENGTH, 2 * LENGTH))) == LENGTH
    finish(tier)
    held = offers(tier, run(1))
    assert fetch(tier, held) == held and tier.counters.misses == 0
    assert tier.audit() == []
    if not held:
        store(tier, run(1))
    assert fetch(tier, run(1)) == run(1)


def test_two_files_with_the_same_pages_do_no_harm(rig: Rig) -> None:
    """As a crash can leave them: one that was on its way out, and its successor."""
    zero, one, two, three = run(1, 4)
    tier = rig.open()
    store(tier, [zero, one, two])
    hidden = rig.files()[0].rename(rig.folder / "hidden")
    tier = rig.open()
    store(tier, [one, two, three])
    hidden.rename(diskfile.path_of(rig.folder, two.key))
    os.utime(diskfile.path_of(rig.folder, two.key), ns=(2**62, 2**62))
    tier = rig.open()
    assert fetch(tier, run(1, 4)) == run(1, 4)
    tier.forget([three.key])
    store(tier, [one, two])
    finish(tier)
    held = offers(tier, run(1, 4))
    assert two in held and fetch(tier, held) == held
    assert tier.audit() == [] and tier.counters.misses == 0
    assert tier.bytes_kept == sum(path.stat().st_size for path in rig.files())


# ---- a disk that fails --------------------------------------------------------------------------


def test_a_full_disk_switches_writes_off_for_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tier = rig.open()
    store(tier, run(0))
    write, left = os.write, [30_000]

    def full(file: int, view: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, view[: left[0]])
        left[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        store(tier, run(1))
        assert not tier.writing and "No space left" in (tier.warning or "")
        assert begin_store(tier, run(2)) is None
        rig.now = RETRY_S + 1
        assert begin_store(tier, run(2)) is not None, "it tries once"
        assert begin_store(tier, run(3)) is None, "and no more"
        finish(tier)
        assert begin_store(tier, run(3)) is None and not tier.writing
    assert (tier.counters.write_errors, tier.counters.dropped) == (2, 5 * LENGTH)
    assert caplog.text.count("WARNING") == 1 and str(rig.folder) in caplog.text
    assert sorted(os.listdir(rig.folder)) == sorted(["lock", rig.files()[0].name])
    assert fetch(tier, run(0)) == run(0) and tier.audit() == []
    rig.now = 2 * RETRY_S + 2
    store(tier, run(3))
    assert tier.writing and tier.warning is None and "again" in caplog.text
    assert fetch(rig.open(), run(0) + run(3)) == run(0) + run(3)


@pytest.mark.parametrize("step", ["fsync", "rename", "fsync of the folder"])
def test_a_write_that_fails_at_any_step_leaves_nothing(
    rig: Rig, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = rig.open()
    fsync, calls = os.fsync, []

    def fails(*given: object) -> None:
        calls.append(given)
        if step != "fsync of the folder" or len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(given[0])  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, step.split()[0], fails)
        store(tier, run(1))
    assert os.listdir(rig.folder) == ["lock"]
    assert not tier.writing and tier.pages == 0 and tier.bytes_kept == 0


def test_a_file_is_durable_before_it_has_its_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def watched(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def does(*given: object) -> object:
            assert ("rename" in said) == bool(rig.files()), "it has its name too early"
            said.append(name)
            return real(*given)

        return does

    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    store(rig.open(), run(1))
    steps = [name for at, name in enumerate(said) if not at or said[at - 1] != name]
    assert steps == ["write", "fsync", "rename", "fsync"]


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_no_end(
    rig: Rig, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(rig.open(), run(1))
    rig.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _raises(OSError(error, os.strerror(error))))
        tier = rig.open()
        assert not tier.writing and os.strerror(error) in (tier.warning or "")
        assert begin_store(tier, run(2)) is None and tier.counters.dropped == LENGTH
        tier.poll()
        tier.flush()
        rig.now += RETRY_S + 1
        assert begin_store(tier, run(2)) is None
    rig.now += RETRY_S + 1
    store(tier, run(2))
    assert tier.writing and tier.warning is None
    assert fetch(tier, run(1) + run(2)) == run(1) + run(2), "what was there counts"
    assert tier.bytes_kept == sum(path.stat().st_size for path in rig.files())


def test_a_folder_has_one_process(rig: Rig, tmp_path: Path) -> None:
    tier = rig.open()
    with pytest.raises(ConfigError, match="another process"):
        tier_in(rig.folder, 1)
    rig.close()
    tier_in(rig.folder, 1).close()
    assert tier.pages == 0


def test_a_folder_that_another_took_meanwhile_is_no_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _raises(OSError(errno.EACCES, "no")))
        tier = rig.open()
    other = tier_in(rig.folder, 1)
    rig.now = RETRY_S + 1
    assert begin_store(tier, run(1)) is None and "another process" in (tier.warning or "")
    other.close()
    rig.now = 2 * RETRY_S + 2
    store(tier, run(1))


def test_an_unfinished_file_that_stays_is_no_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    store(rig.open(), run(1))
    rig.close()
    left = rig.folder / "00.tmp"
    left.write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _raises(OSError(errno.EPERM, "no")))
        tier = rig.open()
        assert len(offers(tier, run(1))) == LENGTH
    rig.open()
    assert not left.exists()


def test_a_slow_disk_is_told_no_more(rig: Rig) -> None:
    rig.in_flight_max = 2 * LENGTH
    tier = rig.open()
    first, second = begin_store(tier, run(0)), begin_store(tier, run(1))
    assert first is not None and second is not None
    assert begin_store(tier, run(2)) is None and tier.counters.dropped == LENGTH
    assert begin_store(tier, run(0)) is None and tier.counters.dropped == LENGTH, "it is coming"
    tier.poll()
    assert tier.open == 2 and tier.writing and tier.warning is None
    finish(tier)
    store(tier, run(2))


def _raises(error: Exception) -> Callable[..., object]:
    def does(*_: object, **__: object) -> object:
        raise error

    return does


# ---- storms -------------------------------------------------------------------------------------


@dataclass
class Storm:
    """Random calls against a model that is a set of keys; jobs end when the choices say."""

    rig: Rig
    choices: Choices
    harm: bool = False
    free: list[int] = field(default_factory=list)
    stores: list[tuple[Storing, list[int]]] = field(default_factory=list)
    fetches: list[tuple[Fetching, list[Record], list[int], bool]] = field(default_factory=list)
    forgotten: set[bytes] = field(default_factory=set)
    fetched: int = 0

    def __post_init__(self) -> None:
        self.rig.page_bytes, self.rig.capacity = 256, 9 * 8192
        self.open()

    def open(self) -> None:
        self.rig.close()
        memory = np.zeros(self.rig.slots * self.rig.page_bytes, np.uint8)
        queues = LateQueue(self.choices), LateQueue(self.choices)
        self.queues = queues
        self.tier = DiskTier.open_in(
            self.rig.folder, self.rig.capacity, SCHEMA, memory, self.rig.page_bytes, queues, 40,
            lambda: self.rig.now,
        )  # fmt: skip
        self.rig.opened.append(self.tier)
        self.free = list(range(self.rig.slots))
        self.stores, self.fetches = [], []

    def step(self) -> None:
        pick = self.choices.pick
        match pick(40):
            case 0:
                self.tier.flush()
                assert self.tier.pages == 0
            case 1 | 2:
                one = self._some()[0]
                self.tier.forget([one.key])
                assert not offers(self.tier, [one])
                self.forgotten.add(one.key)
            case 3 if self.harm:
                self._harm()
            case 4 if not pick(4):
                self.open()
                assert not offers(self.tier, [r for n in range(6) for r in run(n)
                                              if r.key in self.forgotten])  # fmt: skip
            case number if number < 20:
                self._store()
            case _:
                self._fetch()
        for queue in self.queues:
            queue.turn()
        self._look()

    def _some(self) -> list[Record]:
        first = self.choices.pick(LENGTH)
        return run(self.choices.pick(6))[first : first + 1 + self.choices.pick(LENGTH)]

    def _slots(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _store(self) -> None:
        records = self._some()
        slots = self._slots(len(records))
        records = records[: len(slots)]
        for record, slot in zip(records, slots):
            put(self.tier, slot, record)
        storing = self.tier.store(records, np.array(slots, np.int32))
        if storing is None:
            self._give_back(slots)
        else:
            self.stores.append((storing, slots))
        coming = [not one for one in self.tier.lacking(keys(records))]
        self.forgotten -= {one.key for one, here in zip(records, coming) if here}

    def _fetch(self) -> None:
        records = self._some()
        count = self.tier.found(keys(records), marks(records))
        slots = self._slots(count)
        records = records[: len(slots)]
        fetching = self.tier.fetch(keys(records), np.array(slots, np.int32))
        cancelled = not self.choices.pick(10)
        if cancelled:
            fetching.cancel()
        self.fetches.append((fetching, records, slots, cancelled))

    def _harm(self) -> None:
        paths = self.rig.files()
        if not paths:
            return
        path = paths[self.choices.pick(len(paths))]
        whole = bytearray(path.read_bytes())
        at = self.choices.pick(len(whole))
        whole[at] ^= 1 + self.choices.pick(255)
        path.write_bytes(whole[: at if not self.choices.pick(3) else None])

    def _look(self) -> None:
        self.tier.poll()
        for storing, slots in [one for one in self.stores if one[0].ended]:
            self.stores.remove((storing, slots))
            self._give_back(slots)
        for one in [one for one in self.fetches if one[0].ended]:
            self.fetches.remove(one)
            fetching, records, slots, cancelled = one
            good = came(self.tier, fetching, records, slots)
            assert self.harm or cancelled or good == records
            self.fetched += len(good)
            self._give_back(slots)
        assert self.tier.bytes_kept <= self.rig.capacity
        assert sum(path.stat().st_size for path in self.rig.files()) <= self.rig.capacity

    def _give_back(self, slots: list[int]) -> None:
        for slot in slots:
            self.tier.memory[slot * 256 : (slot + 1) * 256] = 170
        self.free += slots

    def end(self) -> None:
        while self.tier.open or self.queues[1].jobs:
            finish(self.tier)
            self._look()
        assert self.tier.audit() == []
        assert len(self.free) == self.rig.slots
        assert self.harm or self.tier.counters.misses == 0
        size = sum(path.stat().st_size for path in self.rig.files())
        assert self.harm or self.tier.bytes_kept == size


@pytest.mark.parametrize("harm", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_storm(rig: Rig, seed: int, harm: bool) -> None:
    storm = Storm(rig, seeded(seed), harm)
    for _ in range(400):
        storm.step()
    storm.end()
    assert storm.fetched > 100


def test_a_storm_with_threads(rig: Rig) -> None:
    choices = seeded(3)
    tier = tier_in(rig.folder, 4 * LENGTH)
    assert isinstance(tier.reads, ThreadQueue)
    rig.opened.append(tier)
    for _ in range(150):
        records, others = run(choices.pick(CHAINS)), run(choices.pick(CHAINS))
        storing = begin_store(tier, records[choices.pick(LENGTH) :])
        held = offers(tier, others)
        fetching = tier.fetch(keys(held), FIRST[: len(held)] + LENGTH)
        ends = time.monotonic() + 20
        while (storing is not None and not storing.ended) or not fetching.ended:
            tier.poll()
            assert time.monotonic() < ends, "a job was lost"
        assert came(tier, fetching, held, range(LENGTH, LENGTH + len(held))) == held
    assert tier.counters.fetched_pages > 100 and tier.counters.misses == 0
    assert tier.open == 0 and tier.audit() == []


# ---- the end of a process at any moment ---------------------------------------------------------


def wrong_hits(folder: Path) -> list[str]:
    """Reopen, and fetch all that the index offers."""
    tier = tier_in(folder, LENGTH, (LateQueue(), LateQueue()))
    said = []
    for number in range(CHAINS):
        held = offers(tier, run(number))
        fetching = tier.fetch(keys(held), FIRST[: len(held)])
        finish(tier)
        for slot, (record, got) in enumerate(zip(held, fetching.records, strict=True)):
            page = tier.memory[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]
            if got is None:
                said.append("a page is offered, and is not there")
            elif got != record or not np.array_equal(page, content(record.key)):
                said.append("a page is not what was stored")
    said += tier.audit()
    tier.close()
    return said


def kill_one(folder: Path, seed: int) -> None:
    command = [sys.executable, diskwriter.__file__, str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"begins\n"
            time.sleep(random.Random(seed).random() * 0.15)
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_kill_leaves_no_wrong_hit(tmp_path: Path) -> None:
    _kills(tmp_path, 20)


@pytest.mark.soak
def test_two_hundred_kills_leave_no_wrong_hit(tmp_path: Path) -> None:
    _kills(tmp_path, 200)


def _kills(folder: Path, count: int) -> None:
    unfinished = files = 0
    for seed in range(count):
        kill_one(folder, seed)
        unfinished += len(list(folder.glob("*.tmp")))
        files += len(list(folder.glob("*.kv")))
        assert wrong_hits(folder) == [], f"kill {seed}"
        assert not list(folder.glob("*.tmp"))
    print(f"{count} kills, {unfinished} unfinished files, {files} whole ones")
    assert files and (unfinished or count < 100), "no kill met a write"


class Killed(BaseException):
    """A process's end, as far as its files are concerned: nothing is cleaned up."""


def interrupted(folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Store, with the process's end halfway through the `at`-th write. Was there one?"""
    write, calls = os.write, [0]

    def dies(file: int, view: memoryview) -> int:
        calls[0] += 1
        if calls[0] > at:
            write(file, view[: len(view) // 2])
            raise Killed
        return write(file, view)

    tier = tier_in(folder, LENGTH, (LateQueue(), LateQueue()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", dies)
        begin_store(tier, run(0)[:3])
        try:
            finish(tier)
        except Killed:
            return True
        finally:
            tier.close()
    return False


def test_a_write_that_is_cut_off_anywhere_is_no_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0
    while interrupted(tmp_path / str(at), at, monkeypatch):
        assert wrong_hits(tmp_path / str(at)) == []
        at += 1
    assert at == 4, "a header and three pages"
    assert wrong_hits(tmp_path / str(at)) == []


def write_in_place(
    folder: Path, schema: str, pages: Sequence[tuple[Record, diskfile.Bytes]]
) -> Object:
    """The old way: a file of its name from the first byte on."""
    record, payload = pages[-1]
    path = diskfile.path_of(folder, record.key)
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(payload), 1000):
            os.write(file.fileno(), payload[begin : begin + 1000].data)
    return named(path, record, schema, len(payload))


def named(path: Path, record: Record, schema: str, page_bytes: int) -> Object:
    head = PageHead(record.key, record.root, record.tokens, record.digests, bytes(8))
    return Object(path, Header(schema, page_bytes, [head]), 0, page_bytes)


def scan_names(folder: Path, schema: str, page_bytes: int) -> list[tuple[Path, Object]]:
    """The old way: what has the name is the page."""
    known = {one.key.hex(): one for number in range(CHAINS) for one in run(number)}
    return [
        (path, named(path, known[path.stem], schema, page_bytes)) for path in folder.glob("*.kv")
    ]


def read_unchecked(file: int, object: Object, place: int, into: diskfile.Bytes) -> None:
    os.preadv(file, [into.data], object.offset)


def test_the_old_way_to_write_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskfile, "write", write_in_place)
    monkeypatch.setattr(diskfile, "scan", scan_names)
    monkeypatch.setattr(diskfile, "read_page", read_unchecked)
    wrong = {}
    for at in range(4):
        died = interrupted(tmp_path / str(at), at, monkeypatch)
        wrong[at] = wrong_hits(tmp_path / str(at))
        assert died == (at < 3)
    assert all(wrong[at] == ["a page is not what was stored"] for at in range(3))
    assert wrong[3] == []
