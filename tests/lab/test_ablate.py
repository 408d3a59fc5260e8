"""Ablation: sizes fixed beforehand, blocks in turn, one look at the end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from stanchion.cli import ablate as command
from stanchion.cli.bench import stub
from stanchion.cli.report import report
from stanchion.core.errors import ConfigError
from stanchion.core.recording import Recorded
from stanchion.lab.ablate import analyse, check_size, needed, order, read, words
from stanchion.lab.replay_plan import cut_out
from stanchion.lab.stats import trials_needed
from stanchion.lab.stats_sessions import Sessions

from .rig import recorded

PLAN = """
trace = "t"
requests = 2000
block = 500
seed = 3
baseline = "both"
expect = [0.01, 0.0]
reference = {serve = "tiny"}
[arms.both]
serve = "tiny --set lab.failpoints=x"
[arms.one]
serve = "tiny --set lab.failpoints=y"
replay = {speed = "2"}
[arms.none]
serve = "tiny"
"""


def arm(*events: int) -> Sessions:
    return Sessions({f"s{at}": (one, 50) for at, one in enumerate(events)})


ARMS = {"both": arm(*[5] * 20, *[0] * 20), "one": arm(*[4] * 20, *[0] * 20), "none": arm(*[0] * 40)}


def test_a_size_says_what_it_can_show() -> None:
    plan = read(PLAN, "p")
    # Two comparisons share the level of 5 %.
    assert needed(plan) == trials_needed(0.01, 0.0, level=0.975) > trials_needed(0.01, 0.0)
    assert needed(plan, effect=3.0) > 2.9 * needed(plan)
    assert "there are 2,000" in check_size(plan)


def test_too_few_requests_are_refused_unless_the_plan_says_so_itself() -> None:
    small = PLAN.replace("requests = 2000", "requests = 200")
    with pytest.raises(ConfigError, match="requests is 200"):
        check_size(read(small, "p"))
    told = check_size(read("underpowered = true\n" + small, "p"))
    assert "underpowered" in told


def test_arms_take_turns_in_an_order_of_one_seed() -> None:
    plan = read(PLAN, "p")
    turns = order(plan)
    assert [block for block, _ in turns] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for block in range(4):
        assert {name for at, name in turns if at == block} == {"both", "one", "none"}
    assert turns == order(plan)
    orders = {tuple(order(read(PLAN.replace("seed = 3", f"seed = {at}"), "p"))) for at in range(9)}
    assert len(orders) > 3


def test_nobody_looks_early() -> None:
    plan = read(PLAN, "p")
    with pytest.raises(ConfigError, match="11 of 12 blocks"):
        analyse(plan, ARMS, done=11)
    with pytest.raises(ConfigError, match="blocks are done"):
        analyse(plan, {"both": ARMS["both"]}, done=12)


def test_the_one_look() -> None:
    told = analyse(read(PLAN, "p"), ARMS, done=12)
    both, _, none = told.arms
    assert (both.events, both.trials, both.sessions) == (100, 2000, 40)
    assert both.sessions_interval is not None and none.sessions_interval is None
    assert (
        both.interval[1] - both.interval[0] < both.sessions_interval[1] - both.sessions_interval[0]
    )
    assert none.interval[0] == 0.0 and none.interval[1] == pytest.approx(0.00184, abs=1e-5)
    assert told.effect is not None and told.effect > 2
    against = {one.arm: one for one in told.comparisons}
    assert set(against) == {"one", "none"}
    assert against["none"].permutation_holm < 0.001 > against["none"].fisher_holm
    assert against["none"].permutation_holm >= against["none"].permutation
    page = words(told)
    assert "both (baseline) | 100 of 2,000 | 500.0" in page and "NOT VALID" not in page
    assert "NOT VALID: in 2 blocks" in words(analyse(read(PLAN, "p"), ARMS, done=12, late=2))


def test_sessions_that_could_not_be_judged_in_one_arm_stay_pairs() -> None:
    lacking = dict(ARMS, none=Sessions({f"s{at}": (0, 50) for at in range(39)}))
    told = analyse(read(PLAN, "p"), lacking, done=12)
    assert {one.arm: one.sessions for one in told.arms}["none"] == 39
    assert {one.arm: one.permutation for one in told.comparisons}["none"] < 0.001


def test_rates_are_corrected_for_the_detector() -> None:
    errs = 'event = "monitor"\ntrue_positives = [80, 100]\nfalse_positives = [1, 1000]\n'
    told = analyse(read(errs + PLAN, "p"), ARMS, done=12)
    both = told.arms[0]
    assert both.true is not None
    value, low, high = both.true
    assert low < value < high and value == pytest.approx((0.05 - 0.001) / (0.8 - 0.001))
    assert "corrected for the detector" in words(told)


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("requests = 2000", "requests = 0", "requests"),
        ("requests = 2000", "request = 5", "request"),
        ('baseline = "both"', 'baseline = "all"', "the arms are both, one, none"),
        ("expect = [0.01, 0.0]", "expect = [2, 0]", "expect"),
        ("expect = [0.01, 0.0]", "expect = [0.1]", "expect"),
        ('reference = {serve = "tiny"}', "", r"wants a \[reference\]"),
        ("seed = 3", "true_positives = [1, 2]", "both, or neither"),
        ("[arms.both]", "[arms.both", "is not TOML"),
        ('serve = "tiny"\n', "", "serve"),
    ],
)
def test_plans_that_make_no_sense_are_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"p.*{said}"):
        read(PLAN.replace(old, new), "p")


# ---- parts of a trace -----------------------------------------------------------------------


def trace() -> list[Recorded]:
    return [
        recorded(f"{session} {turn}", 10.0 * session + turn, session=f"s{session}", turn=turn)
        for session in range(12)
        for turn in range(5)
    ]


def test_parts_are_whole_sessions_and_all_of_them() -> None:
    parts = [cut_out(trace(), at, 4) for at in range(4)]
    assert sorted(one.request for part in parts for one in part) == sorted(
        one.request for one in trace()
    )
    owners = Counter(session for part in parts for session in {one.session for one in part})
    assert set(owners.values()) == {1}
    assert [len(part) for part in parts] == [15, 15, 15, 15]
    with pytest.raises(ConfigError, match="part 4 of 4"):
        cut_out(trace(), 4, 4)


def test_a_plan_is_not_changed_once_it_has_begun(tmp_path: Path) -> None:
    command._begin(read(PLAN, "p"), tmp_path / "out")
    command._begin(read(PLAN, "p"), tmp_path / "out")
    with pytest.raises(ConfigError, match="begun with another plan"):
        command._begin(read(PLAN.replace("2000", "4000"), "p"), tmp_path / "out")


def test_settings_of_the_replay_are_checked() -> None:
    with pytest.raises(ConfigError, match="spede"):
        command._settings({"trace": "t", "url": "", "out": "", "spede": "3"})


def test_a_dry_run_says_size_and_order(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    told = command.dry(path)
    assert "told apart" in told and told.count("block 1:") == 3


# ---- the whole of it ------------------------------------------------------------------------

WHOLE = """
trace = "{trace}"
requests = 60
block = 30
baseline = "fault"
expect = [0.3, 0.0]
underpowered = true
replay = {{speed = "20", tokenizer = "hashed", as_ids = true, block_tokens = 64, max_tokens = 24}}
reference = {{serve = "hashed --integrity off"}}
[arms.fault]
serve = "{pair} --set lab.failpoints=release_before_drained"
[arms.fixed]
serve = "{pair}"
"""
PAIR = (
    "hashed --integrity off --prefill 2 --decode 1 --kv-memory 0.001 --prefill-deadline 0.06 "
    "--set lab.slow_transfer_ms=30"
)


@pytest.mark.soak
def test_from_a_plan_to_its_page(tmp_path: Path) -> None:
    """Real servers, one of them with a historic fault. What it finds depends on the machine's time;
    that the fixed arm is never wrong does not."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, stub.trace(20, 3.0))) + "\n")
    path = tmp_path / "plan.toml"
    path.write_text(WHOLE.format(trace=trace, pair=PAIR))
    told = command.ablate(path, tmp_path / "out", quiet=True)
    assert {one.arm: one.events for one in told.arms}["fixed"] == 0
    again = command.ablate(path, tmp_path / "out", quiet=True)  # all blocks are done
    assert again == told
    page, twin = report([tmp_path / "out"], tmp_path / "page")
    assert "| fixed | 0 of" in twin.read_text() and "<svg" in page.read_text()
    assert "Failpoints were armed: release_before_drained" in twin.read_text()
