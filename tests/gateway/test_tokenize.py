"""`/tokenize` and `/detokenize` in vLLM's shapes, and a model by its name."""

from __future__ import annotations

import httpx
import pytest

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
