"""Bounds on waiting: nobody starves, nobody holds pages while waiting for more (D34, D35)."""

from __future__ import annotations

from stanchion.core.messages import Ended, Start, Tokens
from stanchion.core.outcome import Completed, Overloaded, Rejected
from stanchion.core.request import Sampling
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from tests.engine.rig import finish, hashed_engine, solo


def start(name: str, prompt: int, output: int, first: int = 33) -> Start:
    tokens = [first + at % 60 for at in range(prompt)]
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    return Start(request=name, tokens=tokens, sampling=sampling)


def steps_until(engine: Engine, name: str, limit: int) -> int:
    """Steps until the request's first token."""
    for step in range(limit):
        if any(isinstance(said, Tokens) and said.request == name for said in engine.step([])):
            return step
    raise AssertionError(f"{name} said nothing in {limit} steps")


def test_decoding_streams_get_a_token_in_every_step_under_endless_prefill() -> None:
    """64 streams against a steady supply of 6k prompts: one verify step a flight, always."""
    limits = Limits(chunk_tokens=256, running_max=80, draft_tokens=0)
    engine = hashed_engine(limits, pages=8192)
    engine.step([start(f"stream {at}", 8, 400, 33 + at % 60) for at in range(64)])
    while any(one.phase != "decode" for one in engine.running.values()) or engine.waiting:
        engine.step([])
    for step in range(40):
        said = engine.step([start(f"long {step}", 6000, 4)])
        talking = {one.request for one in said if isinstance(one, Tokens)}
        assert {f"stream {at}" for at in range(64)} <= talking


def test_a_short_prompt_beside_a_huge_one_waits_a_bounded_time() -> None:
    limits = Limits(chunk_tokens=256, draft_tokens=0)
    engine = hashed_engine(limits, pages=8192)
    engine.step([start("huge", 100_000, 1)])
    engine.step([start("short", 200, 1, first=40)])
    # It gets at least chunk / prefilling_max tokens a flight: 200 tokens in 4 flights, and a land.
    assert steps_until(engine, "short", 10) <= 5
    assert "huge" in engine.running


def test_a_short_prompt_behind_many_long_ones_waits_a_bounded_time() -> None:
    """Of n prompts each gets at least chunk / 2n tokens a flight, so 10 tokens take few flights."""
    engine = hashed_engine(Limits(chunk_tokens=64, draft_tokens=0), pages=8192)
    engine.step([start(f"long {at}", 6000, 1, 33 + at) for at in range(8)])
    engine.step([start("short", 10, 1, first=60)])
    assert steps_until(engine, "short", 10) <= 4
    assert len(engine.running) == 8


def test_no_long_prompt_starves_under_endless_short_ones() -> None:
    engine = hashed_engine(Limits(chunk_tokens=8, running_max=16, draft_tokens=0), pages=2048)
    engine.step([start("long", 400, 1)])
    for step in range(130):
        said = engine.step([start(f"short {step} {at}", 5, 1, 35 + at) for at in range(3)])
        if any(isinstance(one, Tokens) and one.request == "long" for one in said):
            return
    raise AssertionError("400 tokens at half of 8 a flight take 100 flights")


def test_a_blocked_head_is_overtaken_a_bounded_number_of_times() -> None:
    """The head needs nearly the whole pool; small ones pass it, but not for ever."""
    limits = Limits(chunk_tokens=512, overtakes_max=5, draft_tokens=0)
    engine = hashed_engine(limits, pages=65)
    engine.step([start("runs", 300, 200)])
    engine.step([start("head", 900, 8, first=40)])
    overtook, done = set(), False
    for step in range(3000):
        said = engine.step([start(f"small {step}", 20, 8, first=35 + step % 50)])
        done |= any(isinstance(one, Ended) and one.request == "head" for one in said)
        if "head" not in engine.running and not done:
            overtook |= {name for name in engine.running if name.startswith("small")}
        if done:
            break
    assert done
    assert 0 < len(overtook) <= limits.overtakes_max


def test_many_that_fit_in_one_step_overtake_no_more_than_that() -> None:
    engine = hashed_engine(Limits(chunk_tokens=64, overtakes_max=3, draft_tokens=0), pages=60)
    engine.step([start("runs", 320, 400)])
    engine.step([start("head", 800, 5, first=40)])
    head = engine.waiting[0]
    for step in range(60):
        engine.step([start(f"small {step} {at}", 4, 8, 35 + at) for at in range(8)])
    assert head.overtaken == 3


def test_two_that_need_the_pool_together_both_finish() -> None:
    """Neither gets part of its pages and waits for the rest holding them."""
    limits = Limits(chunk_tokens=4096, draft_tokens=3)
    engine = hashed_engine(limits, pages=129)
    starts = [start("one", 1600, 30), start("two", 1200, 30, 40), start("three", 1000, 30, 50)]
    heard = finish(engine, starts)
    for one in starts:
        assert heard[one.request].answer == solo(one, 3).answer
    assert engine.audit() == []


def test_a_preempted_request_says_each_token_once() -> None:
    limits = Limits(chunk_tokens=512, draft_tokens=2)
    engine = hashed_engine(limits, pages=24)
    starts = [start(f"r {at}", 40 + at, 150, 35 + at) for at in range(4)]
    heard = finish(engine, starts)
    assert engine.counters.preempted > 0
    for one in starts:
        assert len(heard[one.request].tokens) == len(heard[one.request].logprobs) == 150
        assert heard[one.request].answer == solo(one, 2).answer
    assert engine.audit() == []


def test_what_can_never_fit_is_refused_with_the_true_bound() -> None:
    engine = hashed_engine(Limits(), pages=11)  # 10 pages of 16 tokens
    fits = finish(engine, [start("fits", 100, 60)])["fits"]
    assert fits.ends[0].outcome == Completed("length")
    (refused,) = engine.step([start("over", 101, 60)])
    assert isinstance(refused, Ended) and isinstance(refused.outcome, Rejected)
    assert refused.outcome.field == "max_tokens" and "160 that fit" in refused.outcome.message
    assert engine.audit() == []


def test_the_queue_is_bounded() -> None:
    engine = hashed_engine(Limits(waiting_max=3, running_max=1), pages=64)
    said = engine.step([start(f"r {at}", 10, 5) for at in range(6)])
    refused = [one for one in said if isinstance(one, Ended)]
    assert len(refused) == 3
    assert all(isinstance(one.outcome, Overloaded) for one in refused)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    engine = hashed_engine()
    bad = Start(request="r", tokens=[5, 272], sampling=Sampling(max_tokens=1))
    (said,) = engine.step([bad])
    assert isinstance(said, Ended) and isinstance(said.outcome, Rejected)
    assert said.outcome.field == "prompt"
    biased = Sampling(max_tokens=1, logit_bias=((9999, 1.0),))
    (said,) = engine.step([Start(request="r", tokens=[5], sampling=biased)])
    assert isinstance(said, Ended) and isinstance(said.outcome, Rejected)
    assert said.outcome.field == "logit_bias"
