"""Integrity over the wire: each mode with workers that lie, what is retried and what is counted."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Start
from stanchion.core.outcome import OutputSuspect
from stanchion.core.request import Sampling
from stanchion.gateway.choice import Style
from stanchion.gateway.integrity import drawn
from stanchion.gateway.journal import Line
from stanchion.gateway.monitor.guard import Guard
from stanchion.gateway.monitor.witness import Confirmed
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.splice import finished, resumable, resumed, seeded
from stanchion.gateway.stops import StopSet

from .conftest import Gateway, Workers, cluster, events
from .liar import TEXT, TOKENS, Attempt, once, scored, witnessing
from .test_metrics import values
from .worker import EOS, Plan, end, say

HONEST = Attempt()
BAD = [0xFF, 0xFE, 0xFD]  # three characters that are none: suspected as they come
BODY = {"prompt": "x", "max_tokens": 2000}


@contextmanager
def two(folder: Path, **settings: Any) -> Iterator[tuple[Gateway, Workers]]:
    with cluster(folder, "both-0", "both-1", **settings) as made:
        made[0].until_ready()
        yield made


Clusters = Callable[[str], tuple[Gateway, Workers]]


@pytest.fixture(scope="module")
def of_mode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Two workers and a gateway of that mode, for all tests that count nothing."""
    with ExitStack() as stack:
        made: dict[str, tuple[Gateway, Workers]] = {}

        def of(mode: str) -> tuple[Gateway, Workers]:
            if mode not in made:
                folder = tmp_path_factory.mktemp(mode)
                made[mode] = stack.enter_context(two(folder, integrity=mode, retries_spare=1000))
            return made[mode]

        yield of


def lies(workers: Workers, first: Callable[[Start], Plan]) -> None:
    plan = once(first, HONEST)
    for worker in workers.values():
        worker.starts.clear()
        worker.plan = plan


def attempts(workers: Workers) -> list[Start]:
    return [one for worker in workers.values() for one in worker.starts if not witnessing(one)]


def witnesses(workers: Workers) -> list[Start]:
    return [one for worker in workers.values() for one in worker.starts if witnessing(one)]


def streamed(
    client: httpx.Client, seen: Callable[[str], None] = lambda raw: None, **more: Any
) -> tuple[str, list[dict[str, Any]], bool]:
    """The text, all events, and whether it was ended as a success. `seen` is told what has come."""
    raw = ""
    wanted = BODY | {"stream": True, "stream_options": {"include_usage": True}} | more
    with client.stream("POST", "/v1/completions", json=wanted) as reply:
        try:
            for part in reply.iter_text():
                raw += part
                seen(raw)
        except httpx.RemoteProtocolError:
            assert "[DONE]" not in raw
    if not raw.startswith("data: "):
        return "", [json.loads(raw)], False
    said = events(raw)
    return _text(raw), said, "[DONE]" in raw


def _text(raw: str) -> str:
    said = events(raw[: raw.rfind("\n\n") + 2])
    return "".join(one["choices"][0]["text"] for one in said if one.get("choices"))


def whole(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json=BODY | more)


# ---- each mode ------------------------------------------------------------------------------

# Clean tokens that were sent, up to the middle of a character; then damage that is seen in the
# batch that brings it.
ONSET = TEXT.encode().index("\u00e9".encode(), 90) + 1
SHOWN = len(bytes(TOKENS[: ONSET - 1]).decode())  # characters before the one that is cut
FRESH = Attempt(onset=ONSET, junk=[*BAD, *b"more"], batch=ONSET - 1)


@pytest.mark.parametrize(
    ("mode", "streamed_text", "error"),
    [
        ("report", None, True),  # what was sent cannot be made again
        ("balanced", None, True),  # the onset was sent
        ("guarded", TEXT, False),  # it was not: one token had left the window
        ("strict", TEXT, False),
    ],
)
def test_old_damage(of_mode: Clusters, mode: str, streamed_text: str | None, error: bool) -> None:
    """Low acceptance from the first step: 129 tokens raise the suspicion, and by then the reader of
    a mode that streams at once has some of the damage, which begins at the 41st."""
    gate = threading.Event()
    junk = TEXT.swapcase().encode()[40:400]
    old = Attempt(onset=40, junk=junk, accepted=0, gates={60: gate})
    if not error:
        gate.set()

    def seen(raw: str) -> None:
        if len(_text(raw)) >= 50:
            gate.set()

    gateway, workers = of_mode(mode)
    lies(workers, old)
    text, said, done = streamed(gateway.client, seen)
    assert done is not error
    if error:
        assert said[-1]["error"]["code"] == "output_suspect"
        assert said[-1]["error"]["retryable"] is True
    else:
        assert text == streamed_text
    assert len(attempts(workers)) == (1 if error else 2)
    gate.set()
    lies(workers, old)
    reply = whole(gateway.client).json()  # nothing was sent: made again in every mode
    assert reply["choices"][0]["text"] == TEXT
    assert reply["usage"]["completion_tokens"] == len(TOKENS)


@pytest.mark.parametrize("mode", ["balanced", "guarded", "strict"])
def test_fresh_damage_is_spliced_at_its_onset(of_mode: Clusters, mode: str) -> None:
    gateway, workers = of_mode(mode)
    lies(workers, FRESH)
    text, said, done = streamed(gateway.client)
    assert (text, done) == (TEXT, True)
    usage = [one["usage"] for one in said if one.get("usage")]
    assert [one["completion_tokens"] for one in usage] == [len(TOKENS)]
    reasons = [one["choices"][0]["finish_reason"] for one in said if one.get("choices")]
    assert [one for one in reasons if one] == ["stop"]
    assert len({one["id"] for one in said}) == 1
    first, second = sorted(attempts(workers), key=lambda one: len(one.tokens))
    assert second.tokens == [*first.tokens, *TOKENS[:ONSET]]
    assert second.sampling.max_tokens == first.sampling.max_tokens - ONSET
    assert second.salt != first.salt and second.request != first.request
    names = {name: len(worker.starts) for name, worker in workers.items()}
    assert all(names.values()), "the other worker witnesses and makes it again"
    for one in witnesses(workers):
        assert one.salt not in (first.salt, second.salt)
        assert one.tokens[: ONSET + 1] == second.tokens


def test_a_chat_has_its_role_once(of_mode: Clusters) -> None:
    gateway, workers = of_mode("balanced")

    def plan(start: Start) -> Plan:
        return _shifted(start, once_plan)

    once_plan = once(FRESH, HONEST)
    for worker in workers.values():
        worker.plan = plan
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(
            model="hashed", messages=[{"role": "user", "content": "x"}], stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(one.content or "" for one in deltas) == TEXT
    assert [one.role for one in deltas if one.role] == ["assistant"]


def _shifted(start: Start, plan: Callable[[Start], Plan]) -> Plan:
    """A chat's prompt has three tokens: as the liar counts, it has one."""
    from msgspec.structs import replace

    if witnessing(start):
        cut = replace(start, tokens=start.tokens[2:])
        said = scored(cut)
        logprobs = [-1.0, -1.0, *said[0].logprobs]
        return [replace(said[0], logprobs=logprobs, top=[[] for _ in logprobs]), said[1]]
    return plan(replace(start, tokens=start.tokens[2:]))


def test_the_public_client_raises_when_the_monitor_stops_a_stream(of_mode: Clusters) -> None:
    """D21: what it has by then is a prefix, and nothing says that it is whole."""
    gate = threading.Event()
    gateway, workers = of_mode("balanced")
    junk = TEXT.swapcase().encode()[40:400]
    lies(workers, Attempt(onset=40, junk=junk, accepted=0, gates={60: gate}))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as sdk:
        text, finished = "", []
        with pytest.raises(openai.APIError, match="confirmed after it was sent"):
            for part in sdk.completions.create(
                model="hashed", prompt="x", max_tokens=2000, stream=True
            ):
                text += part.choices[0].text
                finished += [one for one in [part.choices[0].finish_reason] if one]
                if len(text) >= 50:
                    gate.set()
    assert not finished and text[:38] == TEXT[:38]


@pytest.mark.parametrize("mode", ["balanced", "guarded", "strict"])
def test_healthy_copying_is_never_cut_off(tmp_path: Path, mode: str) -> None:
    """D16: an acceptance of 100 % and a witness that finds nothing."""
    with two(tmp_path, integrity=mode) as (gateway, workers):
        for worker in workers.values():
            worker.plan = Attempt(accepted=3)
        assert all(streamed(gateway.client)[0] == TEXT for _ in range(4))
        assert len(attempts(workers)) == 4
        seen = values(gateway.client)
        assert seen["stanchion:output_anomalies_total|witness|high_acceptance"] >= 1
        assert seen["stanchion:witness_verdicts_total|confirmed"] == 0


def test_a_pair_is_left_for_another_one(tmp_path: Path) -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with cluster(tmp_path, *names) as (gateway, workers):
        gateway.until_ready()
        lies(workers, FRESH)
        assert streamed(gateway.client)[0] == TEXT
        first, second = sorted(attempts(workers), key=lambda one: len(one.tokens))
        assert first.prefill is not None and second.prefill is not None
        assert first.prefill.name != second.prefill.name
        (witness,) = witnesses(workers)
        assert witness.prefill is not None and witness.prefill.name != first.prefill.name
        decoders = {name: worker.starts for name, worker in workers.items() if worker.starts}
        assert {name: first in starts for name, starts in decoders.items()} == {
            name: second not in starts for name, starts in decoders.items()
        }


class NoOnset(Guard):
    """Goes on behind all that there is, wherever the damage began."""

    def _reject(self, said: Confirmed) -> Any:
        return super()._reject(Confirmed(len(self.tokens), said.evidence))


def test_a_splice_that_ignores_the_onset_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stanchion.gateway.integrity.Guard", NoOnset)
    with two(tmp_path) as (gateway, workers):
        lies(workers, FRESH)
        text, _, _ = streamed(gateway.client)
        assert text != TEXT


def test_off_is_off(of_mode: Clusters) -> None:
    gateway, workers = of_mode("off")
    lies(workers, FRESH)
    text, _, done = streamed(gateway.client)
    assert done and text != TEXT
    assert len(attempts(workers)) == 1 and not witnesses(workers)


def test_strict_witnesses_what_nobody_suspects(of_mode: Clusters) -> None:
    """A fluent answer to another prompt: good text, good acceptance, and scores that are not."""
    other = Attempt(onset=0, junk=[*TEXT.upper().encode(), EOS])
    for mode, text in (("balanced", TEXT.upper()), ("strict", TEXT)):
        gateway, workers = of_mode(mode)
        lies(workers, other)
        assert streamed(gateway.client)[0] == text
        assert len(witnesses(workers)) == (2 if mode == "strict" else 0)


def test_a_share_of_answers_is_witnessed_without_suspicion(tmp_path: Path) -> None:
    with two(tmp_path, witness_share=1.0) as (gateway, workers):
        lies(workers, Attempt(onset=0, junk=[*TEXT.upper().encode(), EOS]))
        assert whole(gateway.client).json()["choices"][0]["text"] == TEXT
        assert len(witnesses(workers)) == 2


def test_the_share_that_is_drawn_is_the_one_asked_for() -> None:
    names = [f"{at:032x}" for at in range(4000)]
    assert not any(drawn(one, 0.0) for one in names) and all(drawn(one, 1.0) for one in names)
    assert 320 < sum(drawn(one, 0.1) for one in names) < 480


def test_without_another_worker_strict_fails_and_balanced_says_unwitnessed(tmp_path: Path) -> None:
    for mode, right in (("strict", False), ("balanced", True)):
        with cluster(tmp_path, "both-0", integrity=mode) as (gateway, workers):
            gateway.until_ready()
            workers["both-0"].plan = Attempt(onset=len(TOKENS) - 1, junk=BAD)
            _, said, done = streamed(gateway.client)
            assert done is right
            if not right:
                assert "could not be witnessed" in said[-1]["error"]["message"]
            seen = values(gateway.client)
            assert seen["stanchion:witness_verdicts_total|unwitnessed"] == 1
            assert seen["stanchion:witness_verdicts_total|clean"] == 0


def test_beyond_its_budget_a_witness_is_not_asked(tmp_path: Path) -> None:
    with two(tmp_path, integrity="strict", witness_tokens_max=len(TOKENS) + 1) as (
        gateway,
        workers,
    ):
        lies(workers, HONEST)
        assert streamed(gateway.client)[2]
        _, said, done = streamed(gateway.client)
        assert not done and "budget" in said[-1]["error"]["message"]
        assert len(witnesses(workers)) == 1


# ---- attempts that cannot go on -------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "at"),
    [("nan", 1), ("nan", 129), ("kv loss", 1), ("kv loss", 129), ("kv loss", len(TOKENS))],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_attempt_is_taken_up_where_it_was_clean(
    of_mode: Clusters, how: str, at: int, stream: bool
) -> None:
    """Also behind the end token: all that was said is cleared, so the answer is whole."""

    def breaks(start: Start) -> Plan:
        clean = [one for one in Attempt(batch=at)(start) if one.__struct_config__.tag == "tokens"]
        said = list(clean[: 1 + (at > 1)])
        if how == "nan":
            return [*said, say(start, "?", logprobs=[float("nan")]), threading.Event()]
        return [*said, end(start, OutputSuspect("a page differs"))]

    gateway, workers = of_mode("balanced")
    lies(workers, breaks)
    if stream:
        text, _, done = streamed(gateway.client)
        assert (text, done) == (TEXT, True)
    else:
        assert whole(gateway.client).json()["choices"][0]["text"] == TEXT


def test_stop_strings_hold_over_a_splice(of_mode: Clusters) -> None:
    """The stop begins in the first attempt and is completed by the second."""
    stop = TEXT[SHOWN - 16 : SHOWN + 2]
    assert TEXT.index(stop) == SHOWN - 16
    for mode in ("balanced", "guarded", "strict"):
        gateway, workers = of_mode(mode)
        lies(workers, FRESH)
        text, said, done = streamed(gateway.client, stop=[stop])
        assert (text, done) == (TEXT[: SHOWN - 16], True)
        assert [
            one["choices"][0]["stop_reason"]
            for one in said
            if one.get("choices") and one["choices"][0]["finish_reason"]
        ] == [stop]


# ---- whose fault ----------------------------------------------------------------------------

LOST_DRAFTS = Attempt(accepted=0)


def _storm_of_lost_drafts(tmp_path: Path, mode: str) -> tuple[list[bool], Any, Workers]:
    """Every answer of the engine is right, and has lost its drafts (D15)."""
    with two(tmp_path, integrity=mode) as (gateway, workers):
        for worker in workers.values():
            worker.plan = LOST_DRAFTS
        right = [streamed(gateway.client)[0] == TEXT for _ in range(12)]
        return right, values(gateway.client), workers


def test_engine_wide_low_acceptance_with_clean_witnesses_gives_no_retries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stanchion.gateway"):
        right, seen, workers = _storm_of_lost_drafts(tmp_path, "balanced")
    assert all(right)
    made = attempts(workers)
    assert len(made) == 12, "something was made again"
    assert seen["stanchion:draft_faults_total"] >= 1
    lines = [json.loads(one.message) for one in caplog.records]
    known = {one["worker"] for one in lines if one["event"] == "draft_fault"}
    assert len(known) == seen["stanchion:draft_faults_total"]
    for name in known:
        drafted = [one.sampling.draft_tokens for one in attempts({name: workers[name]})]
        assert drafted[:3] == [None] * 3 and drafted[-1] == 0, "speculation is off there"
    told = {one.request: one.sampling.draft_tokens for one in made}
    actions = [(told[one["request"]], one["action"]) for one in lines if one["event"] == "anomaly"]
    assert (None, "witness") in actions and (0, "pass") in actions
    assert all(action == "pass" for drafts, action in actions if drafts == 0), "it went on asking"


def test_a_suspicion_taken_for_a_verdict_is_caught_by_it(tmp_path: Path) -> None:
    """The wrong variant, which the report's own rule is: every right answer is lost."""
    right, _, _ = _storm_of_lost_drafts(tmp_path, "report")
    assert not any(right)


def test_a_confirmed_worker_gets_other_salts_and_its_cache_is_out_of_use(tmp_path: Path) -> None:
    with two(tmp_path) as (gateway, workers):
        lies(workers, FRESH)
        assert streamed(gateway.client)[0] == TEXT
        (sick,) = [name for name, one in workers.items() if attempts({name: one})[0].salt == ""]
        for worker in workers.values():
            worker.starts.clear()
            worker.plan = HONEST
        for _ in range(4):
            assert streamed(gateway.client, cache_salt="mine")[0] == TEXT
        salts = {name: {one.salt for one in worker.starts} for name, worker in workers.items()}
        other = next(name for name in workers if name != sick)
        assert salts[other] == {"mine"}
        assert len(salts[sick]) == 1 and salts[sick] != {"mine"}


# ---- what it may cost -----------------------------------------------------------------------


def test_attempts_stay_within_the_budget(tmp_path: Path) -> None:
    with two(tmp_path, retries_spare=0) as (gateway, workers):
        junk = Attempt(onset=0, junk=[*BAD, *b"more"])
        for worker in workers.values():
            worker.plan = junk
        failed = [whole(gateway.client).status_code for _ in range(30)]
        assert failed == [502] * 30
        assert 30 < len(attempts(workers)) <= 33
        seen = values(gateway.client)
        assert seen["stanchion:quality_retries_total|over_budget"] >= 27


def test_what_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "stanchion.gateway"),
        two(tmp_path, integrity="guarded") as (gateway, workers),
    ):
        lies(workers, FRESH)
        assert streamed(gateway.client)[0] == TEXT
        seen = values(gateway.client)
    assert seen["stanchion:output_anomalies_total|witness|odd_characters"] == 1
    assert seen["stanchion:witness_verdicts_total|confirmed"] == 1
    assert seen["stanchion:quality_retries_total|completed"] == 1
    assert seen["stanchion:witness_tokens_total"] >= ONSET
    assert seen["stanchion:monitored_answers_total|report"] == 1
    lines = [json.loads(one.message) for one in caplog.records if one.name == "stanchion.gateway"]
    assert {one["event"] for one in lines} >= {"anomaly", "verdict", "generation"}
    assert all(set(line) <= set(Line.__struct_fields__) for line in lines)
    assert not any(word in caplog.text for word in ("ponse", "line 1"))
    (verdict,) = [one for one in lines if one["event"] == "verdict"]
    assert (verdict["verdict"], verdict["token"]) == ("confirmed", ONSET)


def test_a_client_that_leaves_frees_the_witness_too(tmp_path: Path) -> None:
    with two(tmp_path, integrity="strict") as (gateway, workers):

        def plan(start: Start) -> Plan:
            return [threading.Event()] if witnessing(start) else HONEST(start)

        for worker in workers.values():
            worker.plan = plan
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(base_url=gateway.url, timeout=0.5, trust_env=False) as client,
        ):
            streamed(client)
        other = next(one for one in workers.values() if any(map(witnessing, one.starts)))
        assert other.wait_for(lambda: len(other.aborts) == 1)


# ---- what carries over ----------------------------------------------------------------------


def _start(**sampling: Any) -> Start:
    return Start(request="r", tokens=[1, 2], sampling=Sampling(max_tokens=10, **sampling))


def test_a_resumed_start_asks_for_the_rest_and_nothing_else() -> None:
    start = _start(min_tokens=4, temperature=0.7, seed=3, stop_ids=(9,), repetition_penalty=1.1)
    rest = resumed(start, [5, 6, 7], "r2", "salt")
    assert (rest.request, rest.salt, rest.tokens) == ("r2", "salt", [1, 2, 5, 6, 7])
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (7, 1)
    same = ("temperature", "seed", "stop_ids", "repetition_penalty", "top_p", "logit_bias")
    assert all(getattr(rest.sampling, one) == getattr(start.sampling, one) for one in same)
    assert resumed(start, [5] * 6, "r2", "").sampling.min_tokens == 0


def test_a_resumed_start_says_what_of_it_is_the_answers() -> None:
    """Twice resumed, its grammar and its penalties still count from the answer's first token."""
    start = replace(_start(presence_penalty=1.0), grammar="{}")
    again = resumed(resumed(start, [5, 6, 7], "r2", ""), [8], "r3", "")
    assert (again.said, again.tokens, again.grammar) == (4, [1, 2, 5, 6, 7, 8], "{}")
    assert again.sampling.presence_penalty == 1.0


def test_draws_do_not_depend_on_the_attempts_name() -> None:
    start = seeded(_start())
    assert start.sampling.seed is not None
    assert resumed(start, [5], "r2", "").sampling.seed == start.sampling.seed
    assert seeded(_start(temperature=0.0)).sampling.seed is None
    assert seeded(_start(seed=3)).sampling.seed == 3


def test_what_scores_its_prompt_is_not_resumed_in_the_middle() -> None:
    for one in ({}, {"repetition_penalty": 1.5}, {"presence_penalty": 0.1}):
        assert resumable(_start(**one))
    assert not resumable(_start(prompt_logprobs=0))


def test_tokens_that_are_a_whole_answer_are_not_gone_on_with() -> None:
    style = Style((), stops=StopSet(()), end_ids=frozenset({9}))
    sampling = Sampling(max_tokens=4, min_tokens=2)
    assert finished(sampling, style, [1, 2, 9]) is not None
    assert finished(sampling, style, [1, 9]) is None, "below min_tokens it ends nothing"
    assert finished(sampling, style, [1, 2, 3]) is None
    assert finished(sampling, style, [1, 2, 3, 4]) is not None


@pytest.mark.parametrize(
    "wrong", [{"integrity": "loose"}, {"hold_tokens": -1}, {"retries_share": float("nan")}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GatewaySettings(**wrong).check()
