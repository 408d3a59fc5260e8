"""Faults of tiers that others have reported (D08 to D10, D12 to D15, D35), on each tier: what is
right passes, and the old wrong way, brought back, is caught by the same check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stanchion.core.acceptance import accept_length
from stanchion.core.identity import CacheIdentity, chain
from stanchion.core.messages import Start
from stanchion.core.outcome import Completed
from stanchion.engine import bounds
from stanchion.engine.bounds import accepted
from stanchion.engine.loop import Engine
from stanchion.engine.request import Request
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.disk import DiskTier
from stanchion.kv.hosttier import HostTier, Kept
from stanchion.kv.record import Prompt
from stanchion.model.hashed import HashModel
from stanchion.model.text import Cache, Ragged
from stanchion.sim.choices import seeded
from tests.engine.rig import Heard, hashed_engine, solo
from tests.tiers.rig import (
    PAGE,
    Clients,
    Oracle,
    Queues,
    Sizes,
    Still,
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

TIERS = ("host", "disk")
TOP_K = 48


@contextmanager
def engine_of(
    tier: str, folder: Path, plan: TierPlan | None = None, top_k: int | None = None, drafts: int = 3
) -> Iterator[tuple[Engine, Still]]:
    """What leaves the device is in the host; with `disk`, what leaves it too is on disk."""
    plan = plan or TierPlan(slots=0)
    if tier == "disk":
        plan = replace(plan, slots=100, disk=(folder, 1 << 24), prefetch="wait")
    else:
        plan = replace(plan, slots=4000)
    engine, still = still_engine(plan, top_k=top_k, drafts=drafts)
    yield engine, still
    assert engine.audit() == []
    close(engine)


def away(engine: Engine, still: Still, tier: str, first: int = 10_000) -> None:
    push_out(engine, still, 6 if tier == "disk" else 3, first=first)


def came_from(engine: Engine, tier: str) -> int:
    counts = tiers_of(engine).counters
    return counts.fetched if tier == "disk" else counts.lifted


# ---- D08: a page is several buffers ----------------------------------------------------------


def restored_is_right(tier: str, folder: Path, plan: TierPlan, context: int) -> bool:
    with engine_of(tier, folder, plan, TOP_K) as (engine, still):
        shared = prompt(1, context)
        run_all(engine, still, [asks("first", shared)])
        away(engine, still, tier)  # freed pages are poisoned
        again = asks("again", shared + prompt(2, 9), 30)
        heard = run_all(engine, still, [again])["again"]
        assert came_from(engine, tier)
        return heard.answer == solo(again, 3, TOP_K).answer


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("context", [33, 160], ids=["below top-k", "above top-k"])
def test_every_buffer_comes_back(tier: str, context: int, tmp_path: Path) -> None:
    assert restored_is_right(tier, tmp_path / "right", TierPlan(0), context)
    wrong = TierPlan(0, failpoints=frozenset({"restore_without_index"}))
    assert not restored_is_right(tier, tmp_path / "wrong", wrong, context)


# ---- D09, D14, D15: the state of drafts ------------------------------------------------------


def two_passes(tier: str, folder: Path, plan: TierPlan) -> tuple[list[Heard], list[Heard]]:
    """24 requests, 12 long others, the same 24."""
    with engine_of(tier, folder, plan) as (engine, still):
        every = [asks(f"{at}", prompt(at, 80 + at), 24) for at in range(24)]
        first = [run_all(engine, still, [one])[one.request] for one in every]
        push_out(engine, still, 12, 500, first=10_000)
        second = [run_all(engine, still, [one])[one.request] for one in every]
        assert came_from(engine, tier) > 24
        return first, second


@pytest.mark.parametrize("tier", TIERS)
def test_drafts_do_not_change_after_a_restore(tier: str, tmp_path: Path) -> None:
    first, second = two_passes(tier, tmp_path / "right", TierPlan(0))
    assert [one.tokens for one in second] == [one.tokens for one in first]
    assert [one.ends[0].draft_record for one in second] == [
        one.ends[0].draft_record for one in first
    ]
    wrong = TierPlan(0, failpoints=frozenset({"restore_without_draft"}))
    first, second = two_passes(tier, tmp_path / "wrong", wrong)
    assert [one.tokens for one in second] == [one.tokens for one in first], "it stays invisible"
    assert [one.ends[0].draft_record for one in second] != [
        one.ends[0].draft_record for one in first
    ]


def conversation(tier: str, folder: Path, plan: TierPlan, drafts: int, turns: int) -> list[Heard]:
    """An agent's: each turn is all before it, the answer, and a tool's result. Others run between,
    so that each turn finds its past in another tier."""
    with engine_of(tier, folder, plan, drafts=drafts) as (engine, still):
        said: list[Heard] = []
        tokens = prompt(7, 60)
        for turn in range(turns):
            (heard,) = run_all(engine, still, [asks(f"turn {turn}", tokens, 10)]).values()
            said.append(heard)
            tokens = [*tokens, *heard.tokens, *prompt(100 + turn, 6)]
            away(engine, still, tier, first=20_000 + 100 * turn)
        assert came_from(engine, tier) > turns
        return said


@pytest.mark.parametrize("tier", TIERS)
def test_thirty_turns_are_the_same_with_and_without_drafts(tier: str, tmp_path: Path) -> None:
    plain = TierPlan(0)
    fast = conversation(tier, tmp_path / "fast", plain, 3, 30)
    slow = conversation(tier, tmp_path / "slow", plain, 0, 30)
    assert [one.tokens for one in fast] == [one.tokens for one in slow]
    cold = [solo(start, 3).answer for start in _turns(fast)]
    assert [one.answer for one in fast] == cold, "nor has any turn's acceptance drifted"
    wrong = TierPlan(0, failpoints=frozenset({"restore_without_draft"}))
    drifted = conversation(tier, tmp_path / "wrong", wrong, 3, 30)
    assert [one.answer for one in drifted] != cold


def _turns(said: list[Heard]) -> Iterator[Start]:
    tokens = prompt(7, 60)
    for turn, heard in enumerate(said):
        yield asks(f"turn {turn}", tokens, 10)
        tokens = [*tokens, *heard.tokens, *prompt(100 + turn, 6)]


class Breaks(HashModel):
    """The old fault: after any row beyond `limit`, drafts are made from nothing, for everybody."""

    limit = 1 << 62
    broken = False

    def draft(self, batch: Ragged, hidden: Any, cache: Cache) -> Any:
        self.broken = self.broken or bool((batch.positions >= self.limit).any())
        return super().draft(batch, hidden * 0 if self.broken else hidden, cache)


def short_ones_after_a_long_one(tier: str, folder: Path, limit: int, length: int) -> bool:
    """Is the acceptance of short requests what it was, after a long one went to a tier and back?"""
    with engine_of(tier, folder) as (engine, still):
        model = Breaks(PAGE, True, None)
        model.limit = limit
        engine.launch.__self__.model = model  # type: ignore[attr-defined]
        long = asks("long", prompt(3, length - 4), 8)
        every = [asks(f"{at}", prompt(50 + at, 40), 16) for at in range(20)]
        before = run_all(engine, still, every)
        run_all(engine, still, [long])
        away(engine, still, tier)
        run_all(engine, still, [replace_name(long, "again")])
        after = run_all(engine, still, [replace_name(one, f"b{one.request}") for one in every])
        lengths = [
            [accept_length(one.ends[0].spec) for one in said.values() if one.ends[0].spec]
            for said in (before, after)
        ]
        assert lengths[0]
        return lengths[0] == lengths[1]


def replace_name(start: Start, name: str) -> Start:
    return asks(name, start.tokens, start.sampling.max_tokens)


@pytest.mark.parametrize("tier", TIERS)
def test_one_long_request_does_not_spoil_the_drafts_of_others(tier: str, tmp_path: Path) -> None:
    """D15 in small: the pool bounds a context, and every context up to it is the same code. The
    bounds 2**15 to 2**17 themselves are in test_lengths.py."""
    assert short_ones_after_a_long_one(tier, tmp_path / "right", 1 << 62, 600)
    assert not short_ones_after_a_long_one(tier, tmp_path / "wrong", 512, 600)


# ---- D10: sources of copies in flight --------------------------------------------------------


def heavy(seed: int, failpoints: frozenset[str], requests: int) -> list[str]:
    """8 clients, 20 prefixes, a host so small that each load evicts, copies that are late."""
    plan = TierPlan(0, policy="back", failpoints=failpoints)
    engine, queues = tiered(seed, plan, Sizes(device=60, host=12, chunk_tokens=24))
    run = drive(engine, Clients(prefixes=20, abort_one_in=10), seeded(seed), requests, queues)
    assert tiers_of(engine).host.evicted
    return Oracle(None).wrong(run) + engine.audit()


def test_a_page_that_is_being_loaded_is_not_evicted() -> None:
    wrong = frozenset({"evict_source_in_flight"})
    assert [heavy(seed, frozenset(), 60) for seed in range(10)] == [[]] * 10
    assert heavy(2, frozenset(), 200) == []
    assert heavy(2, wrong, 200)


def test_a_page_is_kept_once_its_bytes_are_there(tmp_path: Path) -> None:
    def wrong(failpoints: frozenset[str], folder: Path) -> list[str]:
        plan = TierPlan(0, disk=(folder, 1 << 18), prefetch="wait", failpoints=failpoints)
        engine, queues = tiered(3, plan, Sizes(device=40, host=24))
        run = drive(engine, Clients(prefixes=12), seeded(3), 100, queues)
        assert tiers_of(engine).counters.fetched
        return Oracle(None).wrong(run) + engine.audit()

    assert wrong(frozenset(), tmp_path / "right") == []
    assert wrong(frozenset({"publish_before_complete"}), tmp_path / "wrong")


# ---- D12: the key is the identity ------------------------------------------------------------


def collisions_are_right(tier: str, folder: Path) -> bool:
    """With keys of one byte, pages of different tokens have one key; prompts have one whole page,
    so that no chain of keys helps."""
    with engine_of(tier, folder) as (engine, still):
        engine.tree._link = lambda parent, page: chain(parent, page)[:1] * 32
        right = True
        for at in range(400):
            start = asks(f"{at}", prompt(at, PAGE + 3), 4)
            (heard,) = run_all(engine, still, [start]).values()
            right = right and heard.tokens == solo(start, 3).tokens
        assert tiers_of(engine).counters.spilled > 100
        return right


@pytest.mark.parametrize("tier", TIERS)
def test_a_collision_of_keys_is_a_miss(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert collisions_are_right(tier, tmp_path / "right")

    def by_key(self: HostTier, prompt: Prompt, first: int) -> list[Kept]:
        found = []
        for key in prompt.keys[first:]:
            if key not in self:
                break
            found += self.have([key])
        return found

    def by_key_too(self: DiskTier, keys: Any, marks: Any) -> int:
        held = [key in self._where for key in keys]
        return held.index(False) if False in held else len(held)

    monkeypatch.setattr(HostTier, "match", by_key)
    monkeypatch.setattr(DiskTier, "found", by_key_too)
    assert not collisions_are_right(tier, tmp_path / "wrong")


# ---- D13: isolation --------------------------------------------------------------------------


def hits_of_tenants(tier: str, folder: Path) -> tuple[int, int]:
    """Tokens that (another tenant, the same tenant again) found cached, of 8 pages."""
    with engine_of(tier, folder) as (engine, still):
        tokens = prompt(1, 8 * PAGE + 1)
        run_all(engine, still, [asks("one", tokens, tenant="T1")])
        if tier != "device":
            away(engine, still, tier)
        (other,) = run_all(engine, still, [asks("two", tokens, tenant="T2")]).values()
        if tier != "device":
            away(engine, still, tier, first=30_000)
        (again,) = run_all(engine, still, [asks("three", tokens, tenant="T1")]).values()
        return cached(other), cached(again)


@pytest.mark.parametrize("tier", ["device", *TIERS])
def test_no_tenant_finds_what_another_left(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hits_of_tenants(tier, tmp_path / "right") == (0, 8 * PAGE)

    def without_tenant(start: Start, served: bounds.Served, *more: Any) -> Request:
        request = accepted(start, served, *more)
        identity = CacheIdentity("", start.salt, served.model, served.revision, served.schema)
        request.root = identity.digest()
        return request

    monkeypatch.setattr("stanchion.engine.loop.accepted", without_tenant)
    assert hits_of_tenants(tier, tmp_path / "wrong")[0] == 8 * PAGE


@pytest.mark.parametrize("field", ["salt", "model", "revision", "schema"])
@pytest.mark.parametrize("tier", TIERS)
def test_no_other_part_of_the_identity_is_lost_on_the_way(
    tier: str, field: str, tmp_path: Path
) -> None:
    with engine_of(tier, tmp_path) as (engine, still):
        tokens = prompt(1, 8 * PAGE + 1)
        run_all(engine, still, [asks("one", tokens)])
        away(engine, still, tier)
        (again,) = run_all(engine, still, [asks("two", tokens)]).values()
        assert cached(again) == 8 * PAGE
        away(engine, still, tier, first=30_000)
        start = asks("three", tokens)
        if field == "salt":
            start = Start(request="three", tokens=tokens, sampling=start.sampling, salt="other")
        else:
            engine.served = replace(engine.served, **{field: "other"})
        (other,) = run_all(engine, still, [start]).values()
        assert cached(other) == 0


# ---- D35: nobody holds pages while waiting for more ------------------------------------------


class HoldsAndWaits(Engine):
    """The old way: a request whose prefix is in a tier takes the pages for it, and keeps them while
    it waits for the rest."""

    def _try_start(self, request: Request) -> Any:
        if not request.pins and not request.generated:
            known = request.tokens[: request.length]
            request.keys = self.tree.keys(request.root, known, [])
            tiers = tiers_of(self)
            prefix = Prompt(request.root, request.keys, lambda at: self.tree.page_bytes(known, at))
            found = tiers.find(prefix, 0)
            on_disk = tiers.disk.found(prefix.keys, prefix.marks(0)) if tiers.disk else 0
            count = max(len(found), on_disk)
            found.release()
            if count and self._free_up(count):
                request.pins = [self.pool.take(count, request.name)]
        return super()._try_start(request)


def both_finish(kind: type[Engine], tier: str, folder: Path) -> bool:
    """Two prefixes of 20 pages in a tier; two continuations of 30 pages; 48 pages in all."""
    with engine_of(tier, folder) as (engine, still):
        engine.__class__ = kind
        first, second = prompt(1, 20 * PAGE), prompt(2, 20 * PAGE)
        run_all(engine, still, [asks("a", first, 1)])
        run_all(engine, still, [asks("b", second, 1)])
        away(engine, still, tier)
        starts = [asks("c", first + prompt(3, 9 * PAGE)), asks("d", second + prompt(4, 9 * PAGE))]
        heard = {start.request: Heard() for start in starts}
        messages: list[Any] = list(starts)
        for _ in range(200):
            for message in engine.step(messages):
                heard[message.request].take(message)
            messages = []
            still.turn()
        ended = all(
            one.ends and isinstance(one.ends[0].outcome, Completed) for one in heard.values()
        )
        if not ended:  # give back what is held for ever, for the audit's sake
            for request in engine.waiting:
                for pin in request.pins:
                    pin.drop()
                request.pins = []
            engine.__class__ = Engine
            for _ in range(200):
                engine.step([])
                still.turn()
            return False
        for start in starts:
            assert heard[start.request].answer == solo(start, 3).answer
            assert len(heard[start.request].logprobs) == len(heard[start.request].tokens)
        return True


@pytest.mark.parametrize("tier", TIERS)
def test_two_loaded_prefixes_do_not_starve_each_other(tier: str, tmp_path: Path) -> None:
    assert both_finish(Engine, tier, tmp_path / "right")
    assert not both_finish(HoldsAndWaits, tier, tmp_path / "wrong")


# ---- what else a tier may do -----------------------------------------------------------------


def after_damage(tier: str, folder: Path, check: str) -> tuple[bool, Engine]:
    """A bit of a kept page flips in host memory, before it is loaded."""
    with engine_of("host", folder, TierPlan(0, check=check)) as (engine, still):  # type: ignore[arg-type]
        shared = prompt(1, 100)
        run_all(engine, still, [asks("first", shared)])
        away(engine, still, "host")
        host = tiers_of(engine)
        kept = [one for one in host.host._kept.values() if one.record.tokens == _page(shared, 2)]
        assert kept
        copier: Any = host.copier
        copier._host[kept[0].slot * copier.slots.page_bytes + 40] ^= 1
        again = asks("again", shared + prompt(2, 9), 20)
        heard = run_all(engine, still, [again])["again"]
        return heard.answer[:4] == solo(again, 3).answer[:4], engine


def _page(tokens: list[int], at: int) -> bytes:
    return np.array(tokens[at * PAGE : (at + 1) * PAGE], np.int32).tobytes()


def test_a_page_that_was_damaged_in_host_memory_is_found_out(tmp_path: Path) -> None:
    right, engine = after_damage("host", tmp_path, "full")
    tiers = tiers_of(engine)
    assert right, "its request computed the prefix again"
    assert tiers.counters.bad_host == 1
    assert tiers.host.pool.quarantined == 1 and engine.pool.quarantined == 1
    assert tiers.progress().bad_host == 1
    wrong, _ = after_damage("host", tmp_path, "off")
    assert not wrong


def test_flush_reaches_every_tier_and_waits_for_pins(tmp_path: Path) -> None:
    """Copies are under way on every stream when it comes: what they make is not hit either."""
    for seed in range(20):
        queues = Queues(seeded(seed))
        folder = tmp_path / str(seed)
        plan = TierPlan(200, disk=(folder, 1 << 24), prefetch="wait", queue=queues)
        engine = hashed_engine(pages=64, tiers=plan)
        tokens = prompt(1, 8 * PAGE + 1)
        assert _hit(engine, queues, tokens) == 0
        push_out(engine, queues, 3, first=10_000)
        assert _hit(engine, queues, tokens) == 8 * PAGE
        engine.step([asks("two", tokens + prompt(9, 200), 1)])
        tiers_of(engine).flush()
        while engine.busy:
            engine.step([])
            queues.turn()
        engine.tree.flush()
        tiers_of(engine).flush()  # what "two" has published since
        assert _hit(engine, queues, tokens) == 0, f"seed {seed}"
        assert engine.audit() == []
        close(engine)


def _hit(engine: Engine, queues: Queues, tokens: list[int]) -> int:
    (heard,) = run_all(engine, queues, [asks("who", tokens)]).values()
    return cached(heard)
