"""A disk that is full, read-only, slow or hung: answers are right, and it is said what is wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stanchion.core.messages import Abort
from stanchion.engine.tierplan import TierPlan
from stanchion.kv import diskfile
from stanchion.sim.choices import seeded
from tests.engine.rig import hashed_engine, solo
from tests.tiers.rig import (
    Clients,
    Oracle,
    Queues,
    Sizes,
    asks,
    cached,
    close,
    drive,
    prompt,
    push_out,
    run_all,
    still_engine,
    tiered,
    tiers_of,
)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_disk_that_refuses_costs_nothing_but_itself(
    code: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    plan = TierPlan(0, disk=(tmp_path, 1 << 24), prefetch="wait")
    engine, queues = tiered(5, plan, Sizes(device=40, host=48))

    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(diskfile.os, where, fails)
    run = drive(engine, Clients(prefixes=8), seeded(5), 60, queues)
    said = tiers_of(engine).progress()
    assert Oracle(None).wrong(run) == [] and engine.audit() == []
    assert said.disk_pages == 0 and said.disk_errors and said.disk_dropped
    assert not said.disk_writing and os.strerror(code) in said.disk_warning
    assert sum("no KV is stored" in one.message for one in caplog.records) == 1, "once, not always"
    assert said.lifted, "the host goes on"
    assert list(tmp_path.glob("*.kv")) == [] and list(tmp_path.glob("*.tmp")) == []
    close(engine)


def test_a_folder_that_cannot_be_made_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    engine, still = still_engine(TierPlan(100, (tmp_path / "file" / "kv", 1 << 24)))
    start = asks("one", prompt(1, 100))
    assert run_all(engine, still, [start])["one"].answer == solo(start, 3).answer
    assert not tiers_of(engine).progress().disk_writing
    assert tiers_of(engine).progress().disk_warning
    close(engine)


def test_a_hung_disk_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    """Reads that never end: with `timeout` the prompt is computed once its time is up; the slots
    that the reads may still write to stay pinned."""
    now = [0.0]
    queues = Queues(seeded(1))
    plan = TierPlan(
        100, (tmp_path, 1 << 24), prefetch="timeout", queue=queues, clock=lambda: now[0]
    )
    engine = hashed_engine(pages=64, tiers=plan)
    shared = prompt(1, 320)
    run_all(engine, queues, [asks("first", shared)])
    push_out(engine, queues, 8, 500, first=10_000)
    queues.made["disk read"].choices = None  # it does nothing from here on
    again = asks("again", shared + prompt(2, 9))
    engine.step([again])
    for _ in range(50):
        engine.step([])
        queues.turn()
    assert not engine.running and engine.waiting, "it waits"
    now[0] = 2.2
    said = [one for _ in range(50) for one in engine.step([])]
    tokens = [token for one in said for token in getattr(one, "tokens", [])]
    assert tokens == solo(again, 3).tokens
    tiers = tiers_of(engine)
    assert tiers.counters.timeouts == 1 and tiers.open
    assert any("copies are open" in one for one in engine.audit())
    reads = queues.made["disk read"]
    reads.finish(reads.mark())
    while engine.busy:
        engine.step([])
        queues.turn()
    assert engine.audit() == []
    close(engine)


def test_what_nobody_waits_for_is_not_read(tmp_path: Path) -> None:
    """A client that leaves while the disk is asked: its pages are given back once reads have ended,
    and what was read is kept for the next."""
    queues = Queues(seeded(2))
    engine = hashed_engine(
        pages=64, tiers=TierPlan(100, (tmp_path, 1 << 24), prefetch="wait", queue=queues)
    )
    shared = prompt(1, 320)
    run_all(engine, queues, [asks("first", shared)])
    push_out(engine, queues, 8, 500, first=10_000)
    engine.step([asks("again", shared + prompt(2, 9))])
    assert engine.waiting
    (ended,) = engine.step([Abort("again", "client")])
    assert type(ended.outcome).__name__ == "Cancelled"  # type: ignore[union-attr]
    while engine.busy:
        engine.step([])
        queues.turn()
    assert engine.audit() == []
    (third,) = run_all(engine, queues, [asks("third", shared + prompt(2, 9))]).values()
    assert cached(third) == 320
    close(engine)
