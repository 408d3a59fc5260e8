"""`stanchion verify` over real processes: it passes what is right, and fails what is not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from stanchion.cli.drive import Answer, ask, cluster
from stanchion.cli.main import main
from stanchion.cli.plan import Asked
from stanchion.cli.storm import Expected, Oracle, starts, wrong
from stanchion.cli.verify import run
from stanchion.core.config import Config, load
from stanchion.core.messages import Start
from stanchion.core.outcome import Cancelled, Completed
from stanchion.core.request import Sampling

PRESSURE = [
    "cluster.prefill=2", "cluster.decode=1", "cluster.prefill_deadline_s=0.06",
    "lab.slow_transfer_ms=30", "kv.memory_gib=0.001",
]  # fmt: skip
TRAFFIC = Asked(seed=3, requests=600, context=600, variety=200, concurrency=32)


@pytest.fixture(scope="module")
def expected() -> list[Expected]:
    oracle = Oracle(page_tokens=16, draft_tokens=3, top_k=None, context=600)
    return [oracle.answer(start) for start in starts(1, 20, 600)]


def test_pd_passes_under_pressure_and_says_what_was_met(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--prefill", "1", "--decode", "1", "--requests", "300", "--variety", "100"]
    more = ["--context", "400", "--kv-check", "full", "--json", str(file)]
    assert main(["verify", *flags, *more]) == 0
    said = json.loads(file.read_text())
    assert said["passed"] and said["report"]["requests"] == 300
    assert said["report"]["kv_bytes_sent"] > 0 and said["wrong"] == []
    assert sum(said["outcomes"].values()) == 300


def test_a_worker_that_dies_and_one_that_hangs_cost_no_right_answer() -> None:
    config = load(Config(), "", [*PRESSURE, "cluster.silence_s=1", "lab.slow_transfer_ms=0"])
    report = run(config, replace(TRAFFIC, kills=1, stops=1), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    assert report.kills == report.stops == 1 and report.restarts >= 1


def test_the_same_over_nixl() -> None:
    if find_spec("nixl") is None:
        pytest.skip("nixl is not installed: make nixl")
    sets = ["cluster.prefill=1", "cluster.decode=1", "cluster.transport=nixl", "kv.check=full"]
    config = load(Config(), "", [*sets, "kv.memory_gib=0.002", "cluster.silence_s=2"])
    report = run(config, replace(TRAFFIC, requests=400, kills=1, stops=1), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    # Each answer's KV came this way. (Bytes are those of the last lives, which may have sent none.)
    assert report.outcomes["completed (length)"] > 0


RANKS = ["parallel.cp=2", "parallel.layer_split=true", "cluster.silence_s=1"]


def test_a_rank_that_dies_and_one_that_hangs_take_their_worker_along() -> None:
    """Whichever rank it is: no wrong answer, and no page is lost."""
    config = load(Config(), "", [*RANKS, "cluster.both=2"])
    report = run(config, replace(TRAFFIC, requests=200, kills=1, stops=1), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    assert report.kills == report.stops == 1 and report.restarts >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_twenty_ranks_that_die_and_twenty_that_hang() -> None:
    config = load(Config(), "", [*RANKS, "cluster.both=2"])
    report = run(config, replace(TRAFFIC, requests=4000, kills=20, stops=20), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    assert report.kills == report.stops == 20


SPLIT = [
    "cluster.prefill=1", "cluster.decode=1", "kv.memory_gib=0.001", "kv.host_cache_gib=0.001",
    "kv.check=full",
]  # fmt: skip


@pytest.mark.parametrize("sets", [["parallel.cp=2"], RANKS])
def test_prefill_of_several_ranks_hands_over(sets: list[str]) -> None:
    """Each rank has a host tier, smaller than the prompts; with LayerSplit each sends its own, and
    says what it should be."""
    config = load(Config(), "", [*SPLIT, *sets])
    report = run(config, replace(TRAFFIC, requests=200, context=3000), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    assert report.kv_bytes_sent > 0 and report.lifted > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thousands_of_handoffs_from_ranks_that_split_layers() -> None:
    config = load(Config(), "", [*SPLIT, *RANKS, "cluster.prefill_deadline_s=2"])
    asked = Asked(seed=5, requests=5000, context=6000, variety=1500, concurrency=16, abort_one_in=5)
    report = run(config, replace(asked, kills=5, stops=5), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    assert report.lifted > 0 and report.kills == report.stops == 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ranks_that_split_layers_serve_long_contexts() -> None:
    command = ["verify", "--cp", "2", "--layer-split", "--context", "70k"]
    assert main([*command, "--requests", "300", "--concurrency", "8"]) == 0


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_ranks_that_share_wrongly_fail(collectives: str) -> None:
    sets = [*RANKS, "lab.failpoints=index_broadcast_skipped", "model.hashed_top_k=48"]
    sets.append(f"parallel.collectives={collectives}")
    report = run(load(Config(), "", sets), replace(TRAFFIC, requests=60), quiet=True)
    assert report.wrong_count


TIERS = ["kv.memory_gib=0.001", "kv.host_cache_gib=0.002", "kv.check=sampled"]


def test_tiers_pass_and_are_really_used(tmp_path: Path) -> None:
    sets = [*TIERS, f"kv.disk_cache={tmp_path}:0.05", "kv.prefetch=wait", "kv.host_cache_gib=0.001"]
    report = run(load(Config(), "", sets), replace(TRAFFIC, requests=800, context=1200), quiet=True)
    assert report.passed, (report.wrong[:1], report.lost)
    assert report.lifted and report.fetched
    assert list((tmp_path / "both-0").glob("*.kv"))


def test_what_a_worker_left_on_disk_is_there_for_its_successor(tmp_path: Path) -> None:
    """A whole process's life, warm-up and drain included, and then another's."""
    sets = ["model.path=hashed", "kv.host_cache_gib=0.01", f"kv.disk_cache={tmp_path}:0.1"]
    config = load(Config(), "", [*sets, "kv.prefetch=wait"])
    tokens = [32 + (at * at) % 95 for at in range(161)]
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    start = Start(request="one", tokens=tokens, sampling=sampling)

    async def ask_once() -> Answer:
        async with cluster(config) as running:
            return await ask(running.fleet, start)

    first, second = asyncio.run(ask_once()), asyncio.run(ask_once())
    assert (first.cached_tokens, second.cached_tokens) == (0, 160)
    assert first.tokens == second.tokens and first.logprobs == second.logprobs


def test_fault_2_is_brought_back_by_its_failpoint() -> None:
    sets = [*TIERS, "lab.failpoints=index_read_before_ready", "lab.slow_load=*:2"]
    report = run(load(Config(), "", sets), replace(TRAFFIC, context=1200), quiet=True)
    assert report.lifted and report.wrong_count


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_failpoint_brings_fault_1_back() -> None:
    traffic = replace(TRAFFIC, requests=4000)
    faulty = load(Config(), "", [*PRESSURE, "lab.failpoints=release_before_drained"])
    assert run(faulty, traffic, quiet=True).wrong_count > 0
    right = run(load(Config(), "", PRESSURE), traffic, quiet=True)
    assert right.passed, (right.wrong[:1], right.lost)


def test_a_broken_setup_is_told_apart() -> None:
    flags = ["--prefill", "1", "--decode", "1", "--requests", "10"]
    assert main(["verify", *flags, "--failpoint", "no_such"]) == 2
    assert main(["verify", "--prefill", "1", "--requests", "10"]) == 2


def test_every_difference_is_seen(expected: list[Expected]) -> None:
    one = max(expected, key=lambda found: len(found.tokens))
    right = Answer(list(one.tokens), list(one.logprobs), [], list(one.record), 0, one.outcome)
    assert wrong(one, right) is None
    token = replace(right, tokens=[*one.tokens[:-1], one.tokens[-1] ^ 1])
    logprob = replace(right, logprobs=[*one.logprobs[:-1], 0.5])
    drafts = replace(right, draft_record=[*one.record[:-1], ([1, 2, 3], 0)])
    short = replace(right, tokens=one.tokens[:-1], logprobs=one.logprobs[:-1])
    ending = replace(
        right, outcome=Completed("stop" if one.outcome.reason == "length" else "length")
    )  # type: ignore[union-attr]
    for answer in (token, logprob, drafts, short, ending):
        assert wrong(one, answer) is not None
    found = wrong(one, token)
    assert found is not None and found.at == len(one.tokens) - 1
    part = Answer(one.tokens[:2], one.logprobs[:2], [], None, 0, Cancelled("client"))
    assert wrong(one, part) is None
    foreign = Answer([1, 2], one.logprobs[:2], [], None, 0, Cancelled("client"))
    assert wrong(one, foreign) is not None


def test_the_same_seed_draws_the_same_requests() -> None:
    assert list(starts(5, 8, 300)) == list(starts(5, 8, 300)) != list(starts(6, 8, 300))
