"""Replay: when things are sent, what is heard, and what is made of it. No network, no waiting."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError
from stanchion.core.messages import Spec
from stanchion.core.recording import Content, Recorded, Times
from stanchion.core.request import Sampling
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.lab import corpus
from stanchion.lab.formats.sniff import read
from stanchion.lab.replay_body import Bodies
from stanchion.lab.replay_plan import (
    Pace,
    Stage,
    one_by_one,
    pace,
    plan,
    resumed,
    share,
    spread,
)
from stanchion.lab.replay_run import Limits
from stanchion.lab.replay_stream import StreamFold
from stanchion.lab.replay_text import Scale, Stretches, prompt
from stanchion.lab.replay_timing import itl_s, lateness, timing, verdict
from stanchion.lab.results import Loop, Result, Writer, read_results

from .rig import (
    DONE,
    Pieces,
    Scripted,
    chunk,
    delta,
    left,
    plain,
    recorded,
    replay,
    usage,
)

ONE = pace("1")


def every(seconds: float, count: int, **more: Any) -> list[Recorded]:
    return [recorded(f"r{at}", seconds * at, **more) for at in range(count)]


# ---- D30: the clock begins at the schedule --------------------------------------------------


def test_waiting_for_a_place_counts() -> None:
    """A server of exactly 500 ms; 10 requests a second; one at a time; 8 requests."""
    server = Scripted(lambda path, body: plain(after_s=0.5))
    results = replay(plan(every(0.1, 8), "open", ONE), server, Limits(concurrency=1))
    told = timing(results)
    assert server.most_open == 1
    assert told.latency_due.mean == pytest.approx(1.9)
    assert told.latency_due.most == pytest.approx(3.3)
    # What a clock that begins at the send would have said of it:
    assert told.latency_sent.mean == pytest.approx(0.5)
    assert told.latency_sent.p99 == pytest.approx(0.5)
    late = [one.lateness_s for one in sorted(results, key=lambda one: one.due)]
    assert late == pytest.approx([0.4 * at for at in range(8)])
    said = lateness([one for one in late if one is not None], bound_s=0.1)
    assert said.p50_s == pytest.approx(1.4) and said.max_s == pytest.approx(2.8)
    valid, why = verdict(said, concurrency=1, missing=0)
    assert not valid and "within 0.1 s" in why and "at most 1 " in why


def test_without_a_cap_the_same_load_is_on_time() -> None:
    server = Scripted(lambda path, body: plain(after_s=0.5))
    results = replay(plan(every(0.1, 8), "open", ONE), server)
    told = timing(results)
    assert server.most_open == 5
    assert told.latency_due.most == pytest.approx(0.5)
    assert told.lateness.most == pytest.approx(0.0, abs=1e-9)
    assert verdict(lateness([0.0] * 8, 0.1), None, 0) == (True, "")
    assert verdict(lateness([0.0] * 8, 0.1), None, 2)[0] is False


def test_speed_goes_for_the_cap_of_gaps_too() -> None:
    """Gaps of 30 s and 600 s, capped at 60 s of the trace's time, at speed 10: 3 s and 6 s."""
    trace = [recorded("a", 5.0), recorded("b", 35.0), recorded("c", 635.0)]
    server = Scripted(lambda path, body: plain())
    results = replay(plan(trace, "open", pace("10", gap_max_s=60.0)), server)
    assert [one.due for one in results] == pytest.approx([0.0, 3.0, 9.0])
    assert [at for at, _, _ in server.asked] == pytest.approx([1.0, 4.0, 10.0])


def test_pauses_of_sessions_are_cut_and_sped_up_as_well() -> None:
    trace = [
        recorded("a", 0.0, session="s", end=1.0),
        recorded("b", 601.0, session="s", turn=1, think_s=600.0),
    ]
    server = Scripted(lambda path, body: plain(after_s=2.0))
    results = replay(plan(trace, "session", pace("10", gap_max_s=60.0)), server)
    assert [one.due for one in results] == pytest.approx([0.0, 2.0 + 6.0])


def test_load_goes_up_in_stages() -> None:
    """1x for 10 s, then 2x for 10 s, then 4x."""
    warped = pace("1x10,2x10,4")
    assert [warped.at(one) for one in (0, 5, 10, 20, 30, 34)] == [0, 5, 10, 15, 20, 21]
    assert [warped.speed_at(one) for one in (0, 9.9, 10, 19.9, 20, 99)] == [1, 1, 2, 2, 4, 4]
    # A pause of 10 s that begins at 9 s: one second at 1x, nine at 2x.
    assert warped.pause(10.0, 9.0) == pytest.approx(1.0 + 4.5)
    assert warped.words() == "1x10,2x10,4"


@given(st.lists(st.tuples(st.floats(0.1, 20), st.floats(0.1, 50)), max_size=4), st.floats(0.1, 20))
@settings(max_examples=60, deadline=None)
def test_a_warped_clock_never_goes_back(stages: list[tuple[float, float]], last: float) -> None:
    warped = Pace((*(Stage(speed, s) for speed, s in stages), Stage(last)))
    times = [warped.at(one) for one in np.linspace(0, 500, 300)]
    assert times[0] == 0 and all(later > earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize("said", ["", "fast", "0", "-1", "1x10", "1,2", "2x0,3", "1x,2"])
def test_speeds_that_make_no_sense_are_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="speed"):
        pace(said)


# ---- who waits for whom ---------------------------------------------------------------------


def test_a_session_waits_for_its_own_answers_and_thinks() -> None:
    """The server is slower than the recorded one: the second turn moves, the other session not."""
    trace = [
        recorded("a0", 0.0, session="a", end=1.0),
        recorded("b0", 2.0, session="b", end=3.0),
        recorded("a1", 4.0, session="a", turn=1, think_s=3.0),
    ]
    server = Scripted(lambda path, body: plain(after_s=5.0))
    by_name = {one.request: one for one in replay(plan(trace, "session", ONE), server)}
    assert by_name["a1"].due == pytest.approx(5.0 + 3.0)
    assert by_name["b0"].due == pytest.approx(2.0)
    open_ = {one.request: one for one in replay(plan(trace, "open", ONE), server)}
    assert open_["a1"].due == pytest.approx(4.0)


SUBAGENTS = [
    recorded("main 0", 0.0, session="s", end=2.0),
    recorded("sub 0", 3.0, session="s", agent="x", end=5.0),
    recorded("sub 1", 6.0, session="s", agent="x", turn=1, think_s=1.0, end=8.0),
    recorded("other 0", 3.5, session="t", parent="s", end=4.0),
    recorded("main 1", 9.0, session="s", turn=1, think_s=7.0, end=10.0),
]


def test_an_agent_waits_for_its_sub_agents() -> None:
    made = {step.recorded.request: step for step in plan(SUBAGENTS, "session", ONE).steps}
    number = {name: step.number for name, step in made.items()}
    assert made["main 0"].after == ()
    assert made["sub 0"].after == (number["main 0"],) and made["sub 0"].gap_s == 1.0
    assert made["sub 1"].after == (number["sub 0"],) and made["sub 1"].gap_s == 1.0
    assert made["other 0"].after == (number["main 0"],) and made["other 0"].gap_s == 1.5
    # The pause of the main agent is from the last of what it waited for, not from its own answer.
    assert set(made["main 1"].after) == {number["main 0"], number["sub 1"], number["other 0"]}
    assert made["main 1"].gap_s == 1.0
    server = Scripted(lambda path, body: plain(after_s=10.0))
    results = {one.request: one for one in replay(plan(SUBAGENTS, "session", ONE), server)}
    assert results["main 1"].due == pytest.approx(results["sub 1"].end + 1.0)


def as_served(trace: list[Recorded]) -> tuple[list[Recorded], Scripted]:
    """The trace with bodies that name its requests, and a server that takes as long as was
    recorded."""
    named, took = [], {}
    for one in trace:
        body = {"messages": [{"role": "user", "content": one.request}]}
        named.append(msgspec.structs.replace(one, content=Content(body=body)))
        took[one.request] = (one.times.end or one.times.arrival) - one.times.arrival
    return named, Scripted(lambda path, body: plain(after_s=took[body["messages"][0]["content"]]))


def check_reproduced(trace: list[Recorded], loop: Loop) -> None:
    named, server = as_served(trace)
    results = {one.request: one for one in replay(plan(named, loop, ONE, aborts=False), server)}
    begun = min(one.times.arrival for one in trace)
    for one in trace:
        told = results[one.request]
        wanted = one.times.arrival - begun
        assert told.send == pytest.approx(wanted, rel=0.01, abs=0.01), one.request
        if one.times.end is not None:
            assert told.end == pytest.approx(one.times.end - begun, rel=0.01, abs=0.01)


@pytest.mark.parametrize("loop", ["open", "session"])
def test_a_server_as_fast_as_the_recorded_one_gives_the_recorded_times(loop: Loop) -> None:
    check_reproduced(SUBAGENTS, loop)


@pytest.mark.parametrize("loop", ["open", "session"])
def test_recorded_sessions_of_claude_code_are_reproduced(loop: Loop) -> None:
    folder = os.environ.get("STANCHION_TRACES")
    if folder is None:
        pytest.skip("STANCHION_TRACES is not set")
    trace = list(read(Path(folder) / "weka_claude_code_sessions.jsonl.gz"))
    check_reproduced(trace, loop)


def test_sessions_that_would_begin_at_once_are_spread() -> None:
    trace = [
        recorded("a0", 0.0, session="a", end=1.0),
        recorded("a1", 5.0, session="a", turn=1, end=6.0),
        recorded("b0", 0.0, session="b"),
        recorded("sub", 2.0, session="s", parent="a", agent="x"),
        recorded("c0", 0.0, session="c"),
    ]
    moved = {one.request: one.times for one in spread(trace, 30.0)}
    assert {name: times.arrival for name, times in moved.items()} == {
        "a0": 0.0, "a1": 5.0, "sub": 2.0, "b0": 10.0, "c0": 20.0
    }  # fmt: skip
    assert moved["a1"].end == 6.0 and moved["b0"].end is None
    with pytest.raises(ConfigError, match="spread is -1"):
        spread(trace, -1.0)


def test_a_trace_without_ends_says_itself_how_long_its_clients_waited() -> None:
    trace = [recorded("a", 0.0, session="s"),
             recorded("b", 60.0, session="s", turn=1, think_s=4.0)]  # fmt: skip
    server = Scripted(lambda path, body: plain(after_s=2.0))
    assert replay(plan(trace, "session", ONE), server)[1].due == pytest.approx(2.0 + 4.0)


def test_what_failed_holds_nobody_up() -> None:
    trace = [recorded("a", 0.0, session="s", end=1.0), recorded("b", 3.0, session="s", turn=1)]
    server = Scripted(lambda path, body: [(0.1, b"")], status=500)
    results = replay(plan(trace, "session", ONE), server)
    assert [one.ending for one in results] == ["failed", "failed"]
    assert results[1].due == pytest.approx(0.1 + 2.0)


def test_copies_are_apart_in_time_and_salt() -> None:
    made = plan(every(1.0, 4), "open", ONE, copies=4, seed=1)
    assert len(made.steps) == 16
    assert [step.at_s for step in made.steps if step.recorded.request == "r0"] == pytest.approx(
        [0.0, 0.25, 0.5, 0.75]
    )
    salts = [step.salt for step in made.steps if step.recorded.request == "r0"]
    assert salts[0] == "" and len(set(salts)) == 4
    assert salts != [step.salt for step in plan(every(1.0, 4), "open", ONE, 4, seed=2).steps[::4]]
    server = Scripted(lambda path, body: plain())
    replay(made, server)
    assert len({body.get("cache_salt", "") for _, _, body in server.asked}) == 4


def test_copies_of_sessions_begin_between_sessions() -> None:
    """And not all within the gap of two requests, where a long first prompt meets its copies."""
    trace = [
        recorded(f"{session} {turn}", start + turn, session=session, turn=turn, end=start + turn)
        for session, start in (("s", 0.0), ("t", 12.0))
        for turn in range(6)
    ]
    for asked, apart in ((trace, 3.0), (trace[:6], 5 / 4)):
        made = plan(asked, "session", ONE, copies=4)
        begun = [step.at_s for step in made.steps if step.recorded.request == "s 0"]
        assert begun == pytest.approx([apart * copy for copy in range(4)])


def test_processes_share_sessions_whole() -> None:
    made = plan(SUBAGENTS, "session", ONE, copies=6)
    parts = [share(made, at, 3) for at in range(3)]
    assert sorted(step.number for part in parts for step in part.steps) == list(range(30))
    for part in parts:
        held = {step.number for step in part.steps}
        assert all(set(step.after) <= held for step in part.steps)
    assert sum(bool(part.steps) for part in parts) > 1


def test_a_run_is_taken_up_where_it_was() -> None:
    made = plan(SUBAGENTS, "session", ONE)
    done = frozenset({("main 0", 0), ("sub 0", 0)})
    left_, ended = resumed(made, done, base_s=20.0)
    server = Scripted(lambda path, body: plain(after_s=1.0))
    results = {one.request: one for one in replay(left_, server, ended=ended)}
    assert results.keys() == {"sub 1", "other 0", "main 1"}
    assert results["sub 1"].due == pytest.approx(21.0)
    later, _ = resumed(plan(every(10.0, 4), "open", ONE), frozenset({("r0", 0), ("r1", 0)}), 5.0)
    assert [step.at_s for step in later.steps] == [5.0, 15.0]


def test_alone_means_one_at_a_time_and_cold_each_time() -> None:
    server = Scripted(lambda path, body: plain(after_s=2.0))
    results = replay(one_by_one(every(0.0, 2), times=3, seed=4), server)
    assert server.most_open == 1
    assert [(one.request, one.copy) for one in results] == [
        ("r0", 0), ("r0", 1), ("r0", 2), ("r1", 0), ("r1", 1), ("r1", 2)
    ]  # fmt: skip
    assert len({body["cache_salt"] for _, _, body in server.asked}) == 6
    assert [one.lateness_s for one in results] == pytest.approx([0.0] * 6, abs=1e-6)


# ---- clients that leave ---------------------------------------------------------------------


def test_clients_leave_as_they_did() -> None:
    """One before the first token, by its patience; one after two tokens, however slow they are."""
    slow = [(1.0, delta("x")) for _ in range(9)]
    trace = [
        recorded("a", 0.0, aborted=left(0.75)),
        recorded("b", 0.0, aborted=left(0.5, after_tokens=2)),
    ]
    server = Scripted(lambda path, body: slow)
    results = {one.request: one for one in replay(plan(trace, "open", pace("10")), server)}
    assert [one.ending for one in results.values()] == ["aborted", "aborted"]
    assert results["a"].end == pytest.approx(0.75) and results["a"].first_token is None
    assert results["b"].end == pytest.approx(2.0) and results["b"].text == "xx"
    assert server.left == 2
    stay = replay(plan(trace, "open", ONE, aborts=False), Scripted(lambda path, body: plain()))
    assert [one.ending for one in stay] == ["completed", "completed"]


def test_what_was_said_to_clients_that_left_is_on_the_books() -> None:
    """D23: 1,000 streams, most of them cut at random. Every one has one result, and the tokens of
    all results are those that the server had sent."""
    rng = np.random.default_rng(23)
    trace = []
    for at in range(1000):
        tokens, patience = int(rng.integers(0, 12)), float(rng.uniform(0.0, 1.2))
        cut = left(patience, tokens) if rng.integers(8) else None
        trace.append(recorded(f"r{at}", 0.01 * at, aborted=cut))
    server = Scripted(lambda path, body: [(0.1, one_token(at)) for at in range(10)])
    results = replay(plan(trace, "open", ONE), server)
    assert len({one.key for one in results}) == len(results) == 1000
    heard = [one.output_tokens or 0 for one in results]
    assert sum(heard) == server.yielded
    assert [len(one.tokens) for one in results] == heard
    kinds = timing(results).endings
    assert kinds["aborted"] > 600 and kinds["completed"] > 50 and kinds["failed"] == 0


def one_token(number: int) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": [number]}
    return chunk(choices=[choice | {"finish_reason": "length" if number == 9 else None}])


def test_whoever_is_slow_for_ever_has_failed() -> None:
    server = Scripted(lambda path, body: [(99.0, DONE)])
    (result,) = replay(plan(every(1.0, 1), "open", ONE), server, Limits(timeout_s=3.0))
    assert result.ending == "failed" and result.error == "it took over 3 s"
    assert result.end == pytest.approx(3.0)


# ---- D31: what a stream says ----------------------------------------------------------------


def one_result(pieces: Pieces, **server: Any) -> Result:
    (result,) = replay(
        plan(every(1.0, 1), "open", ONE), Scripted(lambda path, body: pieces, **server)
    )
    return result


ROLE = delta(role="assistant", content="")


def called(text: str, name: str | None = None) -> bytes:
    function = {"arguments": text} | ({"name": name} if name else {})
    return delta(tool_calls=[{"index": 0, "function": function}])


def test_an_empty_stream_is_no_success() -> None:
    nothing = one_result([(0.3, DONE)])
    assert nothing.ending == "empty" and nothing.first_token is None
    silent = one_result([(0.3, b"")])
    assert silent.ending == "failed" and "without a finish reason" in silent.error


def test_a_role_is_no_token() -> None:
    result = one_result([(0.2, ROLE), (0.4, delta(finish="stop") + DONE)])
    assert result.ending == "empty"
    assert result.first_byte == pytest.approx(0.2) and result.first_token is None


def test_reasoning_is_the_first_token_and_content_comes_later() -> None:
    result = one_result(
        [
            (0.2, ROLE),
            (0.3, delta(reasoning_content="hm")),
            (6.0, delta("yes")),
            (0.5, delta("!")),
            (0.1, delta(finish="stop") + usage(10, 3) + DONE),
        ]
    )
    assert result.ending == "completed" and (result.reasoning, result.text) == ("hm", "yes!")
    assert result.first_byte == pytest.approx(0.2)
    assert result.first_token == pytest.approx(0.5)
    assert result.first_content == pytest.approx(6.5)
    assert result.last_token == pytest.approx(7.0) and result.end == pytest.approx(7.1)
    assert itl_s(result) == pytest.approx(6.5 / 2)
    assert result.gap_s_max == pytest.approx(6.0)


def test_a_call_alone_is_an_answer() -> None:
    result = one_result(
        [(0.5, called("", "ls")), (0.5, called('{"a":1}')), (0.0, delta(finish="tool_calls"))]
    )
    assert result.ending == "completed" and result.finish == "tool_calls"
    assert result.calls == ('ls {"a":1}',) and result.said == 'ls {"a":1}'
    assert result.first_token == pytest.approx(0.5) and result.first_content is None
    assert result.output_tokens is None and itl_s(result) is None  # nobody counted them


def test_a_usage_alone_is_empty() -> None:
    result = one_result([(0.4, usage(10, 0)), (0.1, DONE)])
    assert result.ending == "empty" and result.input_tokens == 10


def test_an_error_after_the_first_token_has_failed() -> None:
    result = one_result(
        [(0.5, delta("half")), (0.5, chunk(error={"message": "502 lost"})), (0.0, DONE)]
    )
    assert result.ending == "failed" and result.error == "502 lost"
    assert result.text == "half" and not result.measured
    broken = one_result([(0.5, delta("half"))], breaks=True)
    assert broken.ending == "failed" and broken.error == "the connection broke"
    refused = one_result([(0.1, b'{"error": {"message": "no"}}')], status=429)
    assert refused.ending == "failed" and refused.error == "429 no" and refused.status == 429


def test_three_tokens_in_a_chunk_are_three_tokens() -> None:
    """Chunks at 1.0, 1.3 and 1.6 s, nine tokens: 0.6 s over eight gaps."""
    result = one_result(
        [(1.0, delta("abc")), (0.3, delta("def")), (0.3, delta("ghi")),
         (0.0, delta(finish="length") + usage(4, 9) + DONE)]
    )  # fmt: skip
    assert result.output_tokens == 9
    assert itl_s(result) == pytest.approx(0.6 / 8)
    ids = chunk(
        choices=[{"index": 0, "text": "abc", "token_ids": [1, 2, 3], "finish_reason": "stop"}]
    )
    assert one_result([(0.5, ids)]).output_tokens == 3


def test_endings_are_counted_apart_and_stay_out_of_latencies() -> None:
    scripts: dict[str, Pieces] = {
        "r0": plain(after_s=1.0),
        "r1": [(0.001, DONE)],
        "r2": [(0.002, delta("x")), (0.0, chunk(error={"message": "lost"}))],
        "r3": [(9.0, DONE)],
        "r4": plain(after_s=3.0),
    }
    trace = every(0.0, 5)
    trace[3] = recorded("r3", 0.0, aborted=left(0.5))
    told = timing(
        replay(
            plan(trace, "open", ONE),
            Scripted(lambda path, body: scripts[body["messages"][0]["content"]]),
        )
    )
    assert told.endings == {"completed": 2, "failed": 1, "aborted": 1, "empty": 1}
    assert told.ttft_due.count == 2 and told.ttft_due.p50 == pytest.approx(2.0)
    assert told.latency_sent.mean == pytest.approx(2.0)
    assert told.requests == 5 and told.tokens == 2


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_how_bytes_are_cut_says_nothing(data: st.DataObject) -> None:
    raw = b": waiting\r\n\r\n" + ROLE + delta("grün ✓") + called("{}", "f") + usage(3, 4)
    raw += delta(finish="stop") + DONE
    whole = StreamFold()
    whole.push(1.0, raw)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    cut = StreamFold()
    for first, last in pairwise([0, *cuts, len(raw)]):
        cut.push(1.0, raw[first:last])
    assert cut.ending("closed") == whole.ending("closed") == "completed"
    assert cut.heard.texts == whole.heard.texts == ["grün ✓"]
    assert cut.heard.calls_in_order() == whole.heard.calls_in_order()


def test_events_that_are_no_chunks_fail_the_request() -> None:
    assert "no chunk" in one_result([(0.1, b"data: {nonsense\n\n"), (0.1, DONE)]).error
    assert one_result([(0.1, b"data: [1, 2]\n\n"), (0.1, DONE)]).ending == "failed"


# ---- speculation ----------------------------------------------------------------------------


def test_running_acceptance_is_read_back() -> None:
    """8 steps of 3 drafts, 12 accepted, 20 tokens; then vLLM's words for the same."""
    running = chunk(
        choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}],
        spec_accept_length=20 / 8, spec_accept_rate=12 / 24, spec_accept_prefix=12 / 8,
        spec_verify_steps=8,
    )  # fmt: skip
    assert one_result([(0.5, running)]).spec == Spec(8, 20, 24, 12)
    summary = {"num_spec_steps": 8, "num_draft_tokens": 24, "num_accepted_draft_tokens": 12}
    last = chunk(
        choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}],
        metrics={"speculative_decoding": summary | {"acceptance_histogram": [1, 3, 3, 1]}},
    )
    told = one_result([(0.5, last)])
    assert told.spec == Spec(8, 20, 24, 12) and told.accepts == (1, 3, 3, 1)
    none = chunk(choices=[], spec_accept_length=1.0, spec_accept_rate=0.0,
                 spec_accept_prefix=0.0, spec_verify_steps=8)  # fmt: skip
    spec = one_result([(0.1, delta("x")), (0.1, none + delta(finish="stop"))]).spec
    assert spec is not None and spec.accepted == 0 and spec.proposed > 0


# ---- bodies ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(model_folder("tiny"))


@pytest.fixture(scope="module")
def stretches(vocabulary: Vocabulary) -> Stretches:
    return Stretches(vocabulary, corpus.tokens(vocabulary))


def only(trace: Recorded, bodies: Bodies) -> tuple[str, dict[str, Any]]:
    (step,) = plan([trace], "open", ONE).steps
    return bodies.of(step)


def test_content_is_sent_as_it_was_and_never_forced_to_go_on() -> None:
    said = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "n": 4,
            "model": "theirs", "max_tokens": 900, "temperature": 0.5, "stream": False,
            "tools": [{"type": "function"}]}  # fmt: skip
    trace = recorded("r", 0.0, content=Content(body=said))
    path, body = only(trace, Bodies(model="ours", extras=frozenset({"ids", "spec", "logprobs"})))
    assert path == "/v1/chat/completions"
    assert "ignore_eos" not in body and "n" not in body
    assert body["model"] == "ours" and body["messages"] == said["messages"]
    assert body["tools"] == said["tools"] and body["max_tokens"] == 900
    assert body["stream"] and body["stream_options"] == {
        "include_usage": True, "include_spec": True
    }  # fmt: skip
    assert body["return_token_ids"] and body["logprobs"] is True
    again = only(trace, Bodies(model="ours"))[1]
    assert isinstance(body["seed"], int) and again["seed"] == body["seed"]
    assert only(trace, Bodies(model="ours", max_tokens=64))[1]["max_tokens"] == 64


def test_requests_of_the_other_api_are_put_in_these_terms() -> None:
    said = {"model": "m", "max_tokens": 7, "system": "be brief",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            }  # fmt: skip
    path, body = only(recorded("r", 0.0, api="messages", content=Content(body=said)), Bodies("m"))
    assert path == "/v1/chat/completions" and body["max_tokens"] == 7
    assert [one["role"] for one in body["messages"]] == ["system", "user"]
    assert not {"tools", "tool_choice"} & set(body), "an empty list of tools is refused elsewhere"
    with pytest.raises(ConfigError, match="r: its content is no request"):
        only(recorded("r", 0.0, api="messages", content=Content(body={"x": 1})), Bodies("m"))


@given(st.lists(st.tuples(st.text("abc", max_size=3), st.integers(1, 70)), min_size=1, max_size=9))
@settings(max_examples=80, deadline=None)
def test_made_text_has_exactly_its_tokens(
    vocabulary: Vocabulary, stretches: Stretches, blocks: list[tuple[str, int]]
) -> None:
    """However blocks are put together, their text is encoded to the tokens they are made of."""
    made = [stretches.tokens(name, count) for name, count in blocks]
    assert [len(one) for one in made] == [count for _, count in blocks]
    joined = [token for one in made for token in one]
    assert vocabulary.encode(stretches.text(joined), special=False) == joined


def hashed(name: str, *blocks: str, tokens: int, **more: Any) -> Recorded:
    return Recorded(
        request=name, session=name, times=Times(arrival=0.0), blocks=blocks, input_tokens=tokens,
        **more,
    )  # fmt: skip


def test_prefixes_are_shared_as_they_were(stretches: Stretches) -> None:
    scale = Scale(64, 64)
    one = prompt(hashed("a", "x", "y", tokens=150), stretches, scale)
    two = prompt(hashed("b", "x", "z", tokens=150), stretches, scale)
    assert len(one) == len(two) == 150
    assert one[:64] == two[:64] and one[64:128] != two[64:128] and one[128:] != two[128:]
    salted = prompt(hashed("a", "x", "y", tokens=150), stretches, scale, "other")
    assert salted[:64] != one[:64]
    small = prompt(hashed("a", "x", "y", tokens=150), stretches, Scale(64, 4))
    assert len(small) == 4 + 4 + 1
    tailed = hashed("a", "x", tokens=70, tail="t"), hashed("b", "x", tokens=70, tail="t")
    assert prompt(tailed[0], stretches, scale) == prompt(tailed[1], stretches, scale)


def test_made_prompts_have_no_blocks_but_their_length(stretches: Stretches) -> None:
    made = Bodies("m", stretches=lambda: stretches, scale=Scale(1, 1))
    trace = hashed("azure", tokens=3000, output_tokens=28)
    path, body = only(trace, made)
    assert path == "/v1/completions" and body["max_tokens"] == 28 and body["temperature"] == 0.0
    assert "ignore_eos" not in body and "seed" not in body
    longer = Bodies("m", stretches=lambda: stretches, answer_tokens=96)
    assert only(trace, longer)[1]["max_tokens"] == 96
    sampled = hashed("b", tokens=9, sampling=Sampling(max_tokens=5, top_p=0.9, ignore_eos=True))
    body = only(sampled, made)[1]
    assert body["temperature"] == 1.0 and body["top_p"] == 0.9 and "ignore_eos" not in body
    ids = only(trace, Bodies("m", stretches=lambda: stretches, as_ids=True))[1]["prompt"]
    assert len(ids) == 3000
    chat = only(trace, Bodies("m", api="chat", stretches=lambda: stretches))[1]
    assert chat["messages"][0]["role"] == "user"
    with pytest.raises(ConfigError, match="azure: no content"):
        only(trace, Bodies("m"))
    with pytest.raises(ConfigError, match="block-tokens is 65"):
        Scale(64, 65)


# ---- results on disk ------------------------------------------------------------------------


def test_a_crash_costs_the_last_line(tmp_path: Path) -> None:
    results = replay(plan(every(1.0, 3), "open", ONE), Scripted(lambda path, body: plain()))
    writer = Writer(tmp_path, 1, 0)
    for one in results:
        writer.add(one)
    writer.close()
    assert list(read_results(tmp_path)) == results
    path = tmp_path / "results-001-000.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert list(read_results(tmp_path)) == results[:2]
    again = Writer(tmp_path, 2, 0)
    again.add(results[2])
    again.add(results[0])  # had before: its first is the one that counts
    again.close()
    assert list(read_results(tmp_path)) == results
    body = json.loads(bytes(results[0].body))
    assert body["messages"][0]["content"] == "r0"


def test_lines_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results-001-000.jsonl"
    path.write_bytes(msgspec.json.encode({"request": "a"}) + b"\n")
    with pytest.raises(ConfigError, match=r"results-001-000\.jsonl:1: .*session"):
        list(read_results(tmp_path))
    path.write_bytes(b"\x80\x04\x95pickle\n")
    with pytest.raises(ConfigError, match=r"jsonl:1"):
        list(read_results(tmp_path))
