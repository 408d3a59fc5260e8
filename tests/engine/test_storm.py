"""Storms on the hash model: whatever happens to others, each request gets its oracle's answer."""

import pytest

from stanchion.core.errors import Bug
from stanchion.engine.bounds import FAILPOINTS
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.sim.choices import seeded
from tests.engine.rig import Storm, hashed_engine, late, storm, wrong

STATES = {"waiting", "preempted", "prefill", "prefill in flight", "decode in flight"}


def one_storm(
    seed: int,
    requests: int,
    failpoints: tuple[str, ...] = (),
    calm: bool = False,
) -> tuple[Storm, Engine]:
    """The seed decides drafts, chunks, top-k, page size and pool; raise with it on any fault.

    With an odd seed each flight's work is done only when it is waited for: who leaves while it is
    out leaves before it begins. A calm storm has a large pool, pages of one token and no aborts, so
    that more turns go on to the next.
    """
    choices = seeded(seed)
    drafts, chunk = choices.pick(6), (1, 3, 17, 1 + choices.pick(64))[choices.pick(4)]
    top_k = None if choices.pick(2) else 48
    page_tokens = (1, 4, 16)[choices.pick(3)]
    pages = (16 + choices.pick(30)) * 16 // page_tokens
    if calm:
        page_tokens, pages = 1, 8192
    limits = Limits(
        chunk_tokens=chunk,
        running_max=1 + choices.pick(24),
        draft_tokens=drafts,
    )
    engine = hashed_engine(limits, pages, page_tokens, top_k, failpoints)
    if seed % 2:
        late(engine)
    result = storm(engine, choices, requests, abort_one_in=10**9 if calm else 5)
    assert wrong(result, drafts, top_k) == [], f"replay with seed {seed}"
    assert engine.audit() == [], f"replay with seed {seed}"
    return result, engine


def test_a_thousand_requests_equal_their_oracles() -> None:
    aborted: dict[str, int] = {}
    preempted = cached = 0
    for seed in range(100, 120):
        result, engine = one_storm(seed, 50)
        preempted += engine.counters.preempted
        cached += engine.counters.cached_tokens
        for state, count in result.aborted_in.items():
            aborted[state] = aborted.get(state, 0) + count
    print(f"aborted in {aborted}, {preempted} preempted, {cached} tokens from the prefix tree")
    assert set(aborted) == STATES
    assert preempted and cached


@pytest.mark.parametrize("failpoint", sorted(FAILPOINTS))
def test_a_broken_rule_is_caught(failpoint: str) -> None:
    caught = 0
    for seed in range(100, 140):
        try:
            one_storm(seed, 50, (failpoint,), calm=failpoint == "watermark_not_lowered")
        except (AssertionError, Bug) as error:
            print(f"{failpoint}, seed {seed}: {error}")
            caught += 1
            break
    assert caught


def test_a_calm_storm_is_right_too() -> None:
    for seed in range(100, 103):
        one_storm(seed, 50, calm=True)


def test_one_seed(request: pytest.FixtureRequest) -> None:
    one_storm(request.config.getoption("--seed"), 100)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_equal_their_oracles() -> None:
    for seed in range(1000, 1020):
        one_storm(seed, 500)
