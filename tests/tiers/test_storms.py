"""Storms over tiers: every answer, and every draft, is what the request gets alone and cold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stanchion.device.cpu import ThreadQueue
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.schema import DOORS
from stanchion.sim.choices import Choices, seeded
from tests.engine.rig import hashed_engine
from tests.tiers.rig import PAGE, Clients, Oracle, Sizes, close, drive, tiered, tiers_of

POLICIES = ("through", "selective", "back")
CHECKS = ("off", "sampled", "full")
PREFETCH = ("wait", "best_effort", "timeout")


def drawn(choices: Choices, folder: Path) -> tuple[TierPlan, Sizes, int | None]:
    """Policies, checks, sizes, with a disk or without: all as the seed says. A host of 24 pages is
    less than what 8 clients read: so each load evicts."""
    disk = (folder, (1 + choices.pick(4)) << 17) if choices.pick(2) else None
    plan = TierPlan(
        0,
        disk,
        POLICIES[choices.pick(3)],  # type: ignore[arg-type]
        PREFETCH[choices.pick(3)],  # type: ignore[arg-type]
        CHECKS[choices.pick(3)],  # type: ignore[arg-type]
        clock=_ticks(),
    )
    sizes = Sizes(40 + choices.pick(60), 20 + choices.pick(40), (8, 24, 64)[choices.pick(3)])
    return plan, sizes, 48 if choices.pick(2) else None


def _ticks() -> Callable[[], float]:
    """A clock of its own: each look at it is a millisecond later."""
    seconds = [0.0]

    def clock() -> float:
        seconds[0] += 0.001
        return seconds[0]

    return clock


def one_storm(seed: int, requests: int, folder: Path) -> dict[str, int]:
    choices = seeded(seed)
    plan, sizes, top_k = drawn(choices, folder)
    engine, queues = tiered(seed, plan, sizes, top_k)
    clients = Clients(prefixes=30, abort_one_in=0 if choices.pick(2) else 12)
    run = drive(engine, clients, choices, requests, queues)
    assert Oracle(top_k).wrong(run) == [], f"replay with seed {seed}"
    assert engine.audit() == [], f"replay with seed {seed}"
    tiers = tiers_of(engine)
    for queue in queues.made.values():
        queue.finish(queue.mark())
    close(engine)
    counts = tiers.counters
    return {
        "requests": len(run.starts),
        "lifted": counts.lifted,
        "fetched": counts.fetched,
        "evicted": tiers.host.evicted,
        "bad": counts.bad_host,
    }


def many(seeds: range, requests: int, folder: Path) -> dict[str, int]:
    total: dict[str, int] = {}
    for seed in seeds:
        for name, count in one_storm(seed, requests, folder / str(seed)).items():
            total[name] = total.get(name, 0) + count
    return total


def test_late_copies_change_nothing(tmp_path: Path) -> None:
    total = many(range(200, 212), 60, tmp_path)
    print(total)
    assert total["lifted"] and total["fetched"] and total["evicted"] and not total["bad"]


def threads(seed: int, requests: int, folder: Path, failpoints: frozenset[str]) -> list[str]:
    """Real threads, and loads that are held back by up to a millisecond for each door."""
    choices = seeded(seed)
    delays = {(layer, door): choices.pick(10) / 10_000 for layer in range(4) for door in DOORS}
    plan = TierPlan(24, (folder, 1 << 18), check="sampled", delays_s=delays, failpoints=failpoints)
    limits = Limits(chunk_tokens=64, running_max=8)
    engine = hashed_engine(limits, 48, PAGE, tiers=replace(plan, queue=ThreadQueue))
    run = drive(engine, Clients(prefixes=30), choices, requests, None)
    wrong = Oracle(None).wrong(run) + engine.audit()
    assert tiers_of(engine).counters.lifted and tiers_of(engine).host.evicted
    close(engine)
    return wrong


def test_threads_that_really_race_change_nothing(tmp_path: Path) -> None:
    assert threads(1, 120, tmp_path / "right", frozenset()) == []


def test_threads_that_really_race_are_caught_without_the_doors(tmp_path: Path) -> None:
    assert threads(1, 120, tmp_path / "wrong", frozenset({"index_read_before_ready"}))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_thousand_requests_equal_their_oracles(tmp_path: Path) -> None:
    total = many(range(1000, 1080), 200, tmp_path)
    for seed in range(8):
        assert threads(seed, 500, tmp_path / f"threads {seed}", frozenset()) == []
    print(total, "and 4,000 on threads")
    assert total["requests"] == 16_000
