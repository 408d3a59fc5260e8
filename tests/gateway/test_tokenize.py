"""`/tokenize` and `/detokenize` in vLLM's shapes, and a model by its name."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import httpx
import pytest

from .conftest import running
from .test_metrics import until
from .worker import FakeWorker


def test_a_prompt_there_and_back(client: httpx.Client):
    told = client.post("/tokenize", json={"prompt": "é<|user|>", "return_token_strs": True}).json()
    assert told == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [0xC3, 0xA9, 259],
        "token_strs": ["\ufffd", "\ufffd", "<|user|>"],
    }
    back = client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": "é<|user|>"}
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_chat_counts_as_its_completion_does(client: httpx.Client, worker: FakeWorker):
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "hashed"}
    told = client.post("/tokenize", json=chat).json()
    used = client.post("/v1/chat/completions", json=chat).json()["usage"]
    assert told["tokens"] == list(worker.starts[-1].tokens)
    assert told["count"] == used["prompt_tokens"] and told["token_strs"] is None
    bare = client.post("/tokenize", json=chat | {"add_generation_prompt": False}).json()
    assert bare["count"] == told["count"] - 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "x" * 2**20}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [272]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
    ],
)
def test_what_makes_no_sense_is_refused(client: httpx.Client, path: str, body: dict, status: int):
    assert client.post(path, json=body).status_code == status


def test_a_model_by_its_name(client: httpx.Client):
    (listed,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/hashed").json()["id"] == listed["id"] == "hashed"
    for other in ("other", "hashed/", "", "hashed%2f"):
        reply = client.get(f"/v1/models/{other}")
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_calls_that_only_count_are_bounded_too(alone: FakeWorker):
    """Their bodies are large and take the same threads."""
    with running(alone, in_flight_max=1) as gateway, ExitStack() as stack:
        url = httpx.URL(gateway.url)
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
        for _ in range(2):  # each is open, and waits for the rest of its body
            held = stack.enter_context(socket.create_connection((url.host, url.port), timeout=10))
            held.sendall(head)
        paths = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions")
        for path in paths:
            reply = until(
                lambda path=path: gateway.client.post(path, json={}),
                lambda reply: reply.status_code == 429,
            )
            assert "2 calls are open" in reply.text
