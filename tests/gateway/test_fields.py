"""Bad input costs its sender a 4xx that names field and bound, and costs nobody else (D37)."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import get_args, get_type_hints

import httpx
import msgspec
import pytest

from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.gateway.body import ChatBody, CompletionBody, Shared

from .conftest import Gateway
from .worker import WAIT_S, FakeWorker, end, say

WRONG_NUMBERS = {
    "n": (0, 65, 5_000_000),
    "max_tokens": (-1, 2**24 + 1, 8192),
    "min_tokens": (-1, 2**24 + 1, 100),
    "temperature": (-1, 2.0001),
    "top_p": (-1, 0, 1.0001),
    "top_k": (-2,),
    "min_p": (-1, 1.0001),
    "presence_penalty": (-2.0001, 2.0001),
    "frequency_penalty": (-2.0001, 2.0001),
    "repetition_penalty": (-1, 0, 10.0001),
    "prompt_logprobs": (-1, 21),
    "draft_tokens": (-1, 6),
    "priority": (-101, 101),
    "logprobs": (-1, 21),
    "seed": (-(2**63) - 1,),
}
EVER_WRONG = ("a string", [], {}, True, 2**63, 2**70, 1e308)
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999")


def _matrix() -> list[tuple[str, str]]:
    rows = [(f, json.dumps(v)) for f, vs in WRONG_NUMBERS.items() for v in (*vs, *EVER_WRONG)]
    rows += [(field, literal) for field in WRONG_NUMBERS for literal in LITERALS]
    return rows


SLOW_S = 0.05


def _timed(client: httpx.Client, path: str, body: bytes) -> tuple[float, httpx.Response]:
    began = time.perf_counter()
    reply = client.post(path, content=body)
    return time.perf_counter() - began, reply


def refused(client: httpx.Client, path: str, body: bytes, field: str) -> dict:
    took, reply = _timed(client, path, body)
    if took > SLOW_S:  # once more: the machine may have been busy with something else
        took, reply = _timed(client, path, body)
    assert reply.status_code == 400, (reply.status_code, reply.text[:300])
    error = reply.json()["error"]
    assert error["param"].split("[")[0].split(".")[0] == field, error
    assert field in error["message"] and error["type"] == "invalid_request_error"
    assert error["retryable"] is False
    refused.slowest = max(refused.slowest, took)
    return error


refused.slowest = 0.0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_number_out_of_its_bound_is_named(client: httpx.Client, path: str):
    chat = path.endswith("chat/completions")
    refused.slowest = 0.0
    for field, value in _matrix():
        if chat and field == "logprobs":
            field = "top_logprobs"
        start = (
            '"max_tokens": 16, "messages": [{"role": "user", "content": "x"}]'
            if chat
            else '"prompt": "x"'
        )
        error = refused(client, path, f'{{{start}, "{field}": {value}}}'.encode(), field)
        assert any(word in error["message"] for word in ("it must be", "at most", "over", "only"))
    assert refused.slowest < SLOW_S


BAD_COMPLETIONS = [
    ("stop", ["x"] * 17),
    ("stop", ["x"] * 10**6),
    ("stop", "x" * 257),
    ("stop", ""),
    ("stop", ["a", 5]),
    ("stop_token_ids", [272]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [0] * 65),
    ("logit_bias", {"272": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [1, 272]),
    ("prompt", [1, -1]),
    ("prompt", [1, 2**70]),
    ("prompt", [1, "a"]),
    ("prompt", [[1], []]),
    ("prompt", ["a"] * 65),
    ("prompt", {"a": 1}),
    ("prompt", None),
    ("cache_salt", "x" * 129),
    ("model", 5),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("suffix", "x"),
    ("best_of", 2),
    ("use_beam_search", True),
    ("response_format", {"type": "xml"}),
    ("guided_regex", "(a*"),
    ("structured_outputs", {"structural_tag": {}}),
]
BAD_CHATS = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "tool"}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]),
    ("messages", [{"role": "assistant", "function_call": {"name": "f"}}]),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]),
    ("messages", [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]),
    ("messages", [{"role": "user", "content": "x"}] * 4097),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", [{"type": "retrieval", "function": {"name": "f"}}]),
    ("tools", [{"type": "function", "function": {"name": "no spaces"}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 1025),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{}]),
    ("response_format", {"type": "json_schema"}),
    ("modalities", ["audio"]),
    ("audio", {}),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"a": [1]}),
    ("continue_final_message", True),
    ("top_logprobs", 3),
    ("max_completion_tokens", 0),
    ("max_tokens", 0),
]


@pytest.mark.parametrize(("field", "value"), BAD_COMPLETIONS)
def test_bad_completions_are_named(client: httpx.Client, field: str, value: object):
    body = {"prompt": "x"} | {field: value}
    refused(client, "/v1/completions", json.dumps(body).encode(), field)


@pytest.mark.parametrize(("field", "value"), BAD_CHATS)
def test_bad_chats_are_named(client: httpx.Client, field: str, value: object):
    body = {"messages": [{"role": "user", "content": "x"}]} | {field: value}
    refused(client, "/v1/chat/completions", json.dumps(body).encode(), field)


@pytest.mark.parametrize("key", ["include_everything", "continuous_usage_stats"])
def test_an_unknown_stream_option_is_refused(client: httpx.Client, key: str):
    body = {"prompt": "x", "stream": True, "stream_options": {key: True}}
    refused(client, "/v1/completions", json.dumps(body).encode(), "stream_options")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        b'{"x": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(client: httpx.Client, raw: bytes):
    reply = client.post("/v1/completions", content=raw)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].split("[")[0] in ("body", "prompt")


def test_unknown_fields_and_nulls_are_ignored(client: httpx.Client):
    nulls = dict.fromkeys(CompletionBody.__struct_fields__)
    body = nulls | {"prompt": "x", "user": "someone", "store": False, "parallel_tool_calls": True}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_another_model_is_not_found(client: httpx.Client):
    reply = client.post("/v1/completions", json={"prompt": "x", "model": "other"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_its_bound_is_413_without_being_held(client: httpx.Client, declared: bool):
    part = b"x" * 2**20
    parts = (part for _ in range(100))
    headers = {"content-length": str(100 * 2**20)} if declared else {}
    reply = client.post("/v1/completions", content=parts, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert client.get("/health").status_code == 200


def test_a_client_that_sends_all_before_it_reads_still_gets_the_answer(gateway: Gateway):
    """Closing at once on a client that still sends would reset the answer away."""
    url = httpx.URL(gateway.url)
    size = 64 * 2**20
    with socket.create_connection((url.host, url.port), timeout=WAIT_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        connection.sendall(head.encode() + b"x" * size)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_prompt_and_answer_beyond_the_model_are_refused_with_the_true_bound(client: httpx.Client):
    body = {"prompt": "x" * 8000, "max_tokens": 193}
    error = refused(client, "/v1/completions", json.dumps(body).encode(), "max_tokens")
    assert "8000 prompt tokens + 193 = 8193, over 8192" in error["message"]
    assert client.post("/v1/completions", json=body | {"max_tokens": 192}).status_code == 200
    for length in (8192, 100_000):
        body = {"prompt": "x" * length}
        error = refused(client, "/v1/completions", json.dumps(body).encode(), "prompt")
        assert "8192" in error["message"]


def test_an_absent_max_tokens_fills_what_fits(client: httpx.Client, worker: FakeWorker):
    client.post("/v1/completions", json={"prompt": "x" * 8190})
    assert worker.starts[-1].sampling.max_tokens == 2
    chat = {"messages": [{"role": "user", "content": "x" * 8000}]}
    client.post("/v1/chat/completions", json=chat)
    assert worker.starts[-1].sampling.max_tokens == 8192 - 8002


def test_others_in_flight_finish_while_bad_ones_are_refused(
    client: httpx.Client, worker: FakeWorker
):
    gate = threading.Event()

    def plan(start: Start) -> list:
        return [say(start, "he"), gate, say(start, "llo"), end(start)]

    worker.plan = plan
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as reply:
        lines = reply.iter_lines()
        assert "he" in next(lines)
        for body in (b'{"n": 5000000}', b"[" * 10**6, b'{"prompt": "x", "logprobs": 1e308}'):
            assert client.post("/v1/completions", content=body).status_code == 400
        gate.set()
        assert "[DONE]" in "".join(lines)


def test_the_bounds_are_those_of_the_engine():
    ours = get_type_hints(Shared, include_extras=True)
    theirs = get_type_hints(Sampling, include_extras=True)
    compared = 0
    for name in set(ours) & set(theirs) - {"logit_bias", "top_k"}:
        compared += 1
        (declared,) = (part for part in get_args(ours[name]) if part is not type(None))
        kept = [part for part in get_args(theirs[name]) if part is not type(None)]
        expected = kept[0] if type(None) in get_args(theirs[name]) else theirs[name]
        assert msgspec.json.schema(declared) == msgspec.json.schema(expected), name
    assert compared >= 9


def test_every_numeric_field_is_in_the_matrix():
    """A new field without a row here, or without a bound, fails."""
    for body in (CompletionBody, ChatBody):
        for name, annotation in get_type_hints(body, include_extras=True).items():
            schema = msgspec.json.schema(annotation)
            for part in schema.get("anyOf", [schema]):
                if part.get("type") in ("integer", "number"):
                    assert "maximum" in part and {"minimum", "exclusiveMinimum"} & set(part), name
                    tested = {*WRONG_NUMBERS, "top_logprobs", "best_of", "max_completion_tokens"}
                    assert name in tested
