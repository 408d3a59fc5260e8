"""What an attack on the tiers found, and would find again."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stanchion.cli.main import main
from stanchion.cli.tiers import tier_plan
from stanchion.cli.worker import warm
from stanchion.core.config import Config
from stanchion.core.errors import ConfigError
from stanchion.core.messages import Abort, Partner
from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Guarded, Queue, Stream
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.hosttier import HostTier
from stanchion.kv.pages import PagePool
from stanchion.kv.record import Record
from stanchion.model.hashed import HashModel
from tests.tiers.rig import asks, cached, close, prompt, run_all, still_engine, tiers_of

DISK = 1 << 24


def plan(folder: Path, slots: int = 40) -> TierPlan:
    return TierPlan(slots, (folder, DISK), prefetch="wait")


def test_what_warms_a_worker_leaves_the_disk_alone(tmp_path: Path) -> None:
    """Its flush reached the disk: no restart ever found what the life before had stored."""
    shared = prompt(1, 200)
    engine, still = still_engine(plan(tmp_path))
    run_all(engine, still, [asks("first", shared)])
    close(engine)
    engine, still = still_engine(plan(tmp_path))
    tiers = tiers_of(engine)
    warm(engine)
    still.turn()
    progress = tiers.progress()
    assert progress.disk_pages == 13 and not progress.spilled and not progress.host_kept
    assert cached(run_all(engine, still, [asks("again", [*shared, 40])])["again"]) == 192
    assert engine.audit() == []
    close(engine)


def test_a_load_needs_no_flight_to_begin() -> None:
    """A prefix was lifted for a request that waits for a peer; nothing else runs. If it leaves, its
    pages must come back, or whoever needs them waits for ever."""
    engine, still = still_engine(TierPlan(100), device=20)
    shared = prompt(1, 12 * 16)
    run_all(engine, still, [asks("first", [*shared, 40], 1)])
    engine.tree.flush()
    partner = Partner(name="prefill", incarnation=1, address="nowhere")
    engine.step(
        [msgspec.structs.replace(asks("leaves", shared + prompt(3, 40), 1), prefill=partner)]
    )
    assert engine.running["leaves"].phase == "receive"
    engine.step([Abort("leaves", "client")])
    still.turn()
    for _ in range(10):
        engine.step([])
    assert not engine.busy
    assert run_all(engine, still, [asks("next", prompt(9, 200), 2)])["next"].ends
    assert engine.audit() == []
    close(engine)


def test_a_fetch_for_which_there_is_no_room_holds_nothing(tmp_path: Path) -> None:
    engine, still = still_engine(plan(tmp_path))
    tiers = tiers_of(engine)
    shared = prompt(1, 8 * 16)
    run_all(engine, still, [asks("first", [*shared, 40], 1)])
    engine.tree.flush()
    tiers.host._drop(list(tiers.host._kept.values())[-1])
    others = tiers.host.pool.take(tiers.host.pool.available, "somebody else")
    run_all(engine, still, [asks("again", [*shared, 41], 1)])
    others.drop()
    assert engine.audit() == []
    assert tiers.host.pool.kept_alone == tiers.host.pages, "all of it can be evicted again"
    close(engine)


def test_pages_in_quarantine_do_not_count_as_evictable() -> None:
    pool = PagePool(4)
    own = pool.take(2, "request")
    kept = pool.keep(own.pages, "prefix")
    own.drop()
    assert pool.kept_alone == 2
    pool.quarantine(kept.pages[:1], "differs")
    assert pool.kept_alone == 1
    kept.drop()
    assert pool.kept_alone == 0 and pool.available == 2 and pool.audit() == []


def test_a_host_that_is_held_whole_is_not_searched() -> None:
    host = HostTier(3)
    slots = host.pool.take(3, "spill")
    for at, slot in enumerate(slots.pages.tolist()):
        host.keep(Record(bytes([at] * 32), b"", b"", b""), slot)
    slots.drop()
    before = list(host._kept)
    (held,) = host.hold(host.have(before), "spill")
    host.make_room(1)
    assert host.evicted == 0 and list(host._kept) == before
    held.drop()
    host.make_room(1)
    assert host.evicted == 1 and host.audit() == []
    assert np.array_equal(host.pool.counts(np.array([1, 2, 3], np.int32)), [0, 1, 1])


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def circle(path: Path) -> None:
    path.symlink_to(path)


def directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [dangling, circle, directory, os.mkfifo])
def test_what_is_no_file_does_not_stop_the_disk(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """A link to nothing switched the tier off for good; a pipe kept the worker from its start."""
    make(tmp_path / "what.kv")
    engine, still = still_engine(plan(tmp_path))
    run_all(engine, still, [asks("first", prompt(1, 200))])
    progress = tiers_of(engine).progress()
    assert progress.disk_pages and progress.disk_writing and not progress.disk_warning
    close(engine)


@pytest.mark.parametrize("name", ["/tmp/elsewhere", "a/b", "../up", "..", "."])
def test_a_name_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    kv = replace(Config().kv, host_cache_gib=0.01, disk_cache=f"{tmp_path}:1")
    config = replace(Config(), kv=kv)
    schema = HashModel(16, True, None).schema
    with pytest.raises(ConfigError, match="names a folder"):
        tier_plan(config, name, schema, schema.page_bytes)
    made = tier_plan(config, "both-0", schema, schema.page_bytes)
    assert made is not None and made.disk == (tmp_path / "both-0", 1 << 30)


def test_a_worker_without_a_name_of_its_own_gets_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name was its pid's: each life left a folder behind that none would ever find."""
    said = ["worker", "hashed", "--role", "both", "--join", "ipc:///nowhere"]
    sets = ["--set", "kv.host_cache_gib=0.01", "--set", f"kv.disk_cache={tmp_path}:1"]
    assert main([*said, *sets]) == 2
    assert "wants --name" in capsys.readouterr().err


def test_nobody_else_reads_the_folder(tmp_path: Path) -> None:
    """Its files hold tokens of prompts."""
    engine, _ = still_engine(plan(tmp_path / "new"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    close(engine)


@dataclass
class AnyOrder:
    """A queue whose work ends in any order, as writes to a peer do."""

    begun: int = 0
    ended: dict[int, None] = field(default_factory=dict)

    def mark(self) -> int:
        return self.begun

    def wait(self, other: Queue, mark: int) -> None:
        other.finish(mark)

    def passed(self, mark: int) -> bool:
        return mark in self.ended

    def finish(self, mark: int) -> None:
        self.ended[mark] = None


def test_who_waited_for_the_later_waits_for_the_earlier_too() -> None:
    """A door took it for granted, and let a writer in where a page was still being sent."""
    queue, page = AnyOrder(), np.array([1], np.int32)
    send, compute = Stream("send", queue), Stream("compute", InlineQueue())
    earlier, later = Guarded("earlier", 0), Guarded("later", 0)
    for mark, value in enumerate((earlier, later), 1):
        with send.reading(value, page):
            queue.begun = mark
    with compute.writing(later, page):
        assert queue.passed(2)
    with compute.writing(earlier, page):
        assert queue.passed(1)
