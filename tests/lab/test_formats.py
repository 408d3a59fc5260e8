"""Every format: what is read from it, what is refused with file and line, and that it is data."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stanchion.core.errors import TraceError
from stanchion.core.recording import (
    HEADER,
    ClientAbort,
    Content,
    Header,
    Recorded,
    Segment,
    Times,
)
from stanchion.lab.formats import lines, mooncake, own, weka
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.sniff import read

TRACES = os.environ.get("STANCHION_TRACES")
OURS = Header(source="stanchion", model="tiny", block_tokens=16, level="none")


def lines_of(path: Path, *said: Any) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in said))
    return path


def request(number: int, **more: Any) -> Recorded:
    given: dict[str, Any] = {
        "request": f"r{number}",
        "session": "s",
        "turn": number,
        "times": Times(arrival=number * 1.5, end=number * 1.5 + 1),
        "input_tokens": 40,
        "output_tokens": 9,
        "blocks": ("a" * 16, "b" * 16),
        "tail_tokens": 8,
        "tail": f"{number:016x}",
    }
    return Recorded(**given | more)


# ---- ours -----------------------------------------------------------------------------------


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    content = Content(body={"messages": [{"role": "user", "content": "a\nb"}]}, text="\u2028c")
    left = ClientAbort(at_s=0.5, after_tokens=3)
    told = [request(0, content=content), request(1, aborted=left), request(2)]
    assert own.write(tmp_path / "r", OURS, told) == 3
    for path in (tmp_path / "r", tmp_path / "r" / HEADER):
        trace = read(path)
        assert (list(trace), list(trace), trace.header, trace.torn) == (told, told, OURS, 0)
    with pytest.raises(TraceError, match="is not empty"):
        own.write(tmp_path / "r", OURS, told)


def test_segments_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SEGMENT_BYTES", 2000)
    told = [request(number) for number in range(100)]
    own.write(tmp_path / "r", OURS, told)
    assert len(list((tmp_path / "r").iterdir())) > 5
    assert list(read(tmp_path / "r")) == told


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_line_is_left_out_and_counted(tmp_path: Path, cut: int) -> None:
    told = [request(number) for number in range(3)]
    own.write(tmp_path / "r", OURS, told)
    (path,) = (tmp_path / "r").glob("events-*")
    path.write_bytes(path.read_bytes()[:-cut])
    trace = read(tmp_path / "r")
    assert (list(trace), trace.torn) == (told[:2], 1)


WRONG_RECORDS: list[tuple[dict[str, Any], str]] = [
    ({"times": Times(arrival=-1.0)}, "times.arrival is -1"),
    ({"times": Times(arrival=5.0, end=4.0)}, "times.end is 4.0, before the arrival"),
    ({"times": Times(arrival=1e12)}, "times.arrival is 1000000000000"),
    ({"input_tokens": -40}, "input_tokens is -40"),
    ({"blocks": ("a" * 16,)}, "1 of 16 tokens and a tail of 8 are 24 tokens"),
    ({"tail_tokens": 24, "blocks": ("a" * 16,)}, "a tail of 24"),
    ({"think_s": -0.5}, "think_s is -0.5"),
    ({"aborted": ClientAbort(at_s=1.0, after_tokens=-1)}, "aborted.after_tokens is -1"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_RECORDS)
def test_what_makes_no_sense_is_refused_with_its_line(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    own.write(tmp_path / "r", OURS, [request(0), request(1, **wrong)])
    with pytest.raises(TraceError, match=f"events-000001.jsonl:2: .*{words}"):
        list(read(tmp_path / "r"))


def test_headers_of_other_programs_are_refused(tmp_path: Path) -> None:
    own.write(tmp_path / "r", msgspec.structs.replace(OURS, format=2), [])
    with pytest.raises(TraceError, match="format is 2"):
        read(tmp_path / "r")
    with pytest.raises(TraceError, match=r"no recording: header\.json is not in it"):
        read(tmp_path)


# ---- Mooncake -------------------------------------------------------------------------------


def moon(stamp: float, tokens: int, ids: list[int], out: int = 5) -> dict[str, Any]:
    return {"timestamp": stamp, "input_length": tokens, "output_length": out, "hash_ids": ids}


def test_mooncake(tmp_path: Path) -> None:
    said = [moon(0, 1024, [7, 8]), moon(3000, 1030, [7, 8, 9])]
    trace = read(lines_of(tmp_path / "m.jsonl", *said))
    first, second = trace
    assert trace.header.block_tokens == 512 and trace.header.source == "mooncake"
    assert (first.times.arrival, second.times.arrival) == (0.0, 3.0)
    assert first.blocks == second.blocks and (first.tail, first.tail_tokens) == (None, 0)
    assert (second.tail_tokens, second.output_tokens) == (6, 5) and second.tail is not None
    assert second.times.end is None and second.think_s is None


@pytest.mark.parametrize(
    ("said", "options", "words"),
    [
        ([moon(0, 8, [1]), moon(5, 8, [1]), moon(4, 8, [1])], {}, "m:3: timestamp is before"),
        ([moon(-1, 8, [1])], {}, "m:1: times.arrival is -0.001"),
        ([moon(1.5, 8, [1])], {}, "m:1: timestamp is 1.5; .*--unit s"),
        ([moon(1.7e12, 8, [1])], {}, "m:1: timestamp is 17.*from 1970"),
        ([moon(n // 9, 8, [1]) for n in range(200)], {}, "m:101: .* requests a second; .*--unit s"),
        ([moon(0, 600, [1])], {}, "m:1: hash_ids has 1 of them; .* have 2 .*--block-tokens"),
        ([moon(0, 600, [1, 2])], {"block_tokens": 64}, "have 10"),
        ([moon(0, -600, [])], {}, "m:1: "),
        ([moon(0, 8, [-1])], {}, "m:1: Expected `int` >= 0 - at `\\$.hash_ids"),
        ([moon(0, 8, [2**70])], {}, "m:1: "),
        ([{"timestamp": 0, "input_length": "8", "output_length": 1, "hash_ids": []}], {}, "m:1: "),
    ],
)
def test_mooncake_that_is_wrong(
    tmp_path: Path, said: list[Any], options: dict[str, Any], words: str
) -> None:
    path = lines_of(tmp_path / "m", *said)
    with pytest.raises(TraceError, match=words):
        list(read(path, Options(**options)))


def test_mooncake_in_seconds_if_that_is_said(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "m", *(moon(n / 9, 8, [1]) for n in range(200)))
    assert [one.times.arrival for one in read(path, Options(unit="s"))][9] == 1.0


# ---- Weka -----------------------------------------------------------------------------------


def turn(t: float, tokens: int, **more: Any) -> dict[str, Any]:
    ids = list(range(1, tokens // 64 + 1))
    return {"t": t, "type": "n", "in": tokens, "out": 9, "hash_ids": ids, **more}


def session(*requests: Any, **more: Any) -> dict[str, Any]:
    return {"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def agent(t: float, *requests: Any) -> dict[str, Any]:
    return {
        "t": t, "type": "subagent", "agent_id": f"a{t}", "duration_ms": 20_000,
        "requests": requests,
    }  # fmt: skip


def test_weka(tmp_path: Path) -> None:
    own_turns = [
        turn(0, 130, think_time=0.0, api_time=2.0, ttft=0.5, stop="tool_use"),
        turn(30, 200, think_time=3.0),
    ]
    said = session(own_turns[0], agent(10, turn(0, 70), turn(5, 140)), own_turns[1])
    path = lines_of(tmp_path / "w", said, said | {"id": "y"})
    found = list(read(path))
    assert [(one.session, one.times.arrival) for one in found[:4]] == [
        ("x", 0.0), ("x/a10", 10.0), ("x/a10", 15.0), ("x", 30.0),
    ]  # fmt: skip
    assert (found[0].parent, found[1].parent, found[1].agent) == (None, "x", "a10")
    assert found[0].times == Times(arrival=0.0, first_token=0.5, end=2.0)
    assert (found[0].think_s, found[3].think_s, found[3].turn) == (None, 3.0, 1)
    assert (found[0].finish, found[0].tail_tokens, found[0].tail) == ("tool_calls", 2, None)
    assert found[0].blocks == found[3].blocks[:2] and found[0].blocks != found[4].blocks


def test_weka_times_of_sub_agents_may_count_from_either_start(tmp_path: Path) -> None:
    said = [turn(0, 130), agent(100, turn(100, 70), turn(105, 140)), turn(130, 200)]
    found = list(read(lines_of(tmp_path / "w", session(*said))))
    assert [one.times.arrival for one in found] == [0.0, 100.0, 105.0, 130.0]
    mixed = [*said, agent(200, turn(0, 70), turn(5, 140))]
    with pytest.raises(TraceError, match=r"w:1: session x: .*'a200'.* own start, .*'a100'"):
        list(read(lines_of(tmp_path / "w", session(*mixed))))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([session(turn(5, 70), turn(4, 140))], "w:1: session x: requests: t goes back from 5.0"),
        ([session(turn(0, 70)), session(turn(0, 70), block_size=16)], "w:2: block_size is 16"),
        ([session(turn(0, 70), hash_id_scope="galaxy")], "w:1: hash_id_scope is 'galaxy'"),
        ([session(turn(0, 70) | {"hash_ids": [1, 2]})], "w:1: blocks: 2 of 64"),
        ([session(turn(0, 0))], "w:1: session x: requests: .*no tokens"),
        ([session(turn(0, 70, api_time=-4.0))], "w:1: times.end is -4"),
        ([session(turn(0, 70), block_size=0)], "w:1: block_size is 0"),
    ],
)
def test_weka_that_is_wrong(tmp_path: Path, said: list[Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        list(read(lines_of(tmp_path / "w", *said)))


# ---- the others -----------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE + "2023-11-16 18:17:05.9799611,31,8\n")
    trace = read(path)
    first, second = trace
    assert (first.times.arrival, second.times.arrival) == (0.0, pytest.approx(2.000001, abs=1e-6))
    assert (first.input_tokens, first.output_tokens, first.blocks) == (48, 10, ())
    assert trace.header.origin_unix_s == pytest.approx(1700158623.97996)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-11-16 18:17:02,31,8", "a.csv:3: TIMESTAMP is before"),
        ("yesterday,31,8", "a.csv:3: TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:17:05,-31,8", "a.csv:3: ContextTokens is '-31'"),
        ("2023-11-16 18:17:05,31", "a.csv:3: 2 columns"),
        ("2023-11-16 18:17:05,31,99999999999999", "a.csv:3: GeneratedTokens"),
    ],
)
def test_azure_that_is_wrong(tmp_path: Path, row: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(AZURE + row + "\n")
    with pytest.raises(TraceError, match=words):
        list(read(tmp_path / "a.csv"))


def lab_round(index: int, second: int, **more: Any) -> dict[str, Any]:
    def at(plus: int) -> str:
        return f"2026-06-01T05:40:{second + plus:02}.000Z"

    events = [("user_message", 0), ("tool_result", 1), ("reasoning", 3), ("text", 4)]
    return {
        "session_id": "s", "round_index": index, "round_id": f"m{index}", "model": "m",
        "input_tokens_total": 100, "prefix_tokens": 60, "output_tokens": 7,
        "timing_events": [{"event_type": kind, "timestamp": at(plus)} for kind, plus in events],
    } | more  # fmt: skip


def test_tracelab(tmp_path: Path) -> None:
    first, second = read(lines_of(tmp_path / "t", lab_round(0, 10), lab_round(1, 20)))
    assert first.times == Times(arrival=1.0, first_content=3.0, end=4.0)
    assert (second.think_s, second.turn, second.cached_tokens) == (7.0, 1, 60)
    for wrong, words in (
        (lab_round(1, 5), "t:2: timing_events: before those"),
        (lab_round(1, 20, timing_events=[]), "t:2: timing_events: nothing"),
        (
            lab_round(1, 20, timing_events=[{"event_type": "x", "timestamp": "2026-06-01T05:40"}]),
            "t:2: ",
        ),
    ):
        with pytest.raises(TraceError, match=words):
            list(read(lines_of(tmp_path / "t", lab_round(0, 10), wrong)))


def span(number: int, **more: Any) -> dict[str, Any]:
    asked = json.dumps([{"role": "user", "content": "What?"}])
    return {
        "trace_id": "t", "span_id": f"s{number}", "start_time": f"2026-02-26T10:00:0{number}+00:00",
        "end_time": f"2026-02-26T10:00:0{number}.5+00:00",
        "attributes": {
            "gen_ai.operation.name": "chat", "gen_ai.request.model": "m",
            "gen_ai.usage.prompt_tokens": 50, "gen_ai.usage.completion_tokens": 20,
            "gen_ai.input.messages": asked, "gen_ai.response.finish_reason": "stop",
        } | more,
    }  # fmt: skip


def test_otel(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"spans": [span(3), span(1)]}, indent=2))
    trace = read(path)
    first, second = trace
    assert [one.request for one in (first, second)] == ["s1", "s3"] and first.finish == "stop"
    assert (second.times.arrival, second.think_s, second.turn) == (2.0, pytest.approx(1.5), 1)
    assert first.content is not None
    assert first.content.body["messages"] == [{"role": "user", "content": "What?"}]
    assert trace.header.level == "content"
    for wrong in ({"gen_ai.usage.prompt_tokens": "many"}, {"gen_ai.input.messages": "{"}):
        path.write_text(json.dumps({"spans": [span(1, **wrong)]}))
        with pytest.raises(TraceError, match=r"o\.json: span s1"):
            list(read(path))
    path.write_text(json.dumps({"spans": [span(1, **{"gen_ai.operation.name": "embed"})]}))
    with pytest.raises(TraceError, match="none of them"):
        read(path)


# ---- writing --------------------------------------------------------------------------------


def growing(block_tokens: int) -> list[Recorded]:
    """Two sessions that share a beginning, turn by turn; and one with an agent inside."""
    made = []
    for count, name in enumerate(("p", "q")):
        for number in range(4):
            length = 1000 + 333 * number
            whole, rest = divmod(length, block_tokens)
            shared = 400 // block_tokens
            blocks = [
                f"{at if at < shared else (count + 1) * 10**6 + at:016x}" for at in range(whole)
            ]
            made.append(
                request(
                    number,
                    request=f"{name}{number}",
                    session=name,
                    parent="p" if name == "q" else None,
                    times=Times(arrival=count * 2.0 + number * 10),
                    input_tokens=length,
                    blocks=tuple(blocks),
                    tail_tokens=rest,
                    tail=f"{count}{number}" if rest else None,
                    think_s=1.0 if number else None,
                    segments=(Segment("tools", 30), Segment("user", length - 30)),
                )
            )
    return sorted(made, key=lambda one: one.times.arrival)


def shared(requests: list[Recorded]) -> list[list[int]]:
    """How many blocks at the beginning any two have in common."""

    def common(one: Recorded, other: Recorded) -> int:
        pairs = zip(one.blocks, other.blocks, strict=False)
        return next(
            (at for at, (a, b) in enumerate(pairs) if a != b),
            min(len(one.blocks), len(other.blocks)),
        )

    return [[common(one, other) for other in requests] for one in requests]


@pytest.mark.parametrize(("size", "large"), [(16, 512), (64, 512), (16, 64), (64, 64)])
@pytest.mark.parametrize("format", [mooncake, weka])
def test_what_is_written_is_read_with_its_sharing(
    tmp_path: Path, format: Any, size: int, large: int
) -> None:
    told = growing(size)
    header = msgspec.structs.replace(OURS, block_tokens=size)
    written = format.write(tmp_path / "out", told, header, large)
    assert written.unshared == 0
    found = list(read(tmp_path / "out", Options(block_tokens=large)))
    assert [one.input_tokens for one in found] == [one.input_tokens for one in told]
    assert [one.times.arrival for one in found] == [one.times.arrival for one in told]
    step = large // size
    coarse = [[count // step for count in row] for row in shared(told)]
    if format is weka:  # its numbers are a session's own
        groups = [one.session for one in told]
        coarse = [
            [count if groups[i] == groups[j] else 0 for j, count in enumerate(row)]
            for i, row in enumerate(coarse)
        ]
        same = [one.session for one in found]
        mine = [
            [count if same[i] == same[j] else 0 for j, count in enumerate(row)]
            for i, row in enumerate(shared(found))
        ]
        assert mine == coarse and [one.turn for one in found] == [one.turn for one in told]
        assert {one.parent for one in found} == {None, "p"}
    else:
        assert shared(found) == coarse


def test_blocks_are_made_larger_and_never_smaller(tmp_path: Path) -> None:
    header = msgspec.structs.replace(OURS, block_tokens=64)
    for size in (16, 100):
        with pytest.raises(TraceError, match=f"64 tokens cannot be written as blocks of {size}"):
            mooncake.write(tmp_path / "out", growing(64), header, size)
    with pytest.raises(TraceError, match="the trace has none"):
        weka.write(tmp_path / "out", [], msgspec.structs.replace(OURS, block_tokens=None), 64)


def test_a_tail_that_nobody_knows_is_shared_with_nobody(tmp_path: Path) -> None:
    told = [request(number, tail=None) for number in range(3)]
    written = mooncake.write(tmp_path / "out", told, OURS, 512)
    assert written.unshared == 3
    ids = [json.loads(line)["hash_ids"] for line in (tmp_path / "out").read_text().splitlines()]
    assert len({tuple(one) for one in ids}) == 3


# ---- data only (D38) ------------------------------------------------------------------------


class Gadget:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("/tmp/stanchion-gadget-ran",)


def truncated() -> bytes:
    whole = gzip.compress(b'{"timestamp": 0, "input_length": 1, "hash_ids": []}\n' * 1000)
    return whole[: len(whole) // 2]


HOSTILE = {
    "a pickle": pickle.dumps(Gadget()),
    "a pickle, packed": gzip.compress(pickle.dumps(Gadget())),
    "a length of 4 GB": b"\xff\xff\xff\xff" + b"x" * 100,
    "a gzip that is cut": truncated(),
    "a gzip with a wrong sum": gzip.compress(b'{"x": 1}')[:-6] + b"\0" * 6,
    "nested too deeply": b'{"hash_ids": ' + b"[" * 100_000,
    "no text": bytes(range(256)) * 10,
    "empty": b"",
    "an object of another kind": b'{"hash_ids": 1, "timestamp": 2, "input_length": {}}',
    "numbers out of bounds": b'{"timestamp": 1e999, "input_length": 1, "output_length": 1, '
    b'"hash_ids": [1]}',
    "not a number": b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_typed_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(TraceError, match="hostile"):
        list(read(path))
    own.write(tmp_path / "r", OURS, [request(0)])
    (segment,) = (tmp_path / "r").glob("events-*")
    segment.write_bytes(HOSTILE[name] + b"\n")
    if HOSTILE[name]:
        with pytest.raises(TraceError, match="events-000001"):
            list(read(tmp_path / "r"))
    (tmp_path / "r" / HEADER).write_bytes(HOSTILE[name])
    with pytest.raises(TraceError, match=HEADER):
        read(tmp_path / "r")
    assert not Path("/tmp/stanchion-gadget-ran").exists()


def test_a_line_is_bounded_before_it_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 1000)
    (tmp_path / "bomb").write_bytes(gzip.compress(b'{"x": "' + b"x" * 10**7))
    with pytest.raises(TraceError, match="bomb:1: a line of more than 1000 bytes"):
        list(lines.lines(tmp_path / "bomb"))


def test_any_cut_and_any_flipped_byte_is_an_error_or_a_trace(tmp_path: Path) -> None:
    lucky = random.Random(7)
    sources = {
        "m": lines_of(tmp_path / "m", moon(0, 1024, [7, 8]), moon(3000, 1030, [7, 8, 9])),
        "w": lines_of(tmp_path / "w", session(turn(0, 130), agent(10, turn(0, 70)))),
        "t": lines_of(tmp_path / "t", lab_round(0, 10), lab_round(1, 20)),
    }
    refused = 0
    for path in sources.values():
        raw = path.read_bytes()
        for _ in range(150):
            spoilt = bytearray(raw[: lucky.randrange(1, len(raw) + 1)])
            for _ in range(lucky.randrange(4)):
                spoilt[lucky.randrange(len(spoilt))] = lucky.randrange(256)
            path.write_bytes(spoilt)
            try:
                found = list(read(path))
            except TraceError as error:
                assert str(error).startswith(str(path))
                refused += 1
            else:
                assert all(one.input_tokens >= 0 for one in found)
    assert refused > 300


# ---- the public files -----------------------------------------------------------------------


@pytest.mark.skipif(TRACES is None, reason="STANCHION_TRACES names no folder of public traces")
@pytest.mark.parametrize(
    ("name", "requests", "sessions"),
    [
        ("mooncake_fast25_conversation_trace.jsonl.gz", 12031, 12031),
        ("weka_claude_code_sessions.jsonl.gz", 614, 24),
        ("azure_llm_2023_code.csv.gz", 8819, 8819),
        ("tracelab_example_sanitized_rounds.jsonl", 19, 2),
        ("otel_prefix_sharing_example.json", 7, 4),
    ],
)
def test_public_traces_are_read_whole(name: str, requests: int, sessions: int) -> None:
    found = list(read(Path(str(TRACES)) / name))
    assert (len(found), len({one.session for one in found})) == (requests, sessions)
