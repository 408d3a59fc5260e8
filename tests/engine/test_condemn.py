"""What a wrong answer read is given up, on every tier, and nobody who held it says what it made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stanchion.core.messages import Quarantine, Start
from stanchion.core.request import AHEAD, Sampling
from stanchion.engine import condemn as module
from stanchion.engine.condemn import condemn, flush
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits

from .rig import Heard, finish, hashed_engine, solo

PAGE = 16
PROMPT = [33 + at % 90 for at in range(8 * PAGE)]


def asks(name: str, tokens: list[int], output: int = 4, tenant: str = "a", **more: int) -> Start:
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    return Start(request=name, tokens=tokens, sampling=sampling, tenant=tenant, **more)


def order(tokens: list[int], tenant: str = "a") -> Quarantine:
    return Quarantine(tokens=tokens, tenant=tenant)


def cached(heard: Heard) -> int:
    return heard.ends[0].cached_tokens


def test_a_condemned_prefix_is_not_found_again_nor_what_hangs_on_it() -> None:
    engine = hashed_engine()
    finish(engine, [asks("a", PROMPT)])
    finish(engine, [asks("longer", [*PROMPT, *PROMPT[: 2 * PAGE]])])
    finish(engine, [asks("other", PROMPT, tenant="b")])
    held = engine.tree.pages
    dropped = condemn(engine, order(PROMPT[: 4 * PAGE]))
    assert dropped == 10 and engine.tree.pages == held - dropped, "other tenants keep theirs"
    assert (engine.counters.quarantines, engine.counters.pages_dropped) == (1, dropped)
    assert engine.pool.quarantined == 4, "those that were named, and no others"
    again = finish(engine, [asks("again", PROMPT)])["again"]
    assert cached(again) == 0
    assert cached(finish(engine, [asks("b", PROMPT, tenant="b")])["b"]) > 0
    assert again.tokens == solo(asks("again", PROMPT), 3).tokens
    assert engine.audit() == []


def test_quarantine_takes_no_more_than_its_share_of_the_pool() -> None:
    engine = hashed_engine(pages=65)
    for at in range(20):
        tokens = [*PROMPT[: 4 * PAGE], *([40 + at] * PAGE)]
        finish(engine, [asks(f"{at}", tokens)])
        assert condemn(engine, order(tokens)) == 5
    assert engine.pool.quarantined == int(module.QUARANTINE_SHARE * 65)
    assert engine.audit() == []


def at_every_step(act: Callable[[Engine], None]) -> None:
    """Two requests share a prefix; it is condemned at each step of theirs, one after the other."""
    starts = [asks("x", [*PROMPT, 40], 12), asks("y", [*PROMPT, 41], 12)]
    right = {one.request: solo(one, 3).tokens for one in starts}
    for step in range(40):
        engine = hashed_engine(Limits(chunk_tokens=48))
        finish(engine, [asks("before", PROMPT)])
        heard = {one.request: Heard() for one in starts}
        said, steps = engine.step(starts), 0
        while said or engine.busy:
            for message in said:
                heard[message.request].take(message)
            if steps == step:
                act(engine)
            said, steps = engine.step([]) if engine.busy else [], steps + 1
        assert {name: one.tokens for name, one in heard.items()} == right, step
        assert engine.audit() == []
        if steps < step:
            return
    raise AssertionError("it never ended")


def test_whoever_holds_it_begins_again_at_any_moment_and_says_the_same() -> None:
    def act(engine: Engine) -> None:
        held = [one.pages[0] for one in engine.running.values() if len(one.pages)]
        condemn(engine, order(PROMPT))
        assert set(held) <= {page for pages in engine.condemned for page in pages} or not held

    at_every_step(act)


def test_a_worker_that_lets_them_go_on_is_seen() -> None:
    """The wrong variant: who holds the pages keeps them, and goes on from what they hold."""
    engine = hashed_engine(Limits(chunk_tokens=48))
    finish(engine, [asks("before", PROMPT)])
    engine.step([asks("x", [*PROMPT, 40], 12)])
    held = set(engine.running["x"].pages[:8].tolist())
    condemn(engine, order(PROMPT))
    wrong = engine.condemned.copy()
    engine.condemned.clear()
    engine.step([])
    assert held & set(engine.running["x"].pages.tolist()), "it went on with them"
    engine.condemned += wrong
    engine.step([])
    assert not held & set(engine.running["x"].pages.tolist()), "it begins again without them"


def test_flush_gives_back_what_is_kept_for_reuse_alone() -> None:
    engine = hashed_engine()
    finish(engine, [asks("a", PROMPT)])
    assert engine.tree.pages and flush(engine) > 0 and engine.tree.pages == 0
    assert cached(finish(engine, [asks("again", PROMPT)])["again"]) == 0
    assert engine.audit() == []


# ---- priorities -----------------------------------------------------------------------------


def order_of_ends(starts: list[Start]) -> list[str]:
    """One at a time runs; all have arrived before the second begins."""
    engine = hashed_engine(Limits(running_max=1))
    ended, said = [], engine.step(starts)
    while said or engine.busy:
        ended += [one.request for one in said if hasattr(one, "outcome")]
        said = engine.step([]) if engine.busy else []
    return ended


def test_the_more_urgent_are_earlier_and_equals_in_order_of_arrival() -> None:
    prompt = PROMPT[:8]
    ranks = {"late": 5, "usual 1": 0, "urgent": -5, "usual 2": 0}
    starts = [asks(name, prompt, 1, priority=rank) for name, rank in ranks.items()]
    assert order_of_ends(starts) == ["urgent", "usual 1", "usual 2", "late"]


@pytest.mark.parametrize("step", [1, 3])
def test_nobody_is_overtaken_by_more_than_the_bound(step: int) -> None:
    prompt = PROMPT[:8]
    starts = [asks("patient", prompt, 1, priority=step)]
    starts += [asks(f"{at}", prompt, 1) for at in range(3 * AHEAD + step * AHEAD)]
    ended = order_of_ends(starts)
    assert ended.index("patient") == step * AHEAD - 1
