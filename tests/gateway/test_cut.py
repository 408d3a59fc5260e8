"""An answer that fails after its first byte (D22): each client has a prefix of one answer, then an
error; what is to come once came once. Before the first word, another worker answers instead."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stanchion.core.messages import Start
from stanchion.core.outcome import Completed, PeerLost

from .conftest import Gateway, cluster, running
from .glm import as_tokens, glm_vocabulary
from .worker import EOS, FakeWorker, Plan, answer, end, say

ANSWER = (
    "hm é</think>I look 汉 ST"
    "<tool_call>read<arg_key>path</arg_key><arg_value>a 👩‍👧</arg_value>"
    "<arg_key>line</arg_key><arg_value>7</arg_value></tool_call>"
)
IDS = as_tokens(ANSWER, False)
TOOL = {
    "name": "read",
    "parameters": {"properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
}
ASKED = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/chat/completions": {
        "messages": ASKED,
        "tools": [{"type": "function", "function": TOOL}],
        "stop": ["STOP"],
        "stream": True,
    },
    "/v1/messages": {
        "model": "hashed",
        "max_tokens": 999,
        "messages": ASKED,
        "tools": [{"name": "read", "input_schema": TOOL["parameters"]}],
        "stop_sequences": ["STOP"],
        "thinking": {"type": "enabled"},
        "stream": True,
    },
}
STARTED = {"/v1/chat/completions": '"role"', "/v1/messages": "message_start"}
Told = dict[str, str]


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Iterator[tuple[FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('cut')}/worker"
    with FakeWorker(address) as worker, running(worker, glm_vocabulary()) as gateway:
        yield worker, gateway
        worker.reset()


def read(raw: str) -> tuple[Told, list[str]]:
    """What a client of either API has at the end of this stream, and the codes of its errors."""
    told: Told = {"thought": "", "text": "", "name": "", "arguments": ""}
    errors = []
    for one in raw.split("\n\n"):
        _, _, data = one.partition("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        if "error" in event:
            errors.append(event["error"]["code"])
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            told["thought"] += delta.get("reasoning_content", "")
            told["text"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                told["name"] += call["function"].get("name", "")
                told["arguments"] += call["function"]["arguments"]
        told["name"] += event.get("content_block", {}).get("name", "")
        delta = event.get("delta", {})
        told["thought"] += delta.get("thinking", "")
        told["text"] += delta.get("text", "")
        told["arguments"] += delta.get("partial_json", "")
    return told, errors


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_at_any_token_leaves_a_prefix_and_an_error(glm, path: str):
    worker, gateway = glm
    worker.plan = lambda start: [say(start, [*IDS, EOS]), end(start, Completed("stop"))]
    whole, errors = read(gateway.client.post(path, json=BODIES[path]).text)
    assert errors == [] and whole["text"] == "I look 汉 ST"
    assert json.loads(whole["arguments"]) == {"path": "a 👩‍👧", "line": 7}
    for tokens in range(1, len(IDS) + 1):
        raw = _cut_at(tokens, path, worker, gateway.client)
        told, errors = read(raw)
        assert errors == ["worker_lost"], tokens
        assert all(whole[name].startswith(part) for name, part in told.items()), (tokens, told)
        assert "\ufffd" not in raw
        assert "[DONE]" not in raw and "message_stop" not in raw
        assert '"finish_reason":"' not in raw and '"stop_reason":"' not in raw
        assert raw.count(STARTED[path]) == (1 if path.endswith("completions") else 2)


def _cut_at(tokens: int, path: str, worker: FakeWorker, client: httpx.Client) -> str:
    gate = threading.Event()

    def plan(start: Start) -> Plan:
        return [say(start, IDS[:tokens]), gate, end(start, PeerLost("gone"))]

    worker.plan = plan
    raw = ""
    with (
        client.stream("POST", path, json=BODIES[path]) as reply,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for part in reply.iter_text():
            raw += part
            if STARTED[path] in raw:
                gate.set()
    return raw


@pytest.mark.parametrize("path", BODIES)
def test_a_second_answer_behind_half_of_one_would_be_seen(glm, path: str):
    """The wrong way (nuguard#455), to see that the test above would find it."""
    worker, gateway = glm
    half = _cut_at(40, path, worker, gateway.client)
    worker.plan = lambda start: [say(start, [*IDS, EOS]), end(start, Completed("stop"))]
    again = gateway.client.post(path, json=BODIES[path]).text
    (whole, _), (told, _) = read(again), read(half + again)
    assert not whole["text"].startswith(told["text"])


@pytest.mark.parametrize("path", BODIES)
def test_before_the_first_word_another_worker_answers(tmp_path: Path, path: str):
    plain = {name: one for name, one in BODIES[path].items() if name not in ("tools", "thinking")}
    with cluster(tmp_path, "both-0", "both-1") as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start, worker=worker: (
                answer("the answer")(start)
                if sum(len(one.starts) for one in workers.values()) == 2
                else [end(start, PeerLost("gone"))]
            )
        told, errors = read(gateway.client.post(path, json=plain).text)
        assert (told["text"], errors) == ("the answer", [])
        assert sorted(len(one.starts) for one in workers.values()) == [1, 1]
