"""The public `openai` client holds a conversation with the gateway, streamed and not."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from stanchion.core.messages import PromptScores, Start, TopToken
from stanchion.core.outcome import Completed

from .conftest import Gateway, events
from .worker import EOS, SPEC, FakeWorker, Plan, answer, end, say


@pytest.fixture
def sdk(gateway: Gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _scripted(start: Start) -> Plan:
    """Answers with how long the prompt was, so that each turn shows what it was given."""
    return answer(f"turn of {len(start.tokens)} – ok ✓", batch=3, cached_tokens=5)(start)


def test_a_conversation_streamed_and_not_is_the_same(sdk: openai.OpenAI, worker: FakeWorker):
    worker.plan = _scripted
    said: dict[bool, list[str]] = {}
    for stream in (False, True):
        messages = [{"role": "system", "content": "Be brief."}]
        said[stream] = []
        for turn in ("Hello", "안녕하세요", "Bye"):
            messages.append({"role": "user", "content": turn})
            text = _turn(sdk, messages, stream)
            messages.append({"role": "assistant", "content": text})
            said[stream].append(text)
    assert said[True] == said[False]
    assert len(set(said[True])) == 3


def _turn(sdk: openai.OpenAI, messages: list, stream: bool) -> str:
    if not stream:
        reply = sdk.chat.completions.create(model="hashed", messages=messages)
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.prompt_tokens_details.cached_tokens == 5
        return reply.choices[0].message.content
    chunks = list(
        sdk.chat.completions.create(
            model="hashed",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_completions_of_text_and_of_ids_get_the_same_tokens(sdk: openai.OpenAI, worker: FakeWorker):
    worker.plan = answer("def f(): pass")
    for prompt in ("abc", [97, 98, 99], ["abc"], [[97, 98, 99]]):
        reply = sdk.completions.create(model="hashed", prompt=prompt)
        assert reply.choices[0].text == "def f(): pass"
        assert reply.choices[0].finish_reason == "stop"
    assert {tuple(start.tokens) for start in worker.starts} == {(97, 98, 99)}
    assert worker.starts[0].sampling.max_tokens == 16


def test_models_lists_the_served_model(sdk: openai.OpenAI):
    (model,) = sdk.models.list().data
    assert (model.id, model.max_model_len) == ("hashed", 8192)


def test_acceptance_runs_in_every_chunk_and_is_in_the_final_reply(
    client: httpx.Client, worker: FakeWorker
):
    worker.plan = answer("abcdef", batch=2, spec=SPEC)
    body = {"prompt": "x", "stream": True, "stream_options": {"include_spec": True}}
    chunks = events(client.post("/v1/completions", json=body).text)
    assert len(chunks) > 1
    expected = {
        "spec_accept_length": 2.5,
        "spec_accept_rate": 0.5,
        "spec_accept_prefix": 1.5,
        "spec_verify_steps": 4,
    }
    for chunk in chunks:
        assert {name: chunk[name] for name in expected} == expected
    whole = client.post("/v1/completions", json={"prompt": "x"}).json()
    assert {name: whole[name] for name in expected} == expected
    plain = events(client.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
    assert "spec_accept_length" not in plain[0] and plain[-1]["spec_accept_length"] == 2.5


def test_acceptance_is_absent_where_nothing_was_drafted(client: httpx.Client):
    reply = client.post("/v1/completions", json={"prompt": "x"}).json()
    assert not [name for name in reply if name.startswith("spec_")]


def test_several_choices_are_numbered_and_their_seeds_differ(
    client: httpx.Client, worker: FakeWorker
):
    body = {"prompt": ["a", "b"], "n": 2, "seed": 7}
    reply = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [start.sampling.seed for start in worker.starts] == [7, 8, 7, 8]
    assert reply["usage"]["prompt_tokens"] == 2
    streamed = client.post("/v1/completions", json=body | {"stream": True}).text
    finished = [c["choices"][0]["index"] for c in events(streamed) if _finish(c)]
    assert sorted(finished) == [0, 1, 2, 3] and streamed.endswith("data: [DONE]\n\n")


def _finish(chunk: dict) -> bool:
    return bool(chunk["choices"] and chunk["choices"][0]["finish_reason"])


def test_logprobs_of_a_chat_have_the_tokens_own_bytes(client: httpx.Client, worker: FakeWorker):
    worker.plan = answer("é")
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "é"
    assert [one["bytes"] for one in content] == [[0xC3], [0xA9], list(b"<|endoftext|>")]
    assert [len(one["top_logprobs"]) for one in content] == [2, 2, 2]
    streamed = events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)
    told = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    assert [one for part in told for one in part["content"]] == content


def test_legacy_logprobs_echo_and_prompt_scores(client: httpx.Client, worker: FakeWorker):
    def plan(start: Start) -> Plan:
        scores = PromptScores(
            request=start.request,
            logprobs=[-2.0, -3.0],
            top=[[TopToken(98, -2.0)], [TopToken(120, -0.1)]],
        )
        return [scores, say(start, "hi"), end(start)]

    worker.plan = plan
    body = {"prompt": "abc", "max_tokens": 2, "prompt_logprobs": 1}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -2.0, "rank": 1, "decoded_token": "b"}},
        {
            "99": {"logprob": -3.0, "rank": None, "decoded_token": "c"},
            "120": {"logprob": -0.1, "rank": 1, "decoded_token": "x"},
        },
    ]
    echo = {"prompt": "abc", "max_tokens": 2, "logprobs": 1, "echo": True}
    choice = client.post("/v1/completions", json=echo).json()["choices"][0]
    assert choice["text"] == "abchi"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "h", "i"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert worker.starts[-1].sampling.prompt_logprobs == 1


def test_token_ids_come_back_where_asked(client: httpx.Client, worker: FakeWorker):
    worker.plan = answer("ok", batch=2)
    body = {"prompt": "abc", "return_token_ids": True}
    reply = client.post("/v1/completions", json=body).json()
    assert reply["prompt_token_ids"] == [97, 98, 99]
    assert reply["choices"][0]["token_ids"] == [*b"ok", EOS]
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    assert chunks[0]["prompt_token_ids"] == [97, 98, 99]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [*b"ok", EOS]


def test_a_stop_string_ends_the_answer_and_the_work(client: httpx.Client, worker: FakeWorker):
    gate = threading.Event()
    worker.plan = lambda start: [
        say(start, "Hello, wor", cached_tokens=1),
        say(start, "ld STOP and more, much"),
        gate,
        end(start, Completed("stop")),
    ]
    for stream in (False, True):
        body = {"prompt": "x", "stop": ["d STO"], "stream": stream, "max_tokens": 99}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        reply = client.post("/v1/completions", json=body)
        parts = events(reply.text) if stream else [reply.json()]
        text = "".join(c["choices"][0]["text"] for c in parts if c["choices"])
        assert text == "Hello, worl"
        assert parts[-1]["usage"]["completion_tokens"] == len("Hello, world STO")
        finish = parts[-2 if stream else 0]["choices"][0]
        assert (finish["finish_reason"], finish["stop_reason"]) == ("stop", "d STO")
    assert worker.aborted("stop_string", 2)


def test_sampling_travels_whole(client: httpx.Client, worker: FakeWorker):
    body = {
        "prompt": "x",
        "max_tokens": 30,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2.5, "3": -100},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "draft_tokens": 3,
        "cache_salt": "pepper",
        "seed": -5,
    }
    assert client.post("/v1/completions", json=body).status_code == 200
    (start,) = worker.starts
    sampling = start.sampling
    assert (start.salt, start.tenant, sampling.greedy) == ("pepper", "default", True)
    assert sampling.logit_bias == ((3, -100.0), (5, 2.5))
    assert (sampling.stop_ids, sampling.ignore_eos, sampling.seed) == ((9,), True, -5)
    assert (sampling.top_k, sampling.draft_tokens, sampling.min_tokens) == (40, 3, 2)
    for everything in (0, -1):
        client.post("/v1/completions", json={"prompt": "x", "top_k": everything})
        assert worker.starts[-1].sampling.top_k is None
