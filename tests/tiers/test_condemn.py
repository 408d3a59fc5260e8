"""A condemned prefix leaves every tier: host memory, the disk, and what is on its way there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stanchion.core.messages import Quarantine
from stanchion.engine.condemn import condemn, flush
from stanchion.engine.loop import Engine
from stanchion.engine.tierplan import TierPlan

from .rig import asks, cached, close, prompt, push_out, run_all, solo, still_engine, tiers_of

LONG = prompt(1, 256)


def in_tiers(disk: Path | None) -> tuple[Engine, object]:
    """A prefix of tenant a and one of tenant b, both of which only tiers have."""
    plan = TierPlan(200, None if disk is None else (disk, 1 << 30))
    engine, queues = still_engine(plan)
    for tenant in "ab":
        run_all(engine, queues, [asks(f"first {tenant}", LONG, 4, tenant)])
    push_out(engine, queues, 4)
    return engine, queues


def forgotten(act: Callable[[Engine], object], disk: Path | None) -> None:
    engine, queues = in_tiers(disk)
    tiers = tiers_of(engine)
    assert tiers.host.pages > 0
    lifted = tiers.counters.lifted
    act(engine)
    again = run_all(engine, queues, [asks("again", LONG, 4, "a")])["again"]
    assert cached(again) == 0, "it was found again"
    assert tiers.counters.lifted == lifted
    assert again.tokens == solo(asks("again", LONG, 4, "a"), 3).tokens
    assert engine.audit() == []
    close(engine)


def condemned(engine: Engine) -> object:
    return condemn(engine, Quarantine(tokens=LONG, tenant="a"))


@pytest.mark.parametrize("act", [condemned, flush])
def test_what_only_the_host_has_is_not_found_again(act: Callable[[Engine], object]) -> None:
    forgotten(act, None)


def test_what_the_disk_has_is_not_found_again(tmp_path: Path) -> None:
    forgotten(condemned, tmp_path)


def test_other_tenants_keep_what_they_have() -> None:
    engine, queues = in_tiers(None)
    condemned(engine)
    assert cached(run_all(engine, queues, [asks("b", LONG, 4, "b")])["b"]) > 0
    close(engine)


def test_a_prefix_that_stays_in_a_tier_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the device's tree alone forgets it."""
    monkeypatch.setattr("stanchion.kv.tiers.Tiers.forget_root", lambda self, root: None)
    with pytest.raises(AssertionError, match="found again"):
        forgotten(condemned, None)
