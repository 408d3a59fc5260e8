"""Foreign servers behind the gateway, each kind with its stub: text, outcomes, lies, pairs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx
import openai
import pytest

from stanchion.gateway.tokens import byte_vocabulary, load_vocabulary
from stanchion.gateway.upstream.client import Patience
from stanchion.gateway.upstream.passage import text_vocabulary
from stanchion.gateway.upstream.place import place
from stanchion.gateway.upstream.watch import Upstreams, Wanted
from stanchion.gateway.upstream.wire import Kind

from .conftest import Gateway, events
from .foreign import CUT, TEXT, USAGE, Events, Foreign, Refusal, text_events, until
from .liar import TOKENS, cold
from .test_integrity import BAD, BODY, streamed, whole
from .test_metrics import values
from .worker import EOS

KINDS: tuple[Kind, ...] = ("vllm", "sglang", "openai")
IDS: tuple[Kind, ...] = ("vllm", "sglang")
PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "openai": "/v1/completions"}
QUICK = Patience(connect_s=2.0, read_s=2.0, poll_s=0.05, look_s=2.0)


@contextmanager
def front(
    folder: Path,
    *servers: Foreign,
    roles: Sequence[str] = (),
    named: bool = False,
    patience: Patience = QUICK,
    key: str = "",
    **settings: Any,
) -> Iterator[Gateway]:
    """A gateway in front of servers that run already."""
    text = servers[0].kind == "openai"
    vocabulary = text_vocabulary() if text else byte_vocabulary()
    watched = settings.get("integrity", "balanced") in ("balanced", "guarded", "strict")
    places = [
        place(f"{one.kind}:{one.url}" if named else one.url, role)  # type: ignore[arg-type]
        for one, role in zip(servers, roles or ["both"] * len(servers))
    ]
    wanted = Wanted(vocabulary, text, watched, key=key, patience=patience)
    upstreams = Upstreams(places, wanted)
    gateway = Gateway(f"ipc://{folder}/join", vocabulary, settings, beside=upstreams.running)
    gateway.start()
    try:
        with gateway.client:
            gateway.until_ready()
            yield gateway
    finally:
        gateway.stop()
        gateway.join()


@contextmanager
def one(folder: Path, kind: Kind, **settings: Any) -> Iterator[tuple[Gateway, Foreign]]:
    with Foreign(kind) as server, front(folder, server, **settings) as gateway:
        yield gateway, server


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Kind], Any]]:
    """One server of a kind and its gateway, for all tests that leave it as it was."""
    with ExitStack() as stack:
        made: dict[Kind, tuple[Gateway, Foreign]] = {}

        def of(kind: Kind) -> tuple[Gateway, Foreign]:
            if kind not in made:
                made[kind] = stack.enter_context(one(tmp_path_factory.mktemp(kind), kind))
            gateway, server = made[kind]
            server.edit, server.batch = (lambda said, body: said), 3
            server.asked.clear()
            return gateway, server

        yield of


OfKind = Callable[[Kind], tuple[Gateway, Foreign]]


def chat(client: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400} | more
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


# ---- the same text --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 7, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_servers_own(of_kind: OfKind, kind: Kind, batch: int) -> None:
    gateway, server = of_kind(kind)
    server.batch = batch
    assert streamed(gateway.client)[0] == TEXT
    reply = whole(gateway.client).json()
    assert reply["choices"][0]["text"] == TEXT
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("cumulative", [True, False])
def test_ids_scores_and_usage_are_the_servers(
    of_kind: OfKind, kind: Kind, cumulative: bool
) -> None:
    gateway, server = of_kind(kind)
    server.cumulative = cumulative
    logprobs = 2 if kind == "vllm" else 0
    reply = whole(gateway.client, return_token_ids=True, logprobs=logprobs).json()
    choice = reply["choices"][0]
    assert choice["token_ids"] == TOKENS
    assert reply["usage"]["completion_tokens"] == len(TOKENS)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert choice["logprobs"]["token_logprobs"][5] == pytest.approx(_logged(5))
    if kind == "vllm":
        assert len(choice["logprobs"]["top_logprobs"][5]) == 2


def _logged(at: int) -> float:
    return cold(TOKENS[at], 1 + at)


@pytest.mark.parametrize("kind", IDS)
def test_a_request_is_said_in_the_servers_words(of_kind: OfKind, kind: Kind) -> None:
    gateway, server = of_kind(kind)
    whole(
        gateway.client, max_tokens=5, temperature=0.5, top_k=7, seed=3, stop_token_ids=[9],
        min_tokens=2, logit_bias={"4": 1.5}, repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip
    (body,) = server.bodies(PATHS[kind])
    said = body if kind == "vllm" else body["sampling_params"]
    assert said["temperature"] == 0.5 and said["top_k"] == 7 and said["stop_token_ids"] == [9]
    assert said["logit_bias"] == {"4": 1.5} and said["ignore_eos"] is True
    assert said["repetition_penalty"] == 1.1
    names = {
        "vllm": {"max_tokens": 5, "min_tokens": 2, "seed": 3},
        "sglang": {"max_new_tokens": 5, "min_new_tokens": 2, "sampling_seed": 3},
    }
    assert {name: said[name] for name in names[kind]} == names[kind]
    assert (body["prompt"] if kind == "vllm" else body["input_ids"]) == [ord("x")]


@pytest.mark.parametrize("kind", IDS)
def test_scores_of_the_prompt(of_kind: OfKind, kind: Kind) -> None:
    gateway, server = of_kind(kind)
    reply = whole(gateway.client, prompt="xyz", prompt_logprobs=0, max_tokens=4).json()
    said = reply["choices"][0]["prompt_logprobs"]
    assert said[0] is None
    assert said[1][str(ord("y"))]["logprob"] == pytest.approx(cold(ord("y"), 1))
    assert reply["usage"]["completion_tokens"] == 4
    (body,) = server.bodies(PATHS[kind])
    assert not body.get("stream")


# ---- finding out what a server is -----------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", IDS)
def test_a_server_that_does_not_say_who_it_is(tmp_path: Path, kind: Kind, named: bool) -> None:
    with Foreign(kind, owned=False) as server, front(tmp_path, server, named=named) as gateway:
        assert streamed(gateway.client)[0] == TEXT
        assert server.bodies(PATHS[kind])


def refused(folder: Path, server: Foreign, text: bool, said: str = "", model: str = "") -> str:
    """Why a gateway does not start in front of it."""
    vocabulary = text_vocabulary() if text else byte_vocabulary()
    wanted = Wanted(vocabulary, text, True, model, patience=QUICK)
    upstreams = Upstreams([place(f"{said}{server.url}", "both")], wanted)
    gateway = Gateway(f"ipc://{folder}/join", vocabulary, {}, beside=upstreams.running)
    gateway._thread.start()
    assert gateway.join() == "workers_failed"
    return upstreams.refused


def test_servers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with Foreign("openai") as server:
        why = refused(tmp_path, server, text=False)
        assert server.name in why and "leave --tokenizer out" in why
        why = refused(tmp_path, server, text=True, said="vllm:")
        assert "give --tokenizer" in why
        assert "it serves: m" in refused(tmp_path, server, text=True, model="another")


def test_servers_of_two_models_are_no_cluster(tmp_path: Path) -> None:
    with Foreign("vllm") as first, Foreign("vllm", model="n") as second:
        wanted = Wanted(byte_vocabulary(), False, True, patience=QUICK)
        places = [place(one.url, "both") for one in (first, second)]
        upstreams = Upstreams(places, wanted)
        gateway = Gateway(f"ipc://{tmp_path}/join", byte_vocabulary(), {}, beside=upstreams.running)
        gateway._thread.start()
        assert gateway.join() == "workers_failed"
        assert "model: " in upstreams.refused


# ---- outcomes -------------------------------------------------------------------------------

OUTCOMES = [
    (Refusal(429, {"error": {"message": "full"}}, {"Retry-After": "7"}), 429, "overloaded"),
    (Refusal(503, headers={"Retry-After": "3"}), 429, "overloaded"),
    (Refusal(400, {"error": {"message": "no", "param": "top_k"}}), 400, "invalid_request_error"),
    (Refusal(413, {"message": "too long"}), 400, "invalid_request_error"),
    (Refusal(422, {"detail": "no"}), 400, "invalid_request_error"),
    (Refusal(401, {"error": {"message": "no key"}}), 503, "worker_lost"),
    (Refusal(404, {"error": {"message": "no model", "code": 404}}), 503, "worker_lost"),
    (Refusal(302, headers={"Location": "http://127.0.0.1:1/"}), 503, "worker_lost"),
    (Refusal(500, "garbage"), 503, "worker_lost"),
    (CUT, 503, "worker_lost"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status", "code"), OUTCOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_refusals_are_typed(
    of_kind: OfKind, kind: Kind, refusal: Any, status: int, code: str, stream: bool
) -> None:
    gateway, server = of_kind(kind)
    server.refuse = [refusal] * 2  # what may be retried is, once
    reply = whole(gateway.client, stream=stream)
    server.refuse = []
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["code"] == code
    if status == 400 and refusal.status == 400:
        assert reply.json()["error"]["param"] == "top_k"
    if refusal is not CUT and "Retry-After" in refusal.headers:
        assert reply.headers["retry-after"] == refusal.headers["Retry-After"]
    tries = 1 if status == 400 else 2
    assert len(server.bodies(PATHS[kind])) == tries


@pytest.mark.parametrize("refusal", [CUT, Refusal(503), Refusal(500)])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_notices_when_another_server_can_do_it(
    tmp_path: Path, kind: Kind, refusal: Any
) -> None:
    with Foreign(kind) as first, Foreign(kind) as second, front(tmp_path, first, second) as gateway:
        first.refuse = second.refuse = [refusal]
        assert streamed(gateway.client)[0] == TEXT
        assert len(first.bodies(PATHS[kind])) == len(second.bodies(PATHS[kind])) == 1
        seen = values(gateway.client)
        retries = [seen.get(f"stanchion:request_retries_total|{why}", 0.0)
                   for why in ("peer_lost", "overloaded")]  # fmt: skip
        assert sum(retries) == 1


def test_a_server_that_is_silent_too_long(tmp_path: Path) -> None:
    gate = threading.Event()
    patience = Patience(connect_s=2.0, read_s=0.2, poll_s=0.05, look_s=2.0)
    with Foreign("vllm") as server, front(tmp_path, server, patience=patience) as gateway:
        server.edit = lambda said, body: [*said[:2], gate, *said[2:]]
        text, said, done = streamed(gateway.client)
        assert not done and TEXT.startswith(text) and text
        assert said[-1]["error"]["code"] == "worker_lost"
        gate.set()


# ---- lies -----------------------------------------------------------------------------------


def _in_first(change: Callable[[dict[str, Any], str], None]) -> Callable[..., Events]:
    def edit(said: Events, body: dict[str, Any]) -> Events:
        first = json.loads(json.dumps(said[0]))
        change(first, "vllm" if "prompt" in body else "sglang")
        return [first, *said[1:]]

    return edit


def _ids(first: dict[str, Any], ids: list[Any]) -> None:
    holder = first["choices"][0] if "choices" in first else first
    name = "token_ids" if "choices" in first else "output_ids"
    holder[name] = ids


def _score_count(first: dict[str, Any], kind: str) -> None:
    if kind == "vllm":
        first["choices"][0]["logprobs"]["token_logprobs"].pop()
    else:
        first["meta_info"]["output_token_logprobs"].pop()


def _of_ids(lie: str) -> bool:
    """Servers of text say neither."""
    return "ids" in lie or "score" in lie


LIES: dict[str, tuple[Callable[[Events, dict[str, Any]], Events], str]] = {
    "bad ids": (_in_first(lambda first, kind: _ids(first, [1, 2, 10**6])), "output_suspect"),
    "negative ids": (_in_first(lambda first, kind: _ids(first, [1, -1, 2])), "output_suspect"),
    "ids that are none": (_in_first(lambda first, kind: _ids(first, [1, "x", 2])), "worker_lost"),
    "score count": (_in_first(_score_count), "worker_lost"),
    "no end mark": (lambda said, body: said[:-1], "worker_lost"),
    "no finish": (lambda said, body: [*said[:2], said[-1]], "worker_lost"),
    "garbage": (lambda said, body: [said[0], b"data: {garbage\n\n", *said[1:]], "worker_lost"),
    "no JSON at all": (lambda said, body: [b"hello\n" * 50], "worker_lost"),
    "deep": (lambda said, body: [b"data: " + b"[" * 50_000 + b"\n\n", *said], "worker_lost"),
    "endless line": (lambda said, body: [said[0], *[b"x" * 2**17] * 200], "worker_lost"),
    "cut": (lambda said, body: [said[0], CUT], "worker_lost"),
    "not UTF-8": (lambda said, body: [b"data: \xff\xfe\n\n", *said], "worker_lost"),
    "an error event": (
        lambda said, body: [said[0], {"error": {"message": "oh", "code": 500}}, said[-1]],
        "worker_lost",
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("kind", "lie"),
    [(kind, lie) for kind in KINDS for lie in LIES if kind != "openai" or not _of_ids(lie)],
)
def test_a_lying_server_ends_typed(of_kind: OfKind, kind: Kind, lie: str, stream: bool) -> None:
    edit, code = LIES[lie]
    gateway, server = of_kind(kind)
    server.edit = edit
    if stream:
        text, said, done = streamed(gateway.client)
        assert not done and TEXT.startswith(text)
        assert said[-1]["error"]["code"] == code
    else:
        reply = whole(gateway.client)
        assert reply.status_code >= 500
        assert reply.json()["error"]["code"] == code
    server.edit = lambda said, body: said
    assert streamed(gateway.client)[0] == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_was_asked_for(of_kind: OfKind, kind: Kind) -> None:
    gateway, server = of_kind(kind)
    if kind == "sglang":
        server.cumulative = True
        more = {"output_ids": [65] * 9, "meta_info": {"completion_tokens": 9}}
        server.edit = lambda said, body: [more, *said]
    elif kind == "vllm":
        choice = {"token_ids": [65] * 9, "logprobs": {"token_logprobs": [-1.0] * 9}}
        server.edit = lambda said, body: [{"choices": [choice]}, *said]
    else:
        server.edit = lambda said, body: said  # its usage says 22 tokens
    if kind == "sglang":
        more["meta_info"]["output_token_logprobs"] = [[-1.0, 65, None]] * 9  # type: ignore[index]
    _, said, done = streamed(gateway.client, max_tokens=4)
    assert not done and said[-1]["error"]["code"] == "output_suspect"


@pytest.mark.parametrize("kind", IDS)
def test_a_body_is_bounded(of_kind: OfKind, kind: Kind) -> None:
    gateway, server = of_kind(kind)
    server.edit = lambda said, body: [json.dumps(said[0]).encode() + b" " * 2**22]
    reply = whole(gateway.client, prompt="xyz", prompt_logprobs=0, max_tokens=4)
    assert reply.json()["error"]["code"] == "worker_lost"
    assert "more than" in reply.json()["error"]["message"]


def test_text_without_end(of_kind: OfKind) -> None:
    gateway, server = of_kind("openai")
    chunk = {"choices": [{"text": "word " * 1000}]}
    server.edit = lambda said, body: [chunk] * 100
    _, said, done = streamed(gateway.client, max_tokens=4)
    assert not done and said[-1]["error"]["code"] == "output_suspect"


# ---- leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_is_told_to_the_server(tmp_path: Path, kind: Kind) -> None:
    gate = threading.Event()
    with Foreign(kind, aborts=True) as server, front(tmp_path, server) as gateway:
        server.edit = lambda said, body: [*said[:2], gate, *said[2:]]
        wanted = BODY | {"stream": True}
        with gateway.client.stream("POST", "/v1/completions", json=wanted) as reply:
            next(reply.iter_text())
        assert server.wait_for(lambda: server.left == 1)
        until(
            lambda: values(gateway.client)[f"stanchion:requests_in_flight|both|{server.name}"] == 0
        )
        request = server.bodies(PATHS[kind])[0]
        if kind == "vllm":
            assert server.wait_for(lambda: len(server.bodies("/inference/v1/abort_requests")) == 2)
            said = server.bodies("/inference/v1/abort_requests")[-1]
            assert said == {"request_ids": [f"cmpl-{request['request_id']}-0"]}
        if kind == "sglang":
            assert server.wait_for(lambda: server.bodies("/abort_request") != [])
            assert server.bodies("/abort_request") == [{"rid": request["rid"]}]
        gate.set()
        server.edit = lambda said, body: said
        assert streamed(gateway.client)[0] == TEXT


def test_a_stop_string_ends_the_servers_work(tmp_path: Path) -> None:
    gate = threading.Event()
    with Foreign("vllm") as server, front(tmp_path, server) as gateway:
        server.edit = lambda said, body: [*said[:20], gate, *said[20:]]
        text, _, done = streamed(gateway.client, stop=["1:"])
        assert (text, done) == (TEXT[: TEXT.index("1:")], True)
        assert server.wait_for(lambda: server.left == 1)
        gate.set()


def test_tenants_share_no_cache(tmp_path: Path) -> None:
    keys = ("one:a", "two:b")
    with Foreign("vllm") as vllm, front(tmp_path, vllm, api_keys=keys, key="s") as gateway:
        for secret, salt in (("a", ""), ("b", ""), ("a", "z")):
            headers = {"authorization": f"Bearer {secret}"}
            body = BODY | ({"cache_salt": salt} if salt else {})
            assert gateway.client.post("/v1/completions", json=body, headers=headers).is_success
        salts = [body["cache_salt"] for body in vllm.bodies("/v1/completions")]
        assert len({*salts}) == 3
        assert all(one["Authorization"] == "Bearer s" for one in vllm.headers)


# ---- the monitor and the witness ------------------------------------------------------------

JUNK = (60, [*BAD, *TEXT.swapcase().encode()[:200]])


@pytest.mark.parametrize("kind", IDS)
def test_a_corrupted_answer_is_caught_in_strict(tmp_path: Path, kind: Kind) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(Foreign(kind)) for _ in range(2))
        with front(tmp_path, first, second, integrity="strict") as gateway:
            first.junk = second.junk = (60, TEXT.swapcase().encode()[:200])
            servers = [first, second]

            def heal(said: Events, body: dict[str, Any]) -> Events:
                for server in servers:
                    server.junk = None
                return said

            first.edit = second.edit = heal
            assert streamed(gateway.client)[0] == TEXT
            seen = values(gateway.client)
            assert seen["stanchion:witness_verdicts_total|confirmed"] == 1
            assert seen["stanchion:witness_verdicts_total|clean"] == 1
            assert seen["stanchion:quality_retries_total|completed"] == 1
            bodies = [body for server in servers for body in server.bodies(PATHS[kind])]
            cold = [body for body in bodies if not body.get("stream")]
            name = "cache_salt" if kind == "vllm" else "extra_key"
            assert len(cold) == 2 and len({body[name] for body in cold}) == 2


def test_a_suspicion_is_cleared_by_a_witness(tmp_path: Path) -> None:
    """Acceptance comes once, at the end: then it is looked at."""
    with Foreign("vllm", spec=(100, 300, 300)) as first, Foreign("vllm") as second:
        second.spec = first.spec
        with front(tmp_path, first, second) as gateway:
            assert streamed(gateway.client)[0] == TEXT
            seen = values(gateway.client)
            assert seen["stanchion:output_anomalies_total|witness|high_acceptance"] == 1
            assert seen["stanchion:witness_verdicts_total|clean"] == 1
            assert seen["stanchion:monitored_answers_total|report"] == 1
            name = first.name if first.bodies("/v1/completions")[0].get("stream") else second.name
            assert seen[f"stanchion:monitor_signals|both|final_acceptance|{name}"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_server_does_not_give_is_said(tmp_path: Path, kind: Kind) -> None:
    with one(tmp_path, kind) as (gateway, server):
        seen = values(gateway.client)
        ids = 0 if kind == "openai" else 1
        given = {
            signal: seen[f"stanchion:monitor_signals|both|{signal}|{server.name}"]
            for signal in ("token_ids", "logprobs", "witness", "running_acceptance")
        }
        wanted = {"token_ids": ids, "logprobs": ids, "witness": ids, "running_acceptance": 0}
        assert given == wanted


def test_text_is_never_clean(tmp_path: Path) -> None:
    with Foreign("openai") as first, Foreign("openai") as second:
        first.edit = second.edit = lambda said, body: [_text_chunk("\x01\x02\x03\x04"), *said]
        with front(tmp_path, first, second) as gateway:
            text, _, done = streamed(gateway.client)
            assert (text, done) == ("\x01\x02\x03\x04" + TEXT, True)
            seen = values(gateway.client)
            assert seen["stanchion:witness_verdicts_total|unwitnessed"] >= 1
            assert seen["stanchion:witness_verdicts_total|clean"] == 0
        with front(tmp_path, first, second, integrity="strict") as gateway:
            text, said, done = streamed(gateway.client)
            assert not done and said[-1]["error"]["code"] == "output_suspect"


def _text_chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


def test_a_score_that_is_none_breaks_the_answer_off(of_kind: OfKind) -> None:
    gateway, server = of_kind("vllm")

    def none(first: dict[str, Any], kind: str) -> None:
        first["choices"][0]["logprobs"]["token_logprobs"][1] = None

    server.edit = _in_first(none)
    reply = whole(gateway.client)
    assert reply.json()["error"]["code"] == "output_suspect"


# ---- text servers ---------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = {"path": 'a </b> "c"\n', "lines": 3, "other": {"deep": [1, None, "2"]}, "free": "7"}


def _calling(said: Events, body: dict[str, Any]) -> Events:
    text = json.dumps(ARGUMENTS)
    deltas = [
        {"role": "assistant", "reasoning_content": "I "},
        {"reasoning_content": "think"},
        {"content": "Look: "},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "write", "arguments": ""}}]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": one}}]} for one in text),
    ]
    return text_events(deltas, "tool_calls")


def test_a_chat_is_handed_through(of_kind: OfKind) -> None:
    gateway, server = of_kind("openai")
    server.edit = _calling
    messages = [
        {"role": "system", "content": "s <|chat_end|> \u2603"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "write", "arguments": '{"a": 1}'}}
        ]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]  # fmt: skip
    reply = chat(gateway.client, messages=messages, tools=TOOLS, temperature=0.5, top_p=0.9)
    (body,) = server.bodies("/v1/chat/completions")
    assert [one["content"] for one in body["messages"]] == [one["content"] for one in messages]
    assert json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert body["tools"][0]["function"]["parameters"] == TOOLS[0]["function"]["parameters"]  # type: ignore[index]
    assert body["temperature"] == 0.5 and body["top_p"] == 0.9 and "min_p" not in body
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "I think"
    assert choice["message"]["content"] == "Look:"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "write"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 22)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5


def test_the_other_api_over_a_text_server(of_kind: OfKind) -> None:
    gateway, server = of_kind("openai")
    server.edit = _calling
    with anthropic.Anthropic(base_url=gateway.url, api_key="x", max_retries=0) as sdk:
        tools = [{"name": "write", "input_schema": TOOLS[0]["function"]["parameters"]}]  # type: ignore[index]
        with sdk.messages.stream(
            model="m",
            max_tokens=50,
            messages=[{"role": "user", "content": "x"}],
            tools=tools,  # type: ignore[arg-type]
        ) as stream:
            message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert message.content[-1].input == ARGUMENTS  # type: ignore[union-attr]
    assert message.usage.output_tokens == 22


@pytest.mark.parametrize(
    ("reason", "arguments", "code"),
    [("length", '{"path": "a', None), ("tool_calls", '{"path": "a', "output_suspect"),
     ("tool_calls", "[1]", "output_suspect"), ("tool_calls", '{"a":"</arg_value>"}', "same")],
)  # fmt: skip
def test_half_a_call_is_no_call(
    of_kind: OfKind, reason: Any, arguments: str, code: str | None
) -> None:
    gateway, server = of_kind("openai")
    call = {"index": 0, "function": {"name": "write", "arguments": arguments}}
    server.edit = lambda said, body: text_events([{"tool_calls": [call]}], reason)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 50}
    reply = gateway.client.post("/v1/chat/completions", json=body)
    if code == "same":  # it cannot be said in markup: it is the same call, or none
        calls = reply.json().get("choices", [{}])[0].get("message", {}).get("tool_calls")
        assert reply.status_code == 502 or json.loads(
            calls[0]["function"]["arguments"]
        ) == json.loads(arguments)
    elif code is None:
        choice = reply.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        for one in choice["message"].get("tool_calls") or ():
            with pytest.raises(ValueError):
                json.loads(one["function"]["arguments"])
    else:
        assert reply.json()["error"]["code"] == code


def test_what_text_servers_cannot_do_is_refused(of_kind: OfKind) -> None:
    gateway, server = of_kind("openai")
    for field, value in (
        ("logprobs", 1), ("logit_bias", {"1": 1.0}), ("stop_token_ids", [1]),
        ("prompt_logprobs", 0), ("prompt", [200, 201]),
    ):  # fmt: skip
        reply = whole(gateway.client, **{field: value})
        assert reply.status_code == 400, (field, reply.text)
        assert reply.json()["error"]["param"] in (field, "prompt_logprobs")
    assert server.asked == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_is_refused_and_not_left_out(of_kind: OfKind, kind: Kind) -> None:
    gateway, server = of_kind(kind)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    reply = whole(gateway.client, response_format=schema)
    assert reply.status_code == 400 and server.asked == []
    assert reply.json()["error"]["param"] == "response_format"


def test_content_filters_are_no_success(of_kind: OfKind) -> None:
    gateway, server = of_kind("openai")
    server.edit = lambda said, body: text_events([{"content": "ab"}], "content_filter")  # type: ignore[arg-type]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
    assert gateway.client.post("/v1/chat/completions", json=body).status_code == 400


def test_the_public_client_streams_through(of_kind: OfKind) -> None:
    gateway, _ = of_kind("openai")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        said = list(stream)
    text = "".join(one.choices[0].delta.content or "" for one in said if one.choices)
    assert text == TEXT
    assert said[-1].usage is not None
    assert said[-1].usage.completion_tokens == USAGE["completion_tokens"]


# ---- pairs ----------------------------------------------------------------------------------


@contextmanager
def pair(
    folder: Path, kind: Kind, prefill: int = 1, decode: int = 1, **settings: Any
) -> Iterator[tuple[Gateway, list[Foreign], list[Foreign]]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(Foreign(kind)) for _ in range(prefill + decode)]
        roles = ["prefill"] * prefill + ["decode"] * decode
        gateway = stack.enter_context(front(folder, *servers, roles=roles, **settings))
        yield gateway, servers[:prefill], servers[prefill:]


def test_a_vllm_pair_hands_the_kv_over(tmp_path: Path) -> None:
    with pair(tmp_path, "vllm") as (gateway, (prefill,), (decode,)):
        assert streamed(gateway.client, stop_token_ids=[1], ignore_eos=False)[0] == TEXT
        (asked,) = prefill.bodies("/v1/completions")
        assert (asked["max_tokens"], asked["ignore_eos"]) == (1, True)
        assert "stream" not in asked and asked["stop_token_ids"] == []
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        (told,) = decode.bodies("/v1/completions")
        handed = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
        assert told["kv_transfer_params"] == handed
        assert told["stop_token_ids"] == [1]

        prefill.edit = lambda said, body: [{**said[0], "kv_transfer_params": None}]
        reply = whole(gateway.client)
        assert reply.json()["error"]["code"] == "worker_lost"
        assert "handed no KV over" in reply.json()["error"]["message"]
        assert len(decode.bodies("/v1/completions")) == 1


def test_an_sglang_pair_meets_in_a_room(tmp_path: Path) -> None:
    with pair(tmp_path, "sglang") as (gateway, (prefill,), (decode,)):
        assert streamed(gateway.client)[0] == TEXT
        assert whole(gateway.client, prompt_logprobs=0, max_tokens=3).is_success
        (first, third), (second, fourth) = prefill.bodies("/generate"), decode.bodies("/generate")
        for one, other in ((first, second), (third, fourth)):
            names = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "input_ids")
            assert [one[name] for name in names] == [other[name] for name in names]
            assert one["bootstrap_host"] == "127.0.0.1" and one["bootstrap_port"] == 8998
        assert first["bootstrap_room"] != third["bootstrap_room"]

        prefill.refuse = [Refusal(500)] * 2
        gate = threading.Event()
        decode.edit = lambda said, body: [gate, *said]
        reply = whole(gateway.client)
        assert reply.json()["error"]["code"] == "worker_lost"
        # It may have been left before it heard of it.
        left = decode.wait_for(lambda: decode.left == len(decode.bodies("/generate")) - 2)
        assert left, "the other side is left"
        gate.set()


@pytest.mark.parametrize("kind", IDS)
def test_another_prefill_server_takes_over(tmp_path: Path, kind: Kind) -> None:
    with pair(tmp_path, kind, prefill=2) as (gateway, prefill, (decode,)):
        for one in prefill:
            one.refuse = [Refusal(500)]
        prefill[0].refuse = prefill[1].refuse
        waits = [threading.Event()]  # the first that decode is asked: no KV comes for it
        decode.edit = lambda said, body: (
            [waits.pop(), *said] if kind == "sglang" and waits else said
        )
        assert streamed(gateway.client)[0] == TEXT
        assert all(one.bodies(PATHS[kind]) for one in prefill)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_the_witness_of_a_pair_is_the_side_that_did_not_answer(
    tmp_path: Path, prefill: int, decode: int
) -> None:
    with pair(tmp_path, "vllm", prefill, decode, integrity="strict") as made:
        gateway, firsts, seconds = made
        assert streamed(gateway.client)[0] == TEXT
        assert values(gateway.client)["stanchion:witness_verdicts_total|clean"] == 1
        scored = [one for one in (*firsts, *seconds) if _scored(one)]
        answered = [one for one in (*firsts, *seconds) if len(one.bodies(PATHS["vllm"])) > 0]
        (witness,) = scored
        assert len(witness.bodies(PATHS["vllm"])) == 1, "it did nothing else"
        assert len(answered) == 3


def _scored(server: Foreign) -> bool:
    return any("prompt_logprobs" in body for body in server.bodies("/v1/completions"))


# ---- lives ----------------------------------------------------------------------------------


def test_a_server_is_lost_and_found(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = Foreign("vllm").__enter__()
        gateway = stack.enter_context(front(tmp_path, server))
        assert streamed(gateway.client)[0] == TEXT
        server.__exit__()
        gateway.until_ready(False)
        assert whole(gateway.client).status_code == 503
        stack.enter_context(server)
        gateway.until_ready()
        assert streamed(gateway.client)[0] == TEXT
        assert values(gateway.client)[f"stanchion:worker_lost_total|both|{server.name}"] == 1
        server.health = 429  # busy, and there
        looks = server.looks
        until(lambda: server.looks > looks + 3)
        assert gateway.client.get("/ready").json()["ready"]
        server.health = 503  # its engine is dead
        gateway.until_ready(False)


def test_its_own_counters_are_its_load(tmp_path: Path) -> None:
    with one(tmp_path, "vllm") as (gateway, server):
        seen = values(gateway.client)
        labels = f"both|{server.name}"
        assert seen[f"stanchion:num_requests_running|{labels}"] == 3
        assert seen[f"stanchion:num_requests_waiting|{labels}"] == 4
        assert seen[f"stanchion:kv_cache_usage_perc|{labels}"] == 0.25
        assert seen[f"stanchion:prefill_tokens_total|{labels}"] == 70
        models = gateway.client.get("/v1/models").json()["data"]
        assert (models[0]["id"], models[0]["max_model_len"]) == ("m", 8192)


def test_draining_lets_answers_end(tmp_path: Path) -> None:
    gate = threading.Event()
    with Foreign("vllm") as server, front(tmp_path, server) as gateway:
        server.edit = lambda said, body: [*said[:2], gate, *said[2:]]

        def seen(raw: str) -> None:
            if not gate.is_set():  # told twice it would not wait
                gateway.stop()
            gate.set()

        assert streamed(gateway.client, seen)[0] == TEXT
        assert gateway.join() == "drained"


def test_events_of_a_stream_end_once(of_kind: OfKind) -> None:
    gateway, _ = of_kind("vllm")
    reply = gateway.client.post("/v1/completions", json=BODY | {"stream": True})
    reasons = [one["choices"][0]["finish_reason"] for one in events(reply.text)]
    assert [one for one in reasons if one] == ["stop"]
    assert reply.text.endswith("data: [DONE]\n\n") and EOS in TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_of_cuts_refusals_and_leavers(tmp_path: Path, kind: Kind) -> None:
    """Every answer is the whole text, or a prefix and an error; nothing is left in any table."""
    random = Random(7)
    with Foreign(kind) as first, Foreign(kind) as second, front(tmp_path, first, second) as gateway:

        def edit(said: Events, body: dict[str, Any]) -> Events:
            cut = random.choice([None, None, None, 0, 1, len(said) // 2])
            return said if cut is None else [*said[:cut], CUT]

        for server in (first, second):
            server.edit = edit
            server.refuse = [Refusal(503)] * 5 + [CUT] * 5

        def ask(number: int) -> bool:
            wanted = BODY | {"stream": True}
            if number % 4 == 0:
                with gateway.client.stream("POST", "/v1/completions", json=wanted) as reply:
                    next(reply.iter_bytes())
                return False
            text, said, done = streamed(gateway.client)
            assert text == TEXT if done else TEXT.startswith(text) and said[-1]["error"]
            return done

        with ThreadPoolExecutor(8) as pool:
            done = sum(pool.map(ask, range(120)))
        assert done > 20
        names = [first.name, second.name]
        until(
            lambda: all(
                values(gateway.client)[f"stanchion:requests_in_flight|both|{name}"] == 0
                for name in names
            )
        )
        seen = values(gateway.client)
        for name in names:
            assert seen[f"stanchion:unknown_messages_total|both|{name}"] == 0
            assert seen[f"stanchion:worker_lost_total|both|{name}"] == 0


# ---- the command ----------------------------------------------------------------------------

COMMAND = """
import sys
sys.modules["torch"] = sys.modules["numba"] = None
from stanchion.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def _command(*flags: str) -> list[str]:
    return [sys.executable, "-c", COMMAND, "gateway", "--port", "0", *flags]


def test_the_command_serves_without_torch_and_drains(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "stanchion/model/tiny"
    size = load_vocabulary(folder).size
    with Foreign("vllm") as first, Foreign("vllm") as second:
        command = _command("--upstream", first.url, "--tokenizer", str(folder))
        command += ["--upstream", f"vllm:{second.url}", "--integrity", "off"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as made:
            assert made.stdout is not None
            said = next(line for line in made.stdout if line.startswith("stanchion is at "))
            url = said.split()[3].rstrip(",")
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
                reply = whole(client, prompt=[1], max_tokens=400, return_token_ids=True).json()
            made.terminate()
            assert made.wait(30) == 0
        assert reply["choices"][0]["token_ids"] == TOKENS[:400] and size > max(TOKENS)
        (body,) = first.bodies("/v1/completions") + second.bodies("/v1/completions")
        assert "logprobs" not in body, "in `off` nobody looks at them"


def test_the_command_says_why_it_cannot(tmp_path: Path) -> None:
    with Foreign("openai") as server:
        folder = Path(__file__).parents[2] / "stanchion/model/tiny"
        command = _command("--upstream", server.url, "--tokenizer", str(folder))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "leave --tokenizer out" in done.stderr
