"""What a gateway records of its traffic: when, what, how it ended; and nothing that was said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Spec
from stanchion.core.outcome import Completed, PeerLost
from stanchion.core.recording import HEADER, Attempt, Header, Recorded, Segment
from stanchion.gateway.record import recorder as module
from stanchion.gateway.record.blocks import chain, raw_tokens, root
from stanchion.gateway.record.files import Files
from stanchion.gateway.record.segments import Marked, Marks, segments, stem
from stanchion.gateway.record.sessions import Sessions
from stanchion.gateway.settings import GatewaySettings

from .conftest import Gateway, running
from .glm import as_tokens, glm_special
from .test_integrity import FRESH, lies, two, whole
from .worker import EOS, HELLO, FakeWorker, answer, end, say

LONG = {"prompt": "forty and some more letters, so that there are blocks"}
CHAT = {"messages": [{"role": "user", "content": "please say hello to everybody there"}]}


def read(folder: Path) -> list[Recorded]:
    found = []
    for path in sorted(folder.glob("events-*.jsonl")):
        for line in path.read_bytes().splitlines():
            found.append(msgspec.json.decode(line, type=Recorded))
    return found


def header(folder: Path) -> Header:
    return msgspec.json.decode((folder / HEADER).read_bytes(), type=Header)


def recorded(
    worker: FakeWorker, folder: Path, talk: Callable[[Gateway], None], **settings: Any
) -> list[Recorded]:
    with running(worker, record=str(folder), **settings) as gateway:
        talk(gateway)
    return read(folder)


def test_a_request_from_arrival_to_end(alone: FakeWorker, tmp_path: Path) -> None:
    def talk(gateway: Gateway) -> None:
        body = CHAT | {"stream": True, "max_tokens": 20, "temperature": 0.5, "seed": 7}
        assert gateway.client.post("/v1/chat/completions", json=body).status_code == 200

    (one,) = recorded(alone, tmp_path / "r", talk)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "r").iterdir()}
    assert modes == {HEADER: 0o600, "events-000001.jsonl": 0o600}, "for its owner alone"
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700
    said = header(tmp_path / "r")
    assert (said.source, said.level, said.block_tokens, said.model) == (
        "stanchion", "none", 64, "hashed",
    )  # fmt: skip
    assert said.tokenizer and said.template and said.origin_unix_s
    prompt = alone.starts[0].tokens
    times = one.times
    moments = (times.arrival, times.send, times.first_token, times.first_content, times.end)
    assert None not in moments and list(moments) == sorted(moments)  # type: ignore[type-var]
    assert times.first_byte is not None and times.first_byte >= times.arrival
    assert (one.api, one.stream, one.choices, one.turn) == ("chat", True, 1, 0)
    assert (one.input_tokens, one.output_tokens, one.max_tokens) == (len(prompt), 12, 20)
    assert one.sampling is not None and (one.sampling.temperature, one.sampling.seed) == (0.5, 7)
    assert len(one.blocks) == len(prompt) // 64 and one.tail_tokens == len(prompt) % 64
    assert one.tail is not None and len(one.tail) == 16
    assert [part.kind for part in one.segments] == ["user", "assistant"]
    assert sum(part.tokens for part in one.segments) == one.input_tokens
    assert (one.outcome, one.finish, one.aborted) == ("completed", "stop", None)
    assert one.attempts == (Attempt(worker="both-0", outcome="completed", tokens=12),)
    assert one.content is None


def test_where_a_server_does_not_say_its_pages_blocks_have_sixteen_tokens(tmp_path: Path) -> None:
    """As foreign ones do not: a hash a token would be most of what recording costs."""
    said = msgspec.structs.replace(HELLO, page_tokens=1)
    with FakeWorker(f"ipc://{tmp_path}/worker", hello=said) as worker:
        (one,) = recorded(
            worker,
            tmp_path / "r",
            lambda gateway: gateway.client.post("/v1/completions", json=LONG),
        )
    assert header(tmp_path / "r").block_tokens == 16
    assert (len(one.blocks), one.tail_tokens) == divmod(one.input_tokens, 16)


@pytest.mark.parametrize("integrity", ["off", "balanced"])
def test_drafts_that_were_accepted_are_counted(
    alone: FakeWorker, tmp_path: Path, integrity: str
) -> None:
    steps = [(1, 4, 3, 3), (2, 5, 6, 3), (3, 7, 9, 4), (5, 12, 15, 7)]

    def plan(start: Any) -> list[Any]:
        specs = [Spec(*one) for one in steps]
        return [*(say(start, "ab", spec=spec) for spec in specs), end(start, spec=specs[-1])]

    alone.plan = plan

    def talk(gateway: Gateway) -> None:
        gateway.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 8})

    (one,) = recorded(alone, tmp_path / "r", talk, integrity=integrity)
    assert one.spec == Spec(5, 12, 15, 7)
    # The last message tells of two steps at once: which of them accepted how many is not known.
    assert one.accepts == (1, 1, 0, 1)
    assert (one.finish, one.api) == ("length", "completions")


def test_a_client_that_leaves_is_recorded_with_the_moment(
    alone: FakeWorker, tmp_path: Path
) -> None:
    alone.plan = lambda start: [say(start, "abc"), threading.Event()]

    def talk(gateway: Gateway) -> None:
        raw = json.dumps(CHAT | {"stream": True}).encode()
        url = httpx.URL(gateway.url)
        with socket.create_connection((url.host, url.port), timeout=10) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}"
            connection.sendall(f"{head}\r\n\r\n".encode() + raw)
            received = b""
            while b"abc" not in received:
                received += connection.recv(65536)
        assert alone.aborted("client")

    (one,) = recorded(alone, tmp_path / "r", talk)
    assert one.outcome == "cancelled" and one.finish is None
    assert one.aborted is not None and one.aborted.after_tokens == 3
    assert one.times.end is not None and one.times.first_token is not None
    left = one.times.arrival + one.aborted.at_s
    assert one.times.first_token <= left <= one.times.end


def test_attempts_that_failed_are_recorded(alone: FakeWorker, tmp_path: Path) -> None:
    alone.plan = lambda start: [say(start, "abc"), end(start, PeerLost("gone"))]

    def talk(gateway: Gateway) -> None:
        gateway.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 8})

    (one,) = recorded(alone, tmp_path / "r", talk, integrity="off")
    assert one.outcome == "peer_lost"
    assert one.attempts == (Attempt(worker="both-0", outcome="peer_lost", tokens=3),)


def test_an_answer_made_again_is_recorded_with_its_verdicts(tmp_path: Path) -> None:
    with two(tmp_path, integrity="balanced", record=str(tmp_path / "r")) as (gateway, workers):
        lies(workers, FRESH)
        assert whole(gateway.client).status_code == 200
    (one,) = read(tmp_path / "r")
    assert one.outcome == "completed"
    first, second = one.attempts
    assert (first.tokens > 0, first.verdict) == (True, "confirmed")
    assert (second.outcome, second.tokens > 0) == ("completed", True)
    assert {first.worker, second.worker} == {"both-0", "both-1"}


def test_several_choices_are_one_record_that_speaks_of_the_first(
    alone: FakeWorker, tmp_path: Path
) -> None:
    def talk(gateway: Gateway) -> None:
        body = {"prompt": ["four", "sixsix"], "n": 2, "max_tokens": 20}
        assert gateway.client.post("/v1/completions", json=body).status_code == 200

    (one,) = recorded(alone, tmp_path / "r", talk)
    assert (one.choices, one.input_tokens, one.output_tokens) == (4, 4, 12)
    assert one.attempts == (Attempt(worker="both-0", outcome="completed", tokens=12),)


# ---- sessions -------------------------------------------------------------------------------


def turns(gateway: Gateway, messages: list[Any], count: int, **headers: str) -> None:
    for _ in range(count):
        body = {"messages": messages}
        said = gateway.client.post("/v1/chat/completions", json=body, headers=headers).json()
        messages += [said["choices"][0]["message"], {"role": "user", "content": "go on"}]


def test_a_prompt_that_goes_on_is_the_next_turn(alone: FakeWorker, tmp_path: Path) -> None:
    system = {"role": "system", "content": "the same for all of them " * 10}

    def talk(gateway: Gateway) -> None:
        for word in ("hi", "ho"):  # short, and no whole block after what both have
            turns(gateway, [system, {"role": "user", "content": word}], 3)
        turns(gateway, [system, {"role": "user", "content": "hi"}], 1)  # again: another session

    found = recorded(alone, tmp_path / "r", talk)
    names = [one.session for one in found]
    assert len({*names[:3]}) == 1 and len({*names[3:6]}) == 1 and len({*names}) == 3
    assert [one.turn for one in found] == [0, 1, 2, 0, 1, 2, 0]
    for before, one in pairwise(found):
        assert (one.think_s is None) == (one.turn == 0)
        if one.turn:
            assert before.times.end is not None
            assert one.think_s == pytest.approx(one.times.arrival - before.times.end)
            assert one.blocks[: len(before.blocks)] == before.blocks


def test_a_client_may_name_its_session(alone: FakeWorker, tmp_path: Path) -> None:
    def talk(gateway: Gateway) -> None:
        for word in ("one", "two", "three"):
            for text in ("a", "b"):
                body = {"prompt": text + word, "max_tokens": 4}
                gateway.client.post("/v1/completions", json=body, headers={"x-session-id": word})

    found = recorded(alone, tmp_path / "r", talk)
    assert [one.turn for one in found] == [0, 1] * 3
    assert len({one.session for one in found}) == 3
    assert not {"one", "two", "three"} & {one.session for one in found}


def test_other_tenants_and_salts_share_no_hash(alone: FakeWorker, tmp_path: Path) -> None:
    def talk(gateway: Gateway) -> None:
        for key in ("a", "b"):
            for salt in ("", "x"):
                body = {"prompt": "y" * 200, "max_tokens": 4, "cache_salt": salt}
                gateway.client.post("/v1/completions", json=body, headers={"x-api-key": key})

    found = recorded(alone, tmp_path / "r", talk, api_keys=("alice:a", "bob:b"))
    assert len({one.blocks for one in found}) == 4 and len({one.tenant for one in found}) == 2
    assert not {"alice", "bob"} & {one.tenant for one in found}


def test_without_the_key_a_guess_cannot_be_hashed(alone: FakeWorker, tmp_path: Path) -> None:
    def talk(gateway: Gateway) -> None:
        gateway.client.post("/v1/completions", json={"prompt": "y" * 128, "max_tokens": 4})

    found = [recorded(alone, tmp_path / name, talk)[0] for name in ("r", "s")]
    assert found[0].blocks != found[1].blocks, "a key of each recording's own"
    guess = chain(root(b"", "", ""), raw_tokens(b"y" * 128), 64).blocks
    assert not {*guess} & {*found[0].blocks, *found[1].blocks}


# ---- content --------------------------------------------------------------------------------


def test_content_is_recorded_only_where_it_was_asked_for(alone: FakeWorker, tmp_path: Path) -> None:
    text = "I see</think>Look:<tool_call>find<arg_key>what</arg_key><arg_value>x</arg_value>"
    text += "</tool_call>"
    alone.plan = lambda start: [
        say(start, [*as_tokens(text, True), EOS]),
        end(start, Completed("stop")),
    ]
    tool = {
        "type": "function",
        "function": {"name": "find", "parameters": {"properties": {"what": {"type": "string"}}}},
    }
    body = CHAT | {"tools": [tool], "user": "unknown to us", "max_tokens": 200}

    def talk(gateway: Gateway) -> None:
        reply = gateway.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text

    for content in (False, True):
        folder = tmp_path / str(content)
        with running(alone, glm_special(), record=str(folder), record_content=content) as gateway:
            talk(gateway)
        (one,) = read(folder)
        assert [part.kind for part in one.segments] == ["tools", "user", "assistant"]
        assert one.finish == "tool_calls"
        raw = b"".join(path.read_bytes() for path in folder.iterdir())
        assert (b"everybody" in raw) is content and (b"Look" in raw) is content
        assert header(folder).level == ("content" if content else "none")
    assert one.content is not None and one.content.body == body
    assert (one.content.text, one.content.reasoning) == ("Look:", "I see")
    assert one.content.calls == ('find({"what": "x"})',)
    assert one.content.tokens == (*as_tokens(text, True), EOS)
    assert len(one.content.logprobs) == len(one.content.tokens)


# ---- files ----------------------------------------------------------------------------------


def test_the_folder_never_holds_more_than_its_bound(tmp_path: Path) -> None:
    files = Files(tmp_path / "r", 8000)
    dropped = sum(files.append(b"%06d" % number + b"x" * 93 + b"\n") for number in range(1000))
    kept = sorted((tmp_path / "r").iterdir())
    assert sum(path.stat().st_size for path in kept) <= 8000
    assert dropped > 50 and kept[-1].read_bytes().splitlines()[-1].startswith(b"000999")
    assert len(kept) + dropped == 100
    with pytest.raises(OSError, match="a segment has 1000"):
        files.append(b"x" * 1001)


def test_what_a_disk_took_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path / "r", 8000)
    files.append(b"first\n")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda stream, line: write(stream, line[:3]))
        with pytest.raises(OSError, match="3 of 7"):
            files.append(b"second\n")
    files.append(b"third\n")
    files.close()
    assert (tmp_path / "r" / "events-000001.jsonl").read_bytes() == b"first\nthird\n"


def test_an_earlier_recording_is_set_aside_and_counts(alone: FakeWorker, tmp_path: Path) -> None:
    def talk(gateway: Gateway) -> None:
        gateway.client.post("/v1/completions", json={"prompt": "y", "max_tokens": 4})

    first = recorded(alone, tmp_path / "r", talk)
    second = recorded(alone, tmp_path / "r", talk)
    assert len(first) == len(second) == 1 and first != second
    assert read(tmp_path / "r" / "earlier-000001") == first
    files = Files(tmp_path / "r", 8000)
    dropped = sum(files.append(b"x" * 999 + b"\n") for _ in range(8))
    assert dropped == 2, "both of the earlier ones are the oldest"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file")
    with pytest.raises(ConfigError, match="record: cannot write"):
        Files(tmp_path / "r", 8000)
    with pytest.raises(ConfigError, match="record_content wants record"):
        GatewaySettings(record_content=True).check()
    with pytest.raises(ConfigError, match="record_max_gib"):
        GatewaySettings(record="x", record_max_gib=0).check()


KILLED = """
import sys
from pathlib import Path
from stanchion.gateway.record.files import Files
files = Files(Path(sys.argv[1]), 2**30)
print("ready", flush=True)
number = 0
while True:
    files.append(b'{"number": %d, "more": "%s"}\\n' % (number, b"x" * (number % 5000)))
    number += 1
"""


def test_kill_leaves_at_most_one_torn_line(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "r")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        path = tmp_path / "r" / "events-000001.jsonl"
        while not path.exists() or path.stat().st_size < 100_000:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    *whole, last = path.read_bytes().split(b"\n")
    assert [json.loads(line)["number"] for line in whole] == list(range(len(whole)))
    assert b"\n" not in last


# ---- never in the way -----------------------------------------------------------------------


def test_a_disk_that_hangs_or_fails_costs_records_and_nothing_else(
    alone: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.plan = answer("Hello")
    gate = threading.Event()
    append, fails = Files.append, [True]

    def slow(self: Files, line: bytes) -> int:
        gate.wait(10)
        if fails and fails.pop():
            raise OSError("the disk is gone")
        return append(self, line)

    monkeypatch.setattr(Files, "append", slow)
    monkeypatch.setattr(module, "QUEUE_MAX", 8)  # of two entries a request
    with running(alone, record=str(tmp_path / "r")) as gateway:
        for _ in range(10):
            reply = gateway.client.post("/v1/completions", json={"prompt": "y", "max_tokens": 9})
            assert reply.status_code == 200
        text = gateway.client.get("/metrics").text
        assert 'stanchion:record_lost_total{why="queue_full"} 0.0' not in text
        gate.set()
    found = read(tmp_path / "r")
    assert 1 <= len(found) < 9 and all(one.outcome == "completed" for one in found)


def test_what_was_recorded_and_lost_is_in_metrics(alone: FakeWorker, tmp_path: Path) -> None:
    with running(alone, record=str(tmp_path / "r")) as gateway:
        gateway.client.post("/v1/completions", json={"prompt": "y", "max_tokens": 9})
        text = ""
        while "stanchion:recorded_total 1.0" not in text:
            text = gateway.client.get("/metrics").text
    assert 'stanchion:record_lost_total{why="disk"} 0.0' in text
    assert "stanchion:recorded_bytes_total" in text


def test_a_body_that_only_a_typed_reader_can_read_is_counted(
    alone: FakeWorker, tmp_path: Path
) -> None:
    nested = '{"x": ' * 5000 + "1" + "}" * 5000
    raw = '{"prompt": "y", "max_tokens": 9, "extra": ' + nested + "}"
    with running(alone, record=str(tmp_path / "r"), record_content=True) as gateway:
        first = gateway.client.post("/v1/completions", content=raw)
        body = {"prompt": "y", "max_tokens": 9}
        assert gateway.client.post("/v1/completions", json=body).status_code == 200
    found = read(tmp_path / "r")
    assert [one.content.body for one in found if one.content] == [body]
    assert first.status_code in (200, 400)


def test_who_comes_while_another_runs_has_waited_for_nothing() -> None:
    sessions = Sessions()
    first = sessions.named("s", 1.0)
    assert (sessions.ended(first, 2.0), first.turn) == (None, 0)
    second, beside = sessions.named("s", 3.0), sessions.named("s", 3.5)
    assert sessions.ended(second, 5.0) == 1.0
    assert sessions.ended(beside, 6.0) is None, "the second ran when it came"
    quick, late = sessions.named("s", 8.0), sessions.named("s", 9.5)  # before the news of 9.0
    assert sessions.ended(quick, 9.0) == 2.0 and sessions.ended(late, 10.0) == 0.5
    assert [one.turn for one in (second, beside, quick, late)] == [1, 2, 3, 4]


def test_what_is_known_of_sessions_is_bounded() -> None:
    sessions = Sessions(sessions_max=10)
    for number in range(100):
        sessions.named(str(number), float(number))
    assert sessions.named("99", 100.0).turn == 1 and sessions.named("5", 100.0).turn == 0
    lost = [sessions.named("99", 101.0) for _ in range(1000)]
    assert len(lost[0].session.open) <= 256


def test_segments_add_up_where_there_are_no_markers() -> None:
    none = Marks.of([b"a", b"b"], frozenset())
    three = Marked.of(raw_tokens([0, 1, 0]), none)
    assert segments(three, none, False) == (Segment("other", 3),) and stem(three, none) == 3
    assert segments(Marked.of(b"", none), none, True) == ()
