"""The monitor's folds: what is suspected, what is not (D16), and that no split changes it."""

from __future__ import annotations

import base64
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Spec
from stanchion.gateway.monitor import baseline, calibrated
from stanchion.gateway.monitor.baseline import RANKS, Baseline, Baselines, Clean, learn, rank
from stanchion.gateway.monitor.calibrated import Calibrated, Tilts, threshold
from stanchion.gateway.monitor.fold import Acceptance, Monitor, Reading, Rules
from stanchion.gateway.monitor.report import NOTHING, Literal, Windows, gained
from stanchion.gateway.monitor.witness import Scale
from stanchion.gateway.monitor.words import Suspicion
from stanchion.gateway.tokens import byte_vocabulary

VOCABULARY = byte_vocabulary()
DRAFTS = 3


def monitor(prompt: str = "x", acceptance: Acceptance = "report", **rules: object) -> Monitor:
    special, ends = VOCABULARY.special, frozenset(VOCABULARY.eos_ids)
    reading = Reading(list(prompt.encode()), VOCABULARY.pieces, special, ends)
    return Monitor(Rules(acceptance, **rules), reading)  # type: ignore[arg-type]


def steps_of(accepted: Sequence[int], drafts: int = DRAFTS) -> Iterator[Spec]:
    """Counters after each verify step."""
    spec = NOTHING
    for one in accepted:
        spec = Spec(
            spec.verify_steps + 1,
            spec.tokens + one + 1,
            spec.proposed + drafts,
            spec.accepted + one,
        )
        yield spec


def heard(
    text: str | Sequence[int],
    prompt: str = "x",
    accepted: Sequence[int] | None = None,
    acceptance: Acceptance = "report",
) -> set[str]:
    """Kinds of suspicion over a whole answer. Acceptance goes round and round."""
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    one, found, at = monitor(prompt, acceptance), [], 0
    pattern = accepted if accepted is not None else (1, 3, 0, 2, 3, 1, 2)
    specs = steps_of([pattern[place % len(pattern)] for place in range(len(tokens))])
    found += one.push(tokens[:1], [-1.0], None)
    at = 1
    while at < len(tokens):
        spec = next(specs)
        found += one.push(tokens[at : spec.tokens + 1], [-1.0] * DRAFTS, spec)
        at = spec.tokens + 1
    return {suspicion.kind for suspicion in found}


# ---- the labelled set of D16 ----------------------------------------------------------------

FILE = "".join(
    f"def part_{at}(value, other={at * 37 % 91}):\n    return value + {at} * other\n"
    for at in range(200)
)
ROWS = json.dumps([{"id": at, "name": f"row {at}", "flags": [0, 1, 0]} for at in range(200)])
BLOCK = base64.b64encode(random.Random(7).randbytes(3000)).decode()
ZEROS = base64.b64encode(bytes(600)).decode()
TABLE = "| a | b |\n|---|---|\n" + "".join(f"| {at} | {at * at} |\n" for at in range(200))
ARRAY = "[" + ", ".join(["0"] * 256) + "]"
LOCK = "".join(
    f'[[package]]\nname = "p{at}"\nversion = "{at % 9}.0"\nchecksum = "{at * 2654435761:016x}"\n\n'
    for at in range(60)
)
PROSE = (
    "昔々あるところにお爺さんとお婆さんが住んでいました。你好世界，今天天气很好，我们去公园散步吧。"
    "동해 물과 백두산이 마르고 닳도록 하느님이 보우하사 우리나라 만세. 春眠不覺曉，處處聞啼鳥。"
)
COPYING = (3,)  # every draft accepted
LOST = (0,)  # none: the draft state is not there
HEALTHY: dict[str, dict] = {
    "copy of a 400-line file": {"text": FILE, "prompt": "copy this:\n" + FILE},
    "200 like rows of JSON": {"text": ROWS},
    "base64": {"text": BLOCK},
    "base64 of zeros": {"text": ZEROS},
    "table": {"text": TABLE},
    "array": {"text": ARRAY},
    "lock file": {"text": LOCK},
    "CJK prose": {"text": PROSE * 3, "prompt": "tell me a tale"},
    "one translation": {"text": "Привет, мир! Как дела? " * 3, "prompt": "to Russian: hello"},
    "repetitive prompt repeated": {"text": "spam egg " * 80, "prompt": "say: " + "spam egg " * 80},
}
LOOPS = {1: [120], 7: list(b"abc def"), 92: list((FILE[:92]).encode())}


def _garbage(seed: int, characters: int = 300) -> str:
    rng = random.Random(seed)
    blocks = ((0x400, 0x4FF), (0x905, 0x939), (0x4E00, 0x9FFF), (0xE01, 0xE2E), (0x10D0, 0x10FA))
    return "".join(chr(rng.randint(*rng.choice(blocks))) for _ in range(characters))


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_answers_are_not_suspected(case: str) -> None:
    assert heard(**HEALTHY[case]) == set()


@pytest.mark.parametrize("case", HEALTHY)
def test_copying_is_suspected_for_its_acceptance_alone(case: str) -> None:
    """Which is why a suspicion is no verdict."""
    assert heard(**HEALTHY[case], accepted=COPYING) <= {"high_acceptance"}
    assert heard(**HEALTHY["base64"], accepted=COPYING) == {"high_acceptance"}


@pytest.mark.parametrize("period", LOOPS)
def test_loops_are_suspected(period: int) -> None:
    unit = LOOPS[period]
    found = heard([*b"an answer that begins well: ", *unit * (1200 // period)])
    assert found == {"loop"}


@pytest.mark.parametrize("period", [1, 2, 8, 9, 91, 92, 512, 1023, 1024])
def test_the_period_found_is_the_primitive_one(period: int) -> None:
    rng = random.Random(period)
    unit = [rng.randrange(97, 123) for _ in range(period)]
    unit[-1] = 65  # nowhere else: so no shorter unit makes it
    one = monitor()
    said = [one.push([token], [], None) for token in unit * max(6, 1300 // period)]
    found = [suspicion for some in said for suspicion in some]
    assert found and all(one.evidence.startswith(f"period {period},") for one in found)


def test_a_period_past_the_longest_is_no_loop() -> None:
    rng = random.Random(1)
    unit = [rng.randrange(97, 123) for _ in range(1025)]
    assert heard(unit * 6) == set()


def test_no_unit_takes_for_ever_to_look_at() -> None:
    """A pattern that may match digits in two ways would try all of them."""
    unit = "0x123456789abcdef0, " * 50 + "zz"
    began = time.monotonic()
    assert heard(unit * 5) == {"loop"}
    assert time.monotonic() - began < 5.0


def test_a_loop_of_what_the_prompt_has_is_one_when_it_goes_on_for_longer() -> None:
    line = "the same old line of a song\n"
    assert heard(line * 40, prompt=line * 40) == set()
    assert heard(line * 60, prompt=line * 40) == {"loop"}


@pytest.mark.parametrize("seed", range(5))
def test_random_unicode_is_suspected(seed: int) -> None:
    assert "scripts" in heard(_garbage(seed))


def test_broken_characters_are_suspected_unless_the_prompt_has_them() -> None:
    broken = [*b"fine ", 0xFF, *b" and ", 0xFE, *b" so ", 0xFD, *b" on"]
    assert heard(broken) == {"odd_characters"}
    assert heard(broken, prompt="\ufffd in it") == set()
    assert heard("\x01\x02\x03") == {"odd_characters"}
    assert heard("tabs\t\tand\r\nlines\n" * 3) == set()


def test_reserved_tokens_are_suspected_as_tokens_and_spelled_out() -> None:
    assert heard([258, *b"x", 259, *b"y", 260]) == {"reserved"}
    assert heard("<|user|> <|system|> <|assistant|>") == {"reserved"}
    assert heard("<|user|> <|system|> <|assistant|>", prompt="<|user|><|system|>") == set()
    assert heard([258, *b"x", 256]) == set(), "the end token is none"


def test_a_score_that_is_no_number_is_suspected_once() -> None:
    one = monitor()
    found = one.push([97, 98, 99], [-1.0, math.nan, math.nan], None)
    assert found == [Suspicion("nan", "a log-probability is no number", 2)]
    assert one.push([97], [math.nan], None) == []


# ---- every split ----------------------------------------------------------------------------

SICK = [
    *b"an answer ", *_garbage(3, 80).encode(), 0xFF, 0xFE, 0xFD, *b"<|user|><|a|><|b|>",
    *b"abc def" * 60,
]  # fmt: skip


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None, max_examples=30)
def test_text_witnesses_say_the_same_for_every_split(sizes: list[int]) -> None:
    one, whole = monitor(), monitor().push(SICK, [-1.0] * len(SICK), None)
    found: list[Suspicion] = []
    at = turn = 0
    while at < len(SICK):
        size = sizes[turn % len(sizes)]
        found += one.push(SICK[at : at + size], [-1.0] * size, None)
        at, turn = at + size, turn + 1
    assert found == whole
    assert {suspicion.kind for suspicion in whole} >= {"scripts", "odd_characters", "reserved"}


@given(
    st.lists(st.integers(0, DRAFTS), min_size=64, max_size=400),
    st.lists(st.integers(1, 64), min_size=1, max_size=10),
)
@settings(deadline=None, max_examples=60)
def test_windows_are_equal_for_every_split_that_ends_them_alike(
    accepted: list[int], sizes: list[int]
) -> None:
    specs = list(steps_of(accepted))
    alone, batched = Windows(), Windows()
    one_by_one = [found for spec in specs if (found := alone.push(spec, spec.tokens + 1))]
    found, at, turn = [], 0, 0
    while at < len(specs):
        size = sizes[turn % len(sizes)]
        at, turn = min(len(specs), at + min(size, 64 - at % 64)), turn + 1
        if said := batched.push(specs[at - 1], specs[at - 1].tokens + 1):
            found.append(said)
    assert found == one_by_one


# ---- the report's rule ----------------------------------------------------------------------


def windows(accepted: Sequence[int], rule: Windows | Literal | None = None) -> list[Suspicion]:
    rule = rule or Windows()
    return [said for spec in steps_of(accepted) if (said := rule.push(spec, spec.tokens + 1))]


def test_low_acceptance_wants_two_windows_in_a_row() -> None:
    assert windows([0] * 127) == []
    (found,) = windows([0] * 128)
    assert (found.kind, found.at) == ("low_acceptance", 129)
    assert windows([0] * 64 + [2] * 64 + [0] * 64) == [], "one good window lies between"
    assert windows([0, 0, 0, 1] * 100)[0].kind == "low_acceptance"  # 1.25
    assert windows([0, 1] * 200) == []  # 1.5


def test_high_acceptance_wants_one_full_window() -> None:
    assert windows([3] * 63) == []
    (found,) = windows([3] * 64)
    assert (found.kind, found.at) == ("high_acceptance", 257)
    assert windows([3] * 56 + [2] * 8) == []  # 0.958


def test_the_literal_rule_fires_on_healthy_beginnings() -> None:
    """What windows are for: the running rate of an answer that copies at first."""
    copying_at_first = [3] * 40 + [1, 2, 0, 2] * 40
    assert windows(copying_at_first) == []
    (found,) = windows(copying_at_first, Literal())
    assert (found.kind, found.at) == ("high_acceptance", 129)


def test_without_drafts_acceptance_is_undefined_and_nothing_is_suspected() -> None:
    disabled = [Spec(step, step, 0, 0) for step in range(1, 400)]
    for rule in (Windows(), Literal()):
        assert not any(rule.push(spec, spec.tokens + 1) for spec in disabled)
    assert heard("no counters at all", accepted=()[:0] or (1,)) == set()


def test_a_lost_draft_state_looks_like_damage() -> None:
    """D09: its text is right. Nothing here can tell, so it must be asked."""
    assert heard(FILE, accepted=LOST) == {"low_acceptance"}


@pytest.mark.parametrize(
    "after",
    [
        Spec(100, 100, 300, 301),  # a rate above 1
        Spec(100, 99, 300, 0),  # a length below 1
        Spec(100, 401, 300, 300),  # a length above k + 1
        Spec(-1, 0, 0, 0),
    ],
)
def test_counters_that_contradict_themselves_say_nothing(after: Spec) -> None:
    assert gained(NOTHING, after) is None
    assert Windows().push(after, 500) is None and Literal().push(after, 500) is None


# ---- calibrated -----------------------------------------------------------------------------


def _healthy(rng: random.Random, steps: int) -> list[int]:
    """Each draft is taken with a chance of 0.7, up to the first that is not."""
    return [next((at for at in range(DRAFTS) if rng.random() > 0.7), DRAFTS) for _ in range(steps)]


def _baseline(seed: int = 1, **more: object) -> Baseline:
    rng = random.Random(seed)
    return learn("m", "1", DRAFTS, "any", [_healthy(rng, 256) for _ in range(200)], **more)  # type: ignore[arg-type]


def _alarms(base: Baseline, mean: float, h: float, answers: int, steps: int) -> int:
    """Answers of independent steps with this mean that are suspected."""
    rng = random.Random(11)
    tilts = Tilts.of(base.accepted)
    weights = tilts.tilted(tilts.tilt(mean))
    alarms = 0
    for _ in range(answers):
        test = Calibrated(base, h)
        drawn = rng.choices(range(DRAFTS + 1), weights, k=steps)
        alarms += any(test.push(spec, spec.tokens) for spec in steps_of(drawn))
    return alarms


@pytest.mark.parametrize("edge", ["low", "high"])
def test_false_alarms_stay_below_what_is_stated(edge: str) -> None:
    """At the edge of what healthy answers show, where they are likeliest."""
    base, rate, answers, steps = _baseline(), 0.2, 300, 128
    alarms = _alarms(base, getattr(base, edge), threshold(rate, steps), answers, steps)
    assert alarms <= rate * answers + 3 * math.sqrt(rate * (1 - rate) * answers)


def test_a_threshold_for_one_step_only_is_caught() -> None:
    """The wrong variant forgets that an answer has many steps."""
    base, rate, answers, steps = _baseline(), 0.2, 300, 128
    alarms = _alarms(base, base.low, threshold(rate, 1), answers, steps)
    assert alarms > rate * answers + 3 * math.sqrt(rate * (1 - rate) * answers)


def test_lost_drafts_and_confident_loops_are_found_soon() -> None:
    base = _baseline()
    for accepted, kind in ((0, "low_acceptance"), (DRAFTS, "high_acceptance")):
        test = Calibrated(base, threshold())
        said = [test.push(spec, spec.tokens) for spec in steps_of([accepted] * 200)]
        first = next(at for at, one in enumerate(said) if one is not None)
        assert said[first] is not None and said[first].kind == kind and first < 120  # type: ignore[union-attr]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_batches_can_only_make_it_slower(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    drawn = [*_healthy(rng, 50), *([0] * 60)]
    specs = list(steps_of(drawn))
    alone, batched = Calibrated(_baseline(), 12.0), Calibrated(_baseline(), 12.0)
    first = next((at for at, one in enumerate(specs) if alone.push(one, 0)), len(specs))
    at = turn = 0
    while at < len(specs):
        at, turn = min(len(specs), at + sizes[turn % len(sizes)]), turn + 1
        if batched.push(specs[at - 1], 0):
            assert at - 1 >= first
            return


def test_healthy_answers_that_accept_everything_leave_nothing_to_test_above() -> None:
    base = learn("m", "1", DRAFTS, "any", [[3] * 64, [1] * 64])
    kinds = [one.kind for one in calibrated.directions(base)]
    assert kinds == ["low_acceptance"]
    assert calibrated.directions(learn("m", "1", DRAFTS, "any", [[0] * 64, [3] * 64])) == ()


def test_steps_with_fewer_drafts_are_not_judged() -> None:
    test = Calibrated(_baseline(), 5.0)
    assert not any(test.push(spec, 0) for spec in steps_of([0] * 300, drafts=1))


def test_rare_tokens_are_found_and_usual_ones_are_not() -> None:
    rng = random.Random(5)
    usual = [min(int(rng.expovariate(1 / 150)), 2047) for _ in range(20_000)]
    ranks = [0] * RANKS
    for token in usual:
        ranks[rank(token, 2048)] += 1
    base = _baseline(ranks=ranks, vocabulary=2048)
    pieces = tuple(b"word " for _ in range(2048))

    def kinds(tokens: Sequence[int], prompt: Sequence[int]) -> set[str]:
        one = Monitor(Rules(baseline=base), Reading(prompt, pieces))
        return {said.kind for said in one.push(tokens, (), None)}

    even = [rng.randrange(2048) for _ in range(200)]
    assert kinds(usual[:2000], [0]) == set()
    assert kinds(even, [0]) == {"rare"}
    assert kinds(even, even) == set(), "what the prompt has is no evidence"


# ---- the file -------------------------------------------------------------------------------


def test_a_baseline_is_read_as_it_was_written() -> None:
    made = _baseline()
    found = baseline.read(baseline.write([made]), "a file")
    assert found.of("m", "1", DRAFTS) == made == found.of("m", "1", DRAFTS, "on")
    assert found.of("m", "1", DRAFTS - 1) is None and found.of("other", "1", DRAFTS) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'{"version": 2, "baselines": []}',
        b'{"version": 1, "baselines": [{"model": "m"}]}',
        baseline.write([_baseline()]).replace(b'"low": ', b'"low": 9'),
    ],
)
def test_what_is_no_baseline_is_refused_by_name(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="the-file"):
        baseline.read(raw, "the-file")


def test_a_baseline_wants_a_whole_window() -> None:
    with pytest.raises(ConfigError, match="64 verify steps"):
        learn("m", "1", DRAFTS, "any", [[1] * 63])


def test_how_far_clean_runs_are_apart_is_in_the_file() -> None:
    clean = Clean(model="m", revision="1", drift=0.01, threshold=0.5, runs=40)
    found = baseline.read(baseline.write([], [clean]), "a file")
    assert found.scale("m", "1") == Scale(0.01, 0.5, 40)
    assert found.scale("m", "2") == Scale() and Scale().runs == 0, "nobody measured it"


def test_ours_can_be_read() -> None:
    ours = resources.files("stanchion.gateway.monitor") / "baselines.json"
    assert isinstance(baseline.read(ours.read_bytes(), "ours"), Baselines)
