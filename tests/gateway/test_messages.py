"""Anthropic's Messages API, with its public client: text, thinking, tools, counting, errors."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic
import httpx
import msgspec
import pytest

from stanchion.core.errors import Bug
from stanchion.core.messages import Start
from stanchion.core.outcome import Completed
from stanchion.gateway import generate
from stanchion.gateway.anthropic import CountBody, MessagesBody
from stanchion.gateway.choice import ChoiceFold, Style
from stanchion.gateway.failures import failure
from stanchion.gateway.markup import CALLED
from stanchion.gateway.messages import Anthropic, MessageReply

from .conftest import Gateway, running
from .glm import as_tokens, glm_special
from .test_outcomes import FAILURES
from .test_replies import BYTES, an_ask
from .worker import EOS, SPEC, FakeWorker, Plan, end, say

TOOLS: list[Any] = [
    {
        "name": "read",
        "description": "Reads a file",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        },
    },
    {"name": "list", "input_schema": {"type": "object", "properties": {}}},
]
READ = (
    "<tool_call>read<arg_key>path</arg_key><arg_value>a/é.py</arg_value>"
    "<arg_key>line</arg_key><arg_value>7</arg_value></tool_call>"
)
ANSWER = f"hm</think>I look.{READ}<tool_call>list</tool_call>"
PIECES = glm_special().pieces
ASKED: list[Any] = [{"role": "user", "content": "look"}]
KEYS = ("alice:one-secret", "bob:another-secret")
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
WITH_KEY = {"x-api-key": "one-secret", "anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Iterator[tuple[FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('messages')}/worker"
    with FakeWorker(address) as worker, running(worker, glm_special(), api_keys=KEYS) as gateway:
        gateway.client.headers.update(WITH_KEY)
        yield worker, gateway


@pytest.fixture
def worker(glm) -> Iterator[FakeWorker]:
    yield glm[0]
    glm[0].reset()


@pytest.fixture
def client(glm, worker) -> httpx.Client:
    return glm[1].client


@pytest.fixture
def sdk(glm, worker):
    with anthropic.Anthropic(base_url=glm[1].url, api_key="one-secret", max_retries=0) as client:
        yield client


def spoken(text: str, batch: int = 3, **more: object):
    def plan(start: Start) -> Plan:
        ids = [*as_tokens(text, True), EOS]
        cut = [ids[at : at + batch] for at in range(0, len(ids), batch)]
        return [*(say(start, part, **more) for part in cut), end(start, Completed("stop"), **more)]

    return plan


def body(**more: object) -> dict:
    given = {"model": "hashed", "messages": ASKED, "max_tokens": 4000, "tools": TOOLS}
    return given | {"thinking": THINKING} | more


def sent(raw: str) -> list[dict]:
    """The events of a stream; each is named twice, and alike."""
    found = []
    for one in raw.strip().split("\n\n"):
        name, data = one.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        found.append(told)
    return found


# ---- the public client ----------------------------------------------------------------------


def test_text_streamed_and_not(sdk, worker: FakeWorker):
    worker.plan = spoken("汉 ok ✓", cached_tokens=5)
    message = sdk.messages.create(model="hashed", max_tokens=100, messages=ASKED)
    assert [(block.type, block.text) for block in message.content] == [("text", "汉 ok ✓")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt = len(worker.starts[-1].tokens)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 5, 5)
    assert usage.output_tokens == 11 and usage.cache_creation_input_tokens == 0
    with sdk.messages.stream(model="hashed", max_tokens=100, messages=ASKED) as stream:
        assert "".join(stream.text_stream) == "汉 ok ✓"
        final = stream.get_final_message()
    assert final.usage == usage and final.stop_reason == "end_turn"
    assert worker.starts[-1].tenant == "alice"


def test_thinking_and_tools_streamed_and_not(sdk, worker: FakeWorker):
    worker.plan = spoken(ANSWER)
    whole = sdk.messages.create(**body())
    with sdk.messages.stream(**body()) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        thought, text, read, listed = message.content
        assert (thought.type, thought.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "I look.")
        assert (read.type, read.name) == ("tool_use", "read")
        assert read.input == {"path": "a/é.py", "line": 7} and listed.input == {}
        assert read.id != listed.id
        assert message.stop_reason == "tool_use"


def test_an_agents_turns_come_to_the_model_as_its_template_has_them(sdk, worker: FakeWorker):
    worker.plan = spoken(ANSWER)
    first = sdk.messages.create(**body(thinking={"type": "adaptive"}))
    found = [{"type": "text", "text": "r"}, {"type": "tool_reference", "tool_name": "list"}]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": found}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [
        *ASKED,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: v=1; cch=2;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be right."},
    ]
    worker.plan = spoken("</think>There.")
    sdk.messages.create(**body(messages=messages, system=system))
    shown = b"".join(PIECES[token] for token in worker.starts[-1].tokens).decode()
    tools, _, rest = shown.partition("<|system|>Be brief.\nBe right.<|user|>look")
    assert rest == (
        f"<|assistant|><think>hm</think>I look.{READ}<tool_call>list</tool_call>"
        f"<|user|>[{results[0]['tool_use_id']}]r\nlist<|user|>[{results[1]['tool_use_id']}]r\nlist"
        "<|user|>go on<|assistant|><think>"
    )
    assert '"name": "read", "description": "Reads a file", "parameters": {' in tools


def test_counting_is_the_prompt_of_the_message(sdk, worker: FakeWorker):
    asked = {"model": "hashed", "messages": ASKED, "tools": TOOLS, "system": "Be brief."}
    counted = sdk.messages.count_tokens(**asked)
    worker.plan = spoken("x")
    message = sdk.messages.create(max_tokens=9, **asked)
    assert counted.input_tokens == message.usage.input_tokens == len(worker.starts[-1].tokens)


@pytest.mark.parametrize("ended", [row[0] for row in FAILURES])
def test_the_public_client_raises_in_the_middle_of_a_stream(sdk, worker: FakeWorker, ended):
    gate = threading.Event()
    ids = as_tokens("some text", True)
    worker.plan = lambda start: [say(start, ids), gate, end(start, ended)]
    text = ""
    with (
        sdk.messages.stream(model="hashed", max_tokens=99, messages=ASKED) as stream,
        pytest.raises(anthropic.APIStatusError),
    ):
        for part in stream.text_stream:
            text += part
            gate.set()
    assert text == "some text"


@pytest.mark.parametrize(("ended", "status", "param"), FAILURES)
def test_an_error_before_any_token_has_its_status_and_shape(
    sdk, worker: FakeWorker, ended, status, param
):
    worker.plan = lambda start: [end(start, ended)]
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as raised:
            sdk.messages.create(model="hashed", max_tokens=99, messages=ASKED, stream=stream)
        assert raised.value.status_code == status
        told = raised.value.body
        assert told["type"] == "error" and told["error"]["message"]
        assert told["error"].get("param") == param
        assert told["error"]["retryable"] is (status != 400)
        assert raised.value.response.headers["request-id"] == told["request_id"]


def test_a_client_that_leaves_frees_its_work(glm, worker: FakeWorker):
    worker.plan = lambda start: [say(start, as_tokens("</think>hello", True)), threading.Event()]
    raw = json.dumps(body(stream=True)).encode()
    url = httpx.URL(glm[1].url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: one-secret\r\n"
        connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        received = b""
        while b"hello" not in received:
            received += connection.recv(65536)
    assert worker.aborted("client")


# ---- the wire -------------------------------------------------------------------------------


def test_a_stream_has_exactly_the_apis_events(client, worker: FakeWorker):
    worker.plan = spoken(ANSWER, batch=1000)
    told = sent(client.post("/v1/messages", json=body(stream=True)).text)
    kinds = [one["type"] for one in told]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == [
        "message_delta",
        "message_stop",
    ]
    message = told[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["id"].startswith("msg_") and message["role"] == "assistant"
    blocks = [one["content_block"]["type"] for one in told if one["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    opened = [one["index"] for one in told if one["type"] == "content_block_start"]
    closed = [one["index"] for one in told if one["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]
    at = -1
    for one in told:  # a delta belongs to the block that is open
        at = one["index"] if one["type"] == "content_block_start" else at
        assert one.get("index", at) == at
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def _whole_and_streamed(client: httpx.Client, **more: object) -> tuple[dict, list[dict]]:
    return (
        client.post("/v1/messages", json=body(**more)).json(),
        sent(client.post("/v1/messages", json=body(stream=True, **more)).text),
    )


def test_length_wins_over_calls_wherever_it_cuts(client, worker: FakeWorker):
    """D20: and a call that was cut is text in a whole answer, an open end in a stream."""
    ids = as_tokens(ANSWER, True)
    for tokens in range(1, len(ids) + 1, 3):
        cut = ids[:tokens]
        worker.plan = lambda start, cut=cut: [say(start, cut), end(start, Completed("length"))]
        whole, streamed = _whole_and_streamed(client, max_tokens=tokens)
        assert whole["stop_reason"] == "max_tokens"
        assert streamed[-2]["delta"]["stop_reason"] == "max_tokens"
        shown = b"".join(PIECES[one] for one in cut)
        inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
        assert inputs == [{"path": "a/é.py", "line": 7}, {}][: shown.count(CALLED.encode())]
        texts = "".join(one["text"] for one in whole["content"] if one["type"] == "text")
        unfinished = shown.decode("utf-8", "replace").split(CALLED)[-1].partition("<tool_call>")
        assert texts.endswith("".join(unfinished[1:]))


def test_a_stop_sequence_is_named(client, worker: FakeWorker):
    worker.plan = spoken("</think>one END two", batch=1000)
    whole, streamed = _whole_and_streamed(client, stop_sequences=["END"])
    expected = {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert {name: whole[name] for name in expected} == streamed[-2]["delta"] == expected
    assert whole["content"] == [{"type": "text", "text": "one "}]
    assert "END" not in json.dumps(streamed[:-2])


def test_one_call_at_a_time_where_the_client_wants_that(client, worker: FakeWorker):
    worker.plan = spoken(ANSWER, batch=1000)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole, _ = _whole_and_streamed(client, tool_choice=choice)
    assert [one["name"] for one in whole["content"] if one["type"] == "tool_use"] == ["read"]
    assert whole["stop_reason"] == "tool_use"


def test_acceptance_comes_with_the_end(client, worker: FakeWorker):
    worker.plan = spoken("</think>x", spec=SPEC)
    whole, streamed = _whole_and_streamed(client)
    assert whole["spec_accept_length"] == streamed[-2]["spec_accept_length"] == 2.5


def test_thinking_is_off_unless_asked_for(client, worker: FakeWorker):
    worker.plan = spoken("x", batch=1000)
    silent = body()
    del silent["thinking"]
    for asked, opened in (
        (silent, False),
        (body(thinking={"type": "disabled"}), False),
        (body(), True),
    ):
        whole = client.post("/v1/messages", json=asked).json()
        shown = b"".join(PIECES[token] for token in worker.starts[-1].tokens)
        assert shown.endswith(b"<think>") is opened
        assert whole["content"][0]["type"] == ("thinking" if opened else "text")


def test_sampling_travels_whole(client, worker: FakeWorker):
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 7}
    assert client.post("/v1/messages", json=body(**more)).is_success
    sampling = worker.starts[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (sampling.top_k, sampling.max_tokens) == (40, 7)


@pytest.mark.parametrize("ended", [row[0] for row in FAILURES])
def test_no_success_marker_can_be_written_for_a_failure(ended):
    fold = ChoiceFold(Style(BYTES))
    piece = fold.push(b"hi", [-1.0, -1.0], [[], []])
    reply = MessageReply(an_ask(), "id", fold)
    written = reply.opening() + reply.delta(0, piece)
    fold.finish(ended)
    for marker in (lambda: reply.final(0), reply.done, lambda: reply.whole([piece], [None])):
        with pytest.raises(Bug):
            marker()
    written += Anthropic().failed(failure(ended), "id")
    assert b"message_stop" not in written and b'"stop_reason":"' not in written
    assert sent(written.decode())[-1]["type"] == "error"


def test_a_stream_that_waits_says_that_the_server_lives(
    client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(generate, "IDLE_S", 0.02)
    for path, alive in (("/v1/messages", "event: ping"), ("/v1/chat/completions", ": waiting")):
        gate = threading.Event()
        worker.plan = lambda start, gate=gate: [
            say(start, as_tokens("hm</think>a", True)),
            gate,
            say(start, "b"),
            end(start, Completed("stop")),
        ]
        asked = body(stream=True) if path == "/v1/messages" else {"messages": ASKED, "stream": True}
        raw = ""
        with client.stream("POST", path, json=asked) as reply:
            for part in reply.iter_text():
                raw += part
                if raw.count(alive) >= 4:
                    gate.set()
        assert raw.count(alive) >= 4 and raw.index('"a"') < raw.rindex(alive)
        assert '"stop_reason":"end_turn"' in raw or raw.endswith("[DONE]\n\n")


# ---- what is refused ------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "data": "x"}}
BAD = [
    ("model", None),
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", 2**24 + 1),
    ("max_tokens", "many"),
    ("messages", []),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": [IMAGE]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, *ASKED]),
    ("messages", [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, *ASKED]),
    ("messages", [*ASKED, {"role": "assistant", "content": "The best answer is ("}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]),
    ("system", [IMAGE]),
    ("system", 5),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_k", -1),
    ("stop_sequences", ["x"] * 17),
    ("stop_sequences", [""]),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("tools", [{"name": "no spaces", "input_schema": {}}]),
    ("tool_choice", {"type": "tool"}),
    ("tool_choice", {"type": "tool", "name": "write"}),
    ("tool_choice", {"type": "perhaps"}),
    ("thinking", {"type": "deep"}),
    ("thinking", {"type": "enabled", "budget_tokens": 0}),
    ("output_config", {"format": {"type": "xml"}}),
    ("mcp_servers", [{"url": "x"}]),
    ("container", "x"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_what_cannot_be_served_is_named(client, field: str, value: object):
    asked = body(**{field: value}) if value is not None else body()
    if value is None:
        del asked[field]
    paths = ["/v1/messages"]
    if field in {*CountBody.__struct_fields__} - {"max_tokens"}:
        paths.append("/v1/messages/count_tokens")
    for path in paths:
        reply = client.post(path, json=asked)
        told = reply.json()
        assert (reply.status_code, told["type"]) == (400, "error"), told
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["param"].split("[")[0].split(".")[0] == field, told
        assert field in told["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"maxItems": 2**70}}}},
            "output_config.format.schema",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}, "strict": True}]},
            "tools[0].input_schema",
        ),
    ],
)
def test_what_cannot_be_followed_is_named_as_it_is_here(client, asked: Any, field: str):
    told = client.post("/v1/messages", json=body(**asked)).json()["error"]
    assert told["param"] == field and told["message"].startswith(f"{field}: ")


def nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = {"properties": {"x": value}}
    return value


HUGE = [
    ("tools[0].input_schema", body(tools=[{"name": "f", "input_schema": nested({}, 100)}])),
    (
        "messages[0].content[0].input",
        body(
            messages=[
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "i", "name": "f", "input": nested(1, 99)}
                    ],
                },
                *ASKED,
            ]
        ),
    ),
    ("messages", body(messages=ASKED * 4097)),
    ("tools", body(tools=TOOLS[:1] * 1025)),
    (
        "messages[0].content",
        body(messages=[{"role": "user", "content": [{"type": "text"}] * 70_000}]),
    ),
]


@pytest.mark.parametrize(("field", "asked"), HUGE, ids=[field for field, _ in HUGE])
def test_what_is_too_deep_or_too_many_is_named(client, field: str, asked: dict):
    """D37: before it costs anything."""
    reply = client.post("/v1/messages", json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_bodies_nested_beyond_reason_are_refused(client):
    inner = b'{"type": "tool_result", "content": ['
    for opened, closed in ((b"[", b"]"), (inner, b"]}")):
        deep = opened * 10**5 + closed * 10**5
        raw = b'{"model": "hashed", "max_tokens": 5, "messages": [{"role": "user", "content": %s}]}'
        reply = client.post("/v1/messages", content=raw % deep)
        assert (reply.status_code, reply.json()["type"]) == (400, "error")


def test_every_number_has_a_bound():
    for name, annotation in get_type_hints(MessagesBody, include_extras=True).items():
        schema = msgspec.json.schema(annotation)
        for part in schema.get("anyOf", [schema]):
            if part.get("type") in ("integer", "number"):
                assert "maximum" in part and {"minimum", "exclusiveMinimum"} & set(part), name


def test_other_versions_models_and_keys_are_refused_in_the_apis_shape(client):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for change, status, kind in (
            ({"anthropic-version": "2023-01-01"}, 400, "invalid_request_error"),
            ({"x-api-key": "wrong"}, 401, "authentication_error"),
        ):
            reply = client.post(path, json=body(), headers=change)
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
        reply = client.post(path, json=body(model="other"))
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert reply.json()["type"] == "error"


def test_a_prompt_beyond_the_model_is_named(client):
    long = [{"role": "user", "content": "x" * 9000}]
    reply = client.post("/v1/messages", json=body(messages=long, max_tokens=5))
    assert reply.status_code == 400 and "8192" in reply.json()["error"]["message"]
    counted = client.post("/v1/messages/count_tokens", json=body(messages=long))
    assert counted.json()["input_tokens"] > 9000


def test_a_model_without_the_format_refuses_tools_and_answers_text(gateway, client, worker):
    plain = gateway.client.post("/v1/messages", json=body())
    assert plain.json()["error"]["param"] == "tools"
    asked = body()
    del asked["tools"]
    text = gateway.client.post("/v1/messages", json=asked).json()
    assert text["content"] == [{"type": "text", "text": "Hello there"}]
