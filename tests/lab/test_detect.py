"""Detectors over answers whose state is known, and what is said of their worth."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.cli import detect as command
from stanchion.core.acceptance import accept_length, accept_rate
from stanchion.core.errors import ConfigError
from stanchion.core.messages import Spec
from stanchion.gateway.monitor.baseline import learn
from stanchion.gateway.monitor.baseline import write as write_baselines
from stanchion.gateway.monitor.witness import Scale
from stanchion.gateway.tokens import byte_vocabulary
from stanchion.lab.detect import Eyes, Finding, Reference, compare, find, question
from stanchion.lab.detect_table import (
    agreement,
    detectors,
    kappa,
    sessions,
    side_by_side,
    suspects,
    table,
    true_rate,
    worth,
)
from stanchion.lab.replay_timing import lateness
from stanchion.lab.results import Point, Result, RunHeader, Writer, write_header
from stanchion.lab.stats import Rate

EYES = Eyes(byte_vocabulary())
K = 3


def result(text: str = "", prompt: str = "go", **more: Any) -> Result:
    body = msgspec.json.encode({"model": "m", "prompt": prompt, "temperature": 0})
    given: dict[str, Any] = {
        "request": "r", "session": "s", "due": 0.0, "end": 1.0, "ending": "completed",
        "text": text, "tokens": tuple(text.encode()), "path": "/v1/completions",
        "body": msgspec.Raw(body),
    }  # fmt: skip
    return Result(**given | more)


def points(*accepted: int, drafts: int = K) -> tuple[Point, ...]:
    """After each verify step: so many of its drafts were accepted."""
    told, total = [], 0
    for step, one in enumerate(accepted, start=1):
        total += one
        spec = Spec(step, step + total, drafts * step, total)
        told.append(Point(float(step), step + total, spec))
    return tuple(told)


# ---- D16: acceptance is no verdict ----------------------------------------------------------

SOURCE = "\n".join(f"def name_{at}(value_{at}):\n    return value_{at} * {at}" for at in range(200))
ROWS = "\n".join(
    f'{{"id": {at}, "name": "item {at}", "price": {at * 7 % 97}}}' for at in range(200)
)
LOOP = "again " * 200
BASE64 = "".join(random.Random(3).choices("ABCDEFGHIJKLMNOPabcdefghijklmnop0123456789+/", k=3000))
CHINESE = "".join(chr(0x4E00 + (at * 7919) % 3000) for at in range(400))
SALAD = "".join(
    chr(random.Random(at).choice((0x0430, 0x0E01, 0x0905, 0x0627, 0x10D0)) + at % 20)
    for at in range(400)
)
ALL, HARDLY = (K,) * 120, (0, 0, 0, 1) * 60

HEALTHY = {
    "a copy of the prompt": result(SOURCE, prompt=SOURCE, points=points(*ALL)),
    "like rows of JSON": result(ROWS, points=points(*ALL)),
    "base64": result(BASE64, points=points(*(0, 1) * 60)),
    "Chinese prose": result(CHINESE, prompt="用中文写", points=points(*(1, 2) * 60)),
    "drafts off": result(SOURCE[:2000], prompt="write"),
}
SICK = {
    "a loop of one token": result("!" * 1500, points=points(*ALL)),
    "a loop of a few": result(LOOP, points=points(*ALL)),
    "a loop of 92 lines": result(SOURCE[:900] * 8, prompt="go", points=points(*ALL)),
    "garble": result(SALAD, points=points(*HARDLY)),
    "broken characters": result("fine so far " + "\ufffd\ufffd" * 20, points=points(*HARDLY)),
}


def test_healthy_answers_are_no_loops_and_no_garble_however_they_were_accepted() -> None:
    for name, one in HEALTHY.items():
        found = find(one, EYES)
        assert found.by["text"] is False, (name, found.evidence)


def test_sick_answers_are_found_by_their_text() -> None:
    for name, one in SICK.items():
        found = find(one, EYES)
        assert found.by["text"] is True, name
        assert found.at is not None and found.evidence


def test_acceptance_alone_cannot_tell_a_copy_from_a_loop() -> None:
    copy, loop = find(HEALTHY["a copy of the prompt"], EYES), find(SICK["a loop of a few"], EYES)
    assert copy.by["report"] is loop.by["report"] is True
    assert find(SICK["garble"], EYES).by["report"] is True


def test_without_drafts_acceptance_says_nothing() -> None:
    by = find(HEALTHY["drafts off"], EYES).by
    assert by["report"] is None and by["report-literal"] is None and by["calibrated"] is None
    assert by["nan"] is None and by["log-probability"] is None  # no scores came either


@given(st.lists(st.integers(0, K), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_acceptance_keeps_to_its_units(accepted: list[int]) -> None:
    for point in points(*accepted):
        rate, length = accept_rate(point.spec), accept_length(point.spec)
        assert rate is not None and 0 <= rate <= 1
        assert length is not None and 1 <= length <= K + 1


def test_simple_judges_miss_and_misfire() -> None:
    """Why they are not relied on: a loop of a long unit is missed, a translation is called sick."""
    long_unit = find(SICK["a loop of 92 lines"], EYES).by
    assert long_unit["text"] and not long_unit["regex"]
    translated = find(HEALTHY["Chinese prose"], EYES).by
    assert translated["characters"] and not translated["text"]
    assert find(SICK["a loop of one token"], EYES).by["regex"]
    assert find(SICK["garble"], EYES).by["characters"]


def test_what_the_model_hardly_believed_is_unlikely() -> None:
    sure, unsure = (-0.1,) * 100, (-0.1,) * 30 + (-5.0,) * 80
    assert find(result("x" * 100, logprobs=sure), EYES).by["log-probability"] is False
    assert find(result("x" * 110, logprobs=unsure), EYES).by["log-probability"] is True
    assert find(result("xyz", logprobs=(-0.1, None, -0.1)), EYES).by["nan"] is True


def test_answers_without_ids_are_read_as_text() -> None:
    plain = msgspec.structs.replace(SICK["a loop of a few"], tokens=())
    assert find(plain, EYES).by["loop"] is True


# ---- the reference --------------------------------------------------------------------------


def test_a_question_is_what_was_asked_and_not_its_salt() -> None:
    body = {"model": "m", "prompt": "go", "temperature": 0}
    same = result(body=msgspec.Raw(msgspec.json.encode(body | {"cache_salt": "x", "model": "n"})))
    assert question(same) == question(result())
    assert question(result(prompt="stop")) != question(result())
    hot = result(body=msgspec.Raw(msgspec.json.encode(body | {"temperature": 1})))
    assert question(hot) != question(result())


def test_tokens_are_compared_to_the_end_or_to_the_cut() -> None:
    right = result("abcdef")
    assert compare(result("abcdef"), right) == ("same", None)
    assert compare(result("abXdef"), right) == ("differs", 2)
    assert compare(result("abc"), right) == ("differs", 3)  # it ended too early
    assert compare(result("abc", ending="aborted"), right) == ("same", None)
    assert compare(result("abcdefg"), right) == ("differs", 6)
    assert compare(result("abX", ending="failed"), right) == ("differs", 2)


def test_rounding_is_no_damage_where_runs_differ_by_it() -> None:
    scale = Scale(drift=0.1, threshold=2.0)
    right = result("abcdef", logprobs=(-0.5,) * 6)
    tie = result("abcXYZ", logprobs=(-0.52,) * 6)
    assert compare(tie, right, scale) == ("unknown", 3)
    parted = result("abcXYZ", logprobs=(-0.5, -4.0, -4.5, -0.5, -0.5, -0.5))
    assert compare(parted, right, scale) == ("differs", 1)
    assert compare(result("abcdef", logprobs=(-0.6,) * 6), right, scale) == ("same", None)


def test_a_reference_that_contradicts_itself_says_nothing() -> None:
    reference = Reference.of([result("one"), result("two"), result("x", prompt="p")])
    assert reference.is_unstable(result("one")) and not reference.is_unstable(result(prompt="p"))
    told = command.look(result("three"), EYES, reference, None)
    assert told.truth == "unknown"
    assert command.look(result("y", prompt="p"), EYES, reference, None).truth == "differs"
    assert command.look(result("y", prompt="never asked"), EYES, reference, None).truth == "unknown"
    failed = Reference.of([result("half", ending="failed")])
    assert failed.of_question(result()) is None


# ---- worth ----------------------------------------------------------------------------------


def finding(truth: str, session: str = "s", **by: bool | None) -> Finding:
    return msgspec.convert(
        {
            "request": "r", "copy": 0, "session": session, "arm": "", "speed": 1.0,
            "in_flight": 0, "tokens": 9, "by": by, "truth": truth,
        },
        Finding,
    )  # fmt: skip


FINDINGS = [
    *[finding("differs", a=True, b=True)] * 6, *[finding("differs", a=False, b=True)] * 2,
    *[finding("same", a=True, b=False)] * 3, *[finding("same", a=False, b=False)] * 89,
    finding("unknown", a=True, b=None),
]  # fmt: skip


def test_worth_by_hand() -> None:
    told = worth("a", FINDINGS)
    assert told.found == Rate(10, 101) and told.recall == Rate(6, 8)
    assert told.alarms == Rate(3, 92) and told.precision == Rate(6, 9)
    blind = worth("a", [finding("unknown", a=False)])
    assert blind.recall is None and blind.precision is None


def test_kappa_by_hand() -> None:
    """Of 100: both 6, only b 2, only a 3, neither 89. Agreement 0.95; by chance
    0.09 * 0.08 + 0.91 * 0.92 = 0.8444."""
    assert kappa("a", "b", FINDINGS) == pytest.approx((0.95 - 0.8444) / (1 - 0.8444))
    never = [finding("same", a=False, b=False)] * 5
    assert kappa("a", "b", never) is None


def test_tables_have_what_had_something_to_go_by() -> None:
    silent = [finding("same", a=False, c=None)] * 3
    assert detectors(silent) == ["a"]
    assert "| a | 10 of 101 |" in table(FINDINGS)
    assert "a, b | 0.68" in agreement(FINDINGS)
    assert sessions(FINDINGS, "truth").total == Rate(8, 100)
    assert sessions(FINDINGS, "b").total == Rate(8, 100)


def test_counts_are_corrected_for_the_detectors_errors() -> None:
    told = true_rate(worth("a", FINDINGS))
    assert told is not None and told.bounds.low <= 0.08 <= told.bounds.high
    useless = [finding("differs", a=False), finding("same", a=True)]
    assert true_rate(worth("a", useless)) is None


def test_the_most_suspect_come_first_and_can_be_read() -> None:
    some = [finding("same", a=True, b=True), finding("differs", a=False), finding("same", a=False)]
    assert [one.truth for one in suspects(some, 9)] == ["differs", "same"]
    said, right = result("def f(): garble ```\n"), result("def f(): return 1")
    page = side_by_side(finding("differs", a=True), said, right)
    assert "garble" in page and "return 1" in page and "detectors: a" in page
    assert "\n```" not in page  # an answer cannot break out of its excerpt


# ---- the command ----------------------------------------------------------------------------


def a_run(folder: Path, results: list[Result]) -> Path:
    folder.mkdir()
    header = RunHeader(
        trace="t", url="u", model="hashed", loop="open", speed="1", copies=1, seed=0,
        requests=len(results), started_unix_s=0.0, lateness=lateness([], 0.1),
    )  # fmt: skip
    write_header(folder, header)
    writer = Writer(folder, 1, 0)
    for one in results:
        writer.add(one)
    writer.close()
    return folder


def test_a_run_is_held_against_its_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    right = [
        result("".join(map(chr, rng.integers(97, 122, 90))), prompt=f"{at}", request=f"r{at}")
        for at in range(30)
    ]
    said = [
        msgspec.structs.replace(one, text=LOOP, tokens=tuple(LOOP.encode())) if at < 3 else one
        for at, one in enumerate(right)
    ]
    asked = command.Asked(
        a_run(tmp_path / "run", said), a_run(tmp_path / "alone", right), quiet=True
    )
    told = command.detect(asked)
    assert sessions(told.findings, "truth").total == Rate(3, 30)
    assert worth("loop", told.findings).recall == Rate(3, 3)
    assert worth("loop", told.findings).alarms == Rate(0, 27)
    assert command.read_found(tmp_path / "run") == told
    assert command.read_found(tmp_path / "alone") is None
    page = (tmp_path / "run" / command.TO_READ).read_text()
    assert "1000.00 (211.17 to 2652.88) per 10,000; 3 of 30" in page
    assert page.count("### r") == 3


def test_what_is_no_run_is_no_reference(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [result("abc")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is no run of replay"):
        command.detect(command.Asked(run, tmp_path / "empty", quiet=True))
    with pytest.raises(ConfigError, match="--top is -1"):
        command.detect(command.Asked(run, top=-1, quiet=True))


def test_baselines_of_other_models_are_not_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [result("abc", points=points(*ALL))])
    told = command.detect(command.Asked(run, quiet=True))
    assert told.findings[0].by["calibrated"] is None  # nobody learnt what this model is like
    one = learn("hashed", "1", K, "any", [[1, 2] * 64])
    file = tmp_path / "baselines.json"
    file.write_bytes(write_baselines([one]))
    told = command.detect(command.Asked(run, baselines=file, quiet=True))
    assert told.findings[0].by["calibrated"] is True
    file.write_bytes(write_baselines([one, msgspec.structs.replace(one, revision="2")]))
    with pytest.raises(ConfigError, match="2 baselines of hashed"):
        command.detect(command.Asked(run, baselines=file, quiet=True))
    with pytest.raises(ConfigError, match="cannot read"):
        command.detect(command.Asked(run, baselines=tmp_path / "none", quiet=True))
