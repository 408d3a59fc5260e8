"""Tool calls and reasoning over OpenAI's API, with the public client: D18, D19, D20 on the wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from stanchion.core.messages import Start
from stanchion.core.outcome import Completed, PeerLost
from stanchion.gateway.markup import CALLED

from .conftest import Gateway, events, running
from .glm import as_tokens, glm_special, glm_vocabulary
from .test_metrics import until, values
from .worker import EOS, WAIT_S, FakeWorker, Plan, end, say

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            },
        },
    }
    for name in ("read", "list")
]
READ = (
    "<tool_call>read<arg_key>path</arg_key><arg_value>a/é.py</arg_value>"
    "<arg_key>line</arg_key><arg_value>7</arg_value></tool_call>"
)
LIST = "<tool_call>list</tool_call>"
ANSWER = f"hm\n</think>\nI look.\n{READ}\n{LIST}"
PIECES = glm_special().pieces
ASKED = [{"role": "user", "content": "look"}]

Spoken = Callable[..., Callable[[Start], Plan]]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def glm(request, tmp_path_factory) -> Iterator[tuple[bool, FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('tools')}/worker"
    vocabulary = glm_special() if request.param else glm_vocabulary()
    with FakeWorker(address) as worker, running(worker, vocabulary) as gateway:
        yield request.param, worker, gateway


@pytest.fixture
def worker(glm) -> Iterator[FakeWorker]:
    yield glm[1]
    glm[1].reset()


@pytest.fixture
def client(glm, worker) -> httpx.Client:
    return glm[2].client


@pytest.fixture
def sdk(glm, worker):
    url = f"{glm[2].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def spoken(glm) -> Spoken:
    """A plan that says this text, in batches, up to `tokens` of them, and how it ends."""

    def plan(text: str, batch: int = 3, tokens: int | None = None, ended: object = None):
        ids = as_tokens(text, glm[0])
        cut = ids if tokens is None else ids[:tokens]
        finished = ended or (Completed("stop") if tokens is None else Completed("length"))
        said = [*cut, EOS] if finished == Completed("stop") else cut

        def made(start: Start) -> Plan:
            parts = [said[at : at + batch] for at in range(0, len(said), batch)]
            return [*(say(start, part) for part in parts), end(start, finished)]

        return made

    return plan


def body(stream: bool = False, **more: object) -> dict:
    return {"messages": ASKED, "tools": TOOLS, "stream": stream, "max_tokens": 4000} | more


def joined(chunks: list[dict]) -> dict:
    """A streamed answer as the message that it is."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "name": "", "arguments": ""})
                told = message["tool_calls"][call["index"]]
                told["name"] += call["function"].get("name", "")
                told["arguments"] += call["function"]["arguments"]
            message["finish"] = choice["finish_reason"]
    return message


def flat(choice: dict) -> dict:
    message = choice["message"]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
        "finish": choice["finish_reason"],
    }


def unnamed(message: dict) -> dict:
    """Without ids, which are of one call each."""
    calls = [{name: call[name] for name in ("name", "arguments")} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def both_ways(client: httpx.Client, **more: object) -> tuple[dict, dict]:
    """The same asked streamed and not."""
    streamed = client.post("/v1/chat/completions", json=body(True, **more))
    assert streamed.text.endswith("data: [DONE]\n\n")
    whole = client.post("/v1/chat/completions", json=body(**more)).json()
    return unnamed(joined(events(streamed.text))), unnamed(flat(whole["choices"][0]))


# ---- the public client ----------------------------------------------------------------------


def test_the_public_client_sees_calls_streamed_and_not(sdk, worker: FakeWorker, spoken: Spoken):
    worker.plan = spoken(ANSWER)
    whole = sdk.chat.completions.create(model="hashed", messages=ASKED, tools=TOOLS)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look." and choice.message.reasoning_content == "hm"
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["read", "list"]
    assert json.loads(calls[0].function.arguments) == {"path": "a/é.py", "line": 7}
    assert json.loads(calls[1].function.arguments) == {}
    assert len({call.id for call in calls}) == 2 and all(len(call.id) <= 40 for call in calls)
    with sdk.chat.completions.stream(model="hashed", messages=ASKED, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "I look."
    assert [one.function.arguments for one in final.message.tool_calls] == [
        one.function.arguments for one in calls
    ]


def test_an_agents_turns_come_to_the_model_as_its_template_has_them(
    sdk, glm, worker: FakeWorker, spoken: Spoken
):
    worker.plan = spoken(ANSWER)
    first = sdk.chat.completions.create(model="hashed", messages=ASKED, tools=TOOLS)
    message = first.choices[0].message
    messages = [
        *ASKED,
        message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
            for number, call in enumerate(message.tool_calls)
        ),
    ]
    worker.plan = spoken("done</think>It is there.")
    second = sdk.chat.completions.create(model="hashed", messages=messages, tools=TOOLS)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == "It is there."
    tokens = worker.starts[-1].tokens
    shown = b"".join(PIECES[token] for token in tokens).decode()
    assert f"<think>hm</think>I look.{READ}{LIST}" in shown
    assert f"[{message.tool_calls[0].id}]result 0" in shown
    assert shown.startswith('<|system|>{"type": "function", "function": {"name": "read"')


# ---- every batch, every end -----------------------------------------------------------------


def test_every_batch_of_tokens_tells_the_same(client, worker: FakeWorker, spoken: Spoken):
    seen = []
    for batch in (1, 2, 5, 7, 1000):
        worker.plan = spoken(ANSWER, batch)
        seen += both_ways(client)
    assert all(one == seen[0] for one in seen)
    assert seen[0]["finish"] == "tool_calls" and seen[0]["content"] == "I look."


def test_length_wins_over_calls_wherever_it_cuts(client, glm, worker: FakeWorker, spoken: Spoken):
    """D20: an agent must not run a call that max_tokens cut in half."""
    whole = len(as_tokens(ANSWER, glm[0]))
    for tokens in {*range(1, whole, 5), *range(whole - 4, whole + 1)}:
        worker.plan = spoken(ANSWER, 4, tokens)
        streamed, at_once = both_ways(client, max_tokens=tokens)
        assert streamed == at_once, tokens
        assert at_once["finish"] == "length"
        shown = b"".join(PIECES[one] for one in as_tokens(ANSWER, glm[0])[:tokens])
        parsed = [is_object(call["arguments"]) for call in at_once["tool_calls"]]
        assert parsed.count(True) == shown.count(CALLED.encode()), tokens


def test_telling_calls_by_what_was_seen_would_run_half_of_one(
    client, glm, worker: FakeWorker, spoken: Spoken
):
    """The wrong way (vllm#53269): a call was seen, so the reason is `tool_calls`."""
    tokens = len(as_tokens(ANSWER[: ANSWER.index("é.py")], glm[0]))
    worker.plan = spoken(ANSWER, 4, tokens)
    streamed, _ = both_ways(client, max_tokens=tokens)
    by_what_was_seen = "tool_calls" if streamed["tool_calls"] else streamed["finish"]
    assert by_what_was_seen == "tool_calls" != streamed["finish"]
    assert not is_object(streamed["tool_calls"][0]["arguments"])


def test_a_call_that_the_model_left_open_is_no_call_to_make(
    client, worker: FakeWorker, spoken: Spoken
):
    worker.plan = spoken("hm</think>" + READ.removesuffix(CALLED))
    streamed, at_once = both_ways(client)
    assert streamed == at_once and at_once["finish"] == "stop"
    (call,) = at_once["tool_calls"]
    assert call["name"] == "read" and not is_object(call["arguments"])


def test_calls_are_counted_by_how_they_ended(client, worker: FakeWorker, spoken: Spoken):
    def counted() -> tuple[float, float]:
        now = values(client)
        name = "stanchion:tool_calls_total"
        return now.get(f"{name}|whole", 0.0), now.get(f"{name}|cut", 0.0)

    counted()  # a round trip: by then what the test before this one asked for is counted too
    whole, cut = counted()
    worker.plan = spoken(ANSWER + READ.removesuffix(CALLED))
    assert client.post("/v1/chat/completions", json=body()).is_success
    until(counted, lambda now: now == (whole + 2, cut + 1))


@pytest.mark.parametrize(
    ("stop", "content", "reasoning", "calls"),
    [
        ("k.", "I loo", "hm", 0),
        ("m\n", "", "h", 0),
        ("é.p", "I look.", "hm", 1),
        ("</arg_key>", "I look.", "hm", 1),
        (CALLED, "I look.", "hm", 1),
        ("</think>", "", "hm", 0),
    ],
)
def test_stop_strings_work_in_reasoning_calls_and_markers(
    client, worker: FakeWorker, spoken: Spoken, stop, content, reasoning, calls
):
    """D18: no character of a stop is out, wherever it is, and nothing it cut is called whole."""
    for batch in (1, 4, 1000):
        worker.plan = spoken(ANSWER, batch)
        streamed, at_once = both_ways(client, stop=[stop])
        assert streamed == at_once
        assert (at_once["finish"], at_once["content"]) == ("stop", content)
        assert at_once["reasoning_content"].strip() == reasoning
        assert len(at_once["tool_calls"]) == calls
        assert stop not in json.dumps(at_once, ensure_ascii=False)
        assert not any(is_object(call["arguments"]) for call in at_once["tool_calls"])


def test_without_parallel_calls_the_first_one_ends_the_answer(
    client, worker: FakeWorker, spoken: Spoken
):
    worker.plan = spoken(ANSWER, 1000)
    streamed, at_once = both_ways(client, parallel_tool_calls=False)
    assert streamed == at_once and at_once["finish"] == "tool_calls"
    assert [call["name"] for call in at_once["tool_calls"]] == ["read"]


def test_a_failure_inside_of_a_call_is_an_error_and_no_call(client, glm, worker: FakeWorker):
    """D22: what was told is a prefix of an answer, then an error; ids and roles came once."""
    gate = threading.Event()
    ids = as_tokens(ANSWER[: ANSWER.index("</arg_key>")], glm[0])
    worker.plan = lambda start: [say(start, ids), gate, end(start, PeerLost("gone"))]
    raw = ""
    with (
        client.stream("POST", "/v1/chat/completions", json=body(True)) as reply,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for part in reply.iter_text():
            raw += part
            if '"tool_calls"' in raw:
                gate.set()
    *chunks, error = events(raw)
    assert error["error"]["code"] == "worker_lost" and "[DONE]" not in raw
    assert raw.count('"role"') == raw.count('"id":"call_') == 1
    assert '"finish_reason":"' not in raw
    message = joined(chunks)
    assert (message["reasoning_content"], message["content"]) == ("hm", "I look.")
    assert message["tool_calls"][0]["name"] == "read"


# ---- what is asked for ----------------------------------------------------------------------


def test_tools_that_must_not_be_called_are_not_told(client, worker: FakeWorker, spoken: Spoken):
    worker.plan = spoken("a</think>b")
    for tool_choice, told in (("none", False), ("auto", True), (None, True)):
        assert client.post("/v1/chat/completions", json=body(tool_choice=tool_choice)).is_success
        shown = bytes(token for token in worker.starts[-1].tokens if token < 256)
        assert (b'"name": "read"' in shown) is told


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', '{"a": ' + "[" * 70 + "]" * 70 + "}"])
def test_arguments_sent_back_must_be_an_object(client, arguments: str):
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}],
        },
    ]
    reply = client.post("/v1/chat/completions", json=body(messages=messages))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_schemas_nested_beyond_reason_are_refused(client):
    deep: dict = {}
    for _ in range(100):
        deep = {"properties": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    reply = client.post("/v1/chat/completions", json=body(tools=tools))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools[0].function.parameters"


def test_a_parser_that_is_off_leaves_the_text_alone(tmp_path):
    with FakeWorker(f"ipc://{tmp_path}/worker") as worker:
        off = {"tool_call_parser": "none", "reasoning_parser": "none"}
        worker.plan = lambda start: [say(start, f"x{READ}"), end(start, Completed("stop"))]
        with running(worker, glm_vocabulary(), **off) as gateway:
            reply = gateway.client.post("/v1/chat/completions", json={"messages": ASKED})
            assert reply.json()["choices"][0]["message"]["content"] == f"x{READ}"
            refused = gateway.client.post("/v1/chat/completions", json=body(), timeout=WAIT_S)
            assert refused.json()["error"]["param"] == "tools"
