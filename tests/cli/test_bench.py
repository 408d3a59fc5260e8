"""The benchmarks' arithmetic, and each measure of the handoff once, so small that it says nothing.

No time is asserted here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from stanchion.cli.bench import (
    engine,
    handoff,
    labelled,
    layersplit,
    madeup,
    memory,
    monitor,
    pair,
    recordcost,
    recording,
    storm,
    tiers,
)
from stanchion.cli.bench.command import run, run_all
from stanchion.cli.bench.measure import Measure, interleave, paired, table, upper_bound, write
from stanchion.cli.bench.waiting import Waiting
from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError
from stanchion.gateway.tokens import load_vocabulary
from stanchion.kv.schema import Buffer, Schema
from stanchion.kv.transfer.words import Write, WriteEnded

TRAFFIC = handoff.Traffic(5, 4, (20, 90), (2, 6), aborted=0.5, leaves_turns=4, together=2)
TINY = handoff.Sizes(
    shm_pool=memory.Sizes(layers=2, pages=8, write_pages=4, repeats=1),
    nixl_pool=memory.Sizes(layers=1, pages=4, write_pages=4, repeats=1),
    ttft_prompt=96,
    ttft_repeats=1,
    long_prompts=storm.Sizes(2, 8, 64, prompt=64, every_s=0.05, repeats=1),
    embedded=TRAFFIC,
    embedded_pairs=1,
    hashed=TRAFFIC,
    hashed_pairs=1,
)


@pytest.fixture(scope="module")
def bench() -> handoff.Bench:
    return handoff.Bench(model_folder("tiny"), TINY)


# ---- arithmetic -----------------------------------------------------------------------------


def test_the_bound_lies_above_the_mean_and_below_the_largest() -> None:
    ratios = [1.0, 1.02, 0.99, 1.05, 1.01, 1.0, 0.98, 1.03]
    bound = upper_bound(ratios)
    assert np.mean(ratios) < bound < max(ratios)
    assert upper_bound(ratios) == bound


def test_the_bound_comes_near_the_one_of_a_normal_distribution() -> None:
    ratios = np.random.default_rng(1).normal(1.0, 0.02, 400)
    expected = ratios.mean() + 1.645 * ratios.std() / 20
    assert upper_bound(list(ratios)) == pytest.approx(expected, abs=2e-4)


def test_equal_runs_have_a_bound_of_one() -> None:
    measure = Measure("same", "s", "bound", gate=1.01, at_least=False)
    paired(measure, lambda: 2.0, lambda: 2.0, 5)
    assert measure.result == 1.0
    assert measure.meets(1.01) is True
    assert measure.meets(0.99) is False


def test_every_second_pair_begins_with_the_other_side() -> None:
    order: list[str] = []

    def ours() -> float:
        order.append("ours")
        return 1.0

    def other() -> float:
        order.append("other")
        return 1.0

    paired(Measure("order", "s", "bound"), ours, other, 2)
    assert order == ["ours", "other", "ours", "other", "other", "ours"]


def test_a_measure_that_cannot_be_made_is_absent_and_misses_nothing(tmp_path: Path) -> None:
    measure = Measure("gone", "GiB/s", "value", gate=1.0, note="not installed")
    assert math.isnan(measure.result)
    assert measure.meets(measure.gate) is None
    assert "| gone | absent |" in table([measure])
    write([measure], tmp_path / "said.json", {})
    assert json.loads((tmp_path / "said.json").read_text())["measures"][0]["ours"] == []


def test_the_table_has_ratios_of_medians_and_missed_gates_last() -> None:
    rate = interleave(Measure("rate", "x/s", "rate", gate=3.0), lambda: 4.0, lambda: 2.0, 1)
    time = interleave(Measure("time", "s", "time", gate=1.5), lambda: 2.0, lambda: 4.0, 1)
    lines = table([rate, time]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| time", "| rate"]
    assert "**2x**" in lines[2] and "at least 1.5: holds" in lines[2]
    assert "at least 3: MISSED" in lines[3]


def test_both_benchmarks_can_be_told_one_measure_and_know_their_own() -> None:
    for name in ("engine", "handoff", "tiers", "layersplit"):
        with pytest.raises(ConfigError, match="no measure nonsense; there are: "):
            run(name, True, None, "nonsense")


@pytest.mark.parametrize("module", [engine, handoff, tiers, layersplit])
def test_quick_measures_what_full_does(module: object) -> None:
    assert type(module.QUICK) is type(module.FULL)  # type: ignore[attr-defined]


# ---- lanes ----------------------------------------------------------------------------------


@dataclass
class Inner:
    """Writes have ended as soon as they were sent."""

    sent: list[int]

    def send(self, write: Write) -> None:
        self.sent.append(write.number)

    def poll(self) -> list[WriteEnded]:
        ended, self.sent = self.sent, []
        return [WriteEnded(number, whole=True) for number in ended]


@dataclass
class Busy:
    busy: bool


def of_pages(number: int, count: int, last_rows: int) -> Write:
    pages = np.arange(1, count + 1, dtype=np.int32)
    return Write(number, 1, 0, pages, pages, last_rows)


def test_a_link_ends_writes_one_after_the_other_at_its_rate() -> None:
    now = 10.0
    schema = Schema("x", 4, 1, False, (Buffer("a", 0, "attend", "float8_e4m3fn", 25),))
    link = pair.Link(Inner([]), schema, 100.0, lambda: now)  # type: ignore[arg-type]
    link.send(of_pages(0, 2, 4))  # 200 bytes: 2 s
    link.send(of_pages(1, 1, 2))  # 50 bytes: half a second more
    said = {}
    for now in (10.0, 11.9, 12.0, 12.4, 12.5):
        said[now] = [one.number for one in link.poll()]
    assert said == {10.0: [], 11.9: [], 12.0: [0], 12.4: [], 12.5: [1]}


def test_writes_are_held_while_the_engine_is_busy() -> None:
    busy = Busy(True)
    held = pair.Held(Inner([]), busy)  # type: ignore[arg-type]
    held.send(of_pages(0, 1, 1))
    assert held.poll() == []
    busy.busy = False
    assert [one.number for one in held.poll()] == [0]
    assert held.poll() == []


# ---- each measure, once ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "shm_over_memcpy",
        "nixl_gibs",
        "layerwise_ttft",
        "layerwise_ttft_shm",
        "pd_itl_p99",
        "safety_cost",
        "kv_check_full_cost",
    ],
)
def test_a_tiny_measure_has_runs_of_both_sides(bench: handoff.Bench, name: str) -> None:
    assert name in bench.measures
    with torch.inference_mode():
        (measure,) = run_all("tiny", bench, name)
    if name == "nixl_gibs":
        assert bool(measure.ours) == (find_spec("nixl") is not None)
        assert measure.note
        return
    assert measure.other is not None
    assert len(measure.ours) == len(measure.other) > 0
    assert min(measure.ours + measure.other) > 0
    assert measure.note and name in table([measure])


def test_the_list_of_measures_is_complete(bench: handoff.Bench) -> None:
    assert len(bench.measures) == 7


def test_the_unsafe_pair_lacks_what_is_measured(bench: handoff.Bench) -> None:
    """And in pools as large as theirs both come to the same answers, and leave nothing behind."""
    safe = handoff.Load(bench, bench.hashed, TRAFFIC)
    unsafe = handoff.Load(bench, bench.hashed, TRAFFIC, unsafe=True)
    try:
        for one in (safe, unsafe):
            one.cpu_s()
            assert one.pair.prefill.audit() == one.pair.decode.audit() == []
        assert safe.completed == unsafe.completed and safe.completed
        assert unsafe.pair.decode.failpoints == {"release_before_drained"}
        assert isinstance(unsafe.pair.prefill.lane.sender, pair.Doorless)
        assert not safe.pair.decode.failpoints
        assert not isinstance(safe.pair.prefill.lane, pair.Doorless)
    finally:
        safe.close()
        unsafe.close()


# ---- tiers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiers_bench() -> tiers.Bench:
    return tiers.Bench(model_folder("tiny"), tiers.Sizes(160, 1, 1, 2, 12, 2, 1, 1, 8, 1))


@pytest.mark.parametrize(
    "name",
    [
        *("host_hit_ttft", "disk_hit_ttft", "exposed_wait", "overlap_gain_once"),
        *("overlap_gain_linked", "kv_check_full_cost", "load_over_memcpy"),
    ],
)
def test_each_measure_of_tiers_runs(
    name: str, tiers_bench: tiers.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STANCHION_TRACES", raising=False)  # real sessions take longer
    with torch.inference_mode():
        measure = tiers_bench.measures[name]()
    assert len(measure.ours) in (1, 2) and all(one >= 0 for one in measure.ours)
    assert measure.note and math.isfinite(measure.result)


def test_overlap_is_a_ratio_of_each_processs_own_medians(
    tiers_bench: tiers.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([([1.0, 9.0, 2.0], [3.0, 3.0, 0.0]), ([10.0], [5.0])])

    def process(command: list[str | Path], **more: object) -> None:
        ours, other = next(runs)
        assert "overlap_gain_once" in command
        Path(command[-1]).write_text(json.dumps({"measures": [{"ours": ours, "other": other}]}))

    monkeypatch.setattr(tiers.subprocess, "run", process)
    measure = tiers_bench.overlap_gain()
    assert measure.ours == [1.5, 0.5] and measure.result == 1.0


@pytest.fixture(scope="module")
def recording_bench() -> recording.Bench:
    few = recordcost.Sizes(streams=8, pairs=1, processes=2)
    return recording.Bench(model_folder("tiny"), recording.Sizes(2, 3, 1, few))


def test_recording_is_measured_beside_none(recording_bench: recording.Bench) -> None:
    measure = recording_bench.measures["record_cost"]()
    assert measure.other is not None and len(measure.ours) == len(measure.other) == 2


def test_structure_is_kept_by_exports(recording_bench: recording.Bench) -> None:
    measure = recording_bench.structure()
    assert measure.ours == [1.0] and measure.meets(measure.gate)


@pytest.mark.parametrize("level", ["surrogate", "secrets", "hashes"])
def test_anonymising_is_measured(recording_bench: recording.Bench, level: recording.Wanted) -> None:
    measure = recording_bench.speed(level)
    assert measure.result > 0 and "2 sessions" in measure.note


def test_owners_send_what_passes_need_and_no_more() -> None:
    """Over real ranks; the count of what is needed does not come from the sender."""
    bench = layersplit.Bench(model_folder("tiny"), layersplit.Sizes(1, 1, 1, 1, 1))
    bench.prepare([])
    with torch.inference_mode():
        sent, capacity = bench.bytes_sent(), bench.capacity()
    assert sent.meets(sent.gate) and sent.result >= 1
    assert capacity.meets(capacity.gate)


def test_a_wait_at_a_door_is_measured() -> None:
    """Otherwise `exposed_wait` would be 0 whatever happened."""
    waiting = Waiting()

    class Slow:
        def finish(self, mark: int) -> None:
            for _ in range(100_000):
                pass

    waiting.wait(Slow(), 1)  # type: ignore[arg-type]
    assert waiting.seconds > 0


# ---- monitor --------------------------------------------------------------------------------


SMALL_SET = monitor.Sizes(30, 60, 3, 60.0, 2, 3, 20)


def _recorded(number: int, damaged: bool = False) -> labelled.Said:
    """An answer of 80 messages; a damaged one parts from its cold scores at its token 100."""
    vocabulary = load_vocabulary(model_folder("tiny"))
    (said,) = madeup.answers("made_up_base64", 1, vocabulary)
    start = msgspec.structs.replace(said.start, request=f"{number}")
    made = labelled.Said(start, said.messages[:80], True)
    made.cold = [score + (damaged and at >= 100) for at, score in enumerate(made.logprobs)]
    made.onset = 100 if damaged else None
    return made


def test_a_labelled_set_is_judged_by_each_rule_and_mode(tmp_path: Path) -> None:
    healthy = [_recorded(number) for number in range(90)]
    labelled.keep(tmp_path / "healthy-0000.msgpack", healthy)
    for fault in labelled.FAULTS:
        sick = [_recorded(number, fault != labelled.TEXT_IS_RIGHT) for number in range(3)]
        labelled.keep(labelled.fault_file(tmp_path, fault), sick)
    before = labelled.digests(tmp_path)
    bench = monitor.Bench(model_folder("tiny"), SMALL_SET, tmp_path)
    with torch.inference_mode():
        found = {name: bench.measures[name]() for name in bench.measures}
    assert labelled.digests(tmp_path) == before, "what is there is not made again"
    assert found["false_aborts"].ours == [0.0] and found["false_aborts"].unit == "of 60"
    assert found["recall_witnessed"].ours == [1.0]
    assert found["foreign_write:mode_strict"].ours == [1.0]
    assert found["foreign_write:mode_balanced"].ours == [0.0]  # nothing of it is suspected
    assert found["restore_without_draft:mode_strict"].ours == [0.0]  # its text is right
    assert found["made_up_loop_7:text"].ours == [1.0]
    assert found["made_up_copy:report"].ours == [1.0]  # the report's rule cuts honest copying off


@pytest.mark.soak
def test_a_labelled_set_is_made_once(tmp_path: Path) -> None:
    with torch.inference_mode():
        bench = monitor.Bench(model_folder("tiny"), SMALL_SET, tmp_path)
        recall, before = bench.recall_witnessed(), labelled.digests(tmp_path)
        again = monitor.Bench(model_folder("tiny"), SMALL_SET, tmp_path).recall_witnessed()
    # A sick answer is another one than a right engine's: its cold scores tell.
    assert recall.ours == again.ours == [1.0] and labelled.digests(tmp_path) == before


def test_a_whole_labelled_set_wants_a_folder() -> None:
    with pytest.raises(ConfigError, match="--set"):
        monitor.Bench(model_folder("tiny"), monitor.FULL, None).prepare([])


def test_made_up_answers_are_counted_as_a_worker_counts() -> None:
    vocabulary = load_vocabulary(model_folder("tiny"))
    for kind in madeup.KINDS:
        (answer,) = madeup.answers(kind, 1, vocabulary)
        last = answer.messages[-1].spec
        assert (last is None) == (kind == "made_up_no_drafts")
        assert last is None or last.tokens + 1 == len(answer.tokens)
