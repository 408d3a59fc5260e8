"""How answers end: only a completed one looks complete (D21), and each ends exactly once."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import openai
import pytest

from stanchion.core import outcome
from stanchion.core.messages import Start

from .conftest import Gateway, running
from .worker import WAIT_S, FakeWorker, Plan, end, say

FAILURES = [
    (outcome.Rejected("prompt", "longer than the pool's 640 tokens"), 400, "prompt"),
    (outcome.Overloaded("queue is full", 3.0), 429, None),
    (outcome.PeerLost("worker lost"), 503, None),
    (outcome.OutputSuspect("NaN in layer 3"), 502, None),
    (outcome.Cancelled("monitor"), 502, None),
    (outcome.Cancelled("deadline"), 503, None),
    (outcome.Cancelled("drain"), 503, None),
]
ROUTES = ("/v1/completions", "/v1/chat/completions")


def body(path: str, stream: bool) -> dict:
    if path == "/v1/completions":
        return {"prompt": "x", "stream": stream, "max_tokens": 300}
    return {"messages": [{"role": "user", "content": "x"}], "stream": stream}


@pytest.mark.parametrize(("ended", "status", "param"), FAILURES)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_any_token_has_its_http_status(
    client: httpx.Client, worker: FakeWorker, ended, status, param, path, stream
):
    worker.plan = lambda start: [end(start, ended)]
    reply = client.post(path, json=body(path, stream))
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["param"] == param and error["retryable"] is (status != 400)
    assert ("retry-after" in reply.headers) is (status != 400)
    if status == 429:
        assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize(("ended", "status", "param"), FAILURES)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("tokens", [1, 128])
def test_an_error_after_tokens_never_looks_like_an_end(
    client: httpx.Client, worker: FakeWorker, ended, status, param, path, tokens
):
    gate = threading.Event()
    worker.plan = lambda start: [say(start, "x" * tokens), gate, end(start, ended)]
    raw = _stream_to_its_cut(client, path, gate)
    assert "[DONE]" not in raw and '"finish_reason":"' not in raw
    error = json.loads(raw.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] and error["retryable"] is (status != 400)
    assert error["message"].startswith(f"{status} ")
    whole = client.post(path, json=body(path, stream=False))
    assert whole.status_code == status and "choices" not in whole.json()


def _stream_to_its_cut(client: httpx.Client, path: str, gate: threading.Event) -> str:
    """All that came; that the body was cut and not ended is part of the promise."""
    raw = ""
    with client.stream("POST", path, json=body(path, stream=True)) as reply:
        assert reply.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            for part in reply.iter_text():
                raw += part
                if "xx" in raw or '"x"' in raw:
                    gate.set()
    return raw


@pytest.mark.parametrize("ended", [row[0] for row in FAILURES])
def test_the_public_client_raises_in_the_middle_of_a_stream(
    gateway: Gateway, worker: FakeWorker, ended
):
    gate = threading.Event()
    worker.plan = lambda start: [say(start, "some text"), gate, end(start, ended)]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(
            model="hashed", messages=[{"role": "user", "content": "x"}], stream=True
        )
        text = ""
        with pytest.raises(openai.APIError):
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text:
                    gate.set()
    assert text == "some text"


def test_one_failed_choice_fails_the_reply_and_aborts_the_others(
    client: httpx.Client, worker: FakeWorker
):
    def plan(start: Start) -> Plan:
        if len(worker.starts) == 1:
            return [say(start, "hel"), threading.Event()]
        return [say(start, "wor"), end(start, outcome.PeerLost("gone"))]

    worker.plan = plan
    reply = client.post("/v1/completions", json=body("/v1/completions", False) | {"n": 2})
    assert reply.status_code == 503
    assert worker.aborted("client")


def test_a_score_that_is_no_number_stops_the_answer(client: httpx.Client, worker: FakeWorker):
    worker.plan = lambda start: [
        say(start, "ab", logprobs=[-1.0, float("nan")]),
        threading.Event(),
    ]
    reply = client.post("/v1/completions", json=body("/v1/completions", False))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "output_suspect")
    assert worker.aborted("monitor")


# ---- clients that leave ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting_frees_its_work(
    gateway: Gateway, worker: FakeWorker, stream: bool
):
    worker.plan = lambda start: [threading.Event()]
    with _sent(gateway, body("/v1/completions", stream)):
        assert worker.wait_for(lambda: len(worker.starts) == 1)
    assert worker.aborted("client")


def test_a_client_that_leaves_in_a_stream_frees_its_work(gateway: Gateway, worker: FakeWorker):
    worker.plan = lambda start: [say(start, "hello"), threading.Event()]
    with _sent(gateway, body("/v1/completions", True)) as raw:
        assert b"hello" in _received(raw, b"200 OK", b"hello")
    assert worker.aborted("client")


def test_a_reader_that_does_not_read_holds_up_nobody_and_its_leaving_is_seen(
    gateway: Gateway, client: httpx.Client, worker: FakeWorker
):
    flood = [[120] * 1000 for _ in range(200)]

    def plan(start: Start) -> Plan:
        if start.sampling.max_tokens == 300:
            return [*(say(start, part) for part in flood), threading.Event()]
        return [say(start, "quick"), end(start)]

    worker.plan = plan
    with _sent(gateway, body("/v1/completions", True) | {"logprobs": 0}):
        assert worker.wait_for(lambda: len(worker.starts) == 1)
        began = time.monotonic()
        for _ in range(3):
            reply = client.post("/v1/completions", json={"prompt": "y", "max_tokens": 5})
            assert reply.json()["choices"][0]["text"] == "quick"
        assert time.monotonic() - began < WAIT_S
        assert not worker.aborts
    assert worker.aborted("client")


def _sent(gateway: Gateway, body: dict) -> socket.socket:
    """A socket that has sent a request, and closes as a context."""
    raw = json.dumps(body).encode()
    url = httpx.URL(gateway.url)
    connection = socket.create_connection((url.host, url.port), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def _received(connection: socket.socket, *awaited: bytes) -> bytes:
    """Reads until all of these have come, or the other side has closed."""
    raw = b""
    while not all(part in raw for part in awaited):
        part = connection.recv(65536)
        if not part:
            break
        raw += part
    return raw


# ---- too much at once -----------------------------------------------------------------------


def test_beyond_the_bound_is_429_with_a_time_to_wait(alone: FakeWorker):
    gate = threading.Event()
    alone.plan = lambda start: [gate, say(start, "ok"), end(start)]
    with running(alone, in_flight_max=3, retry_after_s=7) as gateway:
        held = [_sent(gateway, body("/v1/completions", False)) for _ in range(3)]
        assert alone.wait_for(lambda: len(alone.starts) == 3)
        for stream in (False, True):
            reply = gateway.client.post("/v1/completions", json=body("/v1/completions", stream))
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
            assert reply.json()["error"]["retryable"] is True
        too_many = gateway.client.post("/v1/completions", json={"prompt": "x", "n": 4})
        assert too_many.status_code in (400, 429)
        gate.set()
        for connection in held:
            assert b"200 OK" in _received(connection, b"200 OK", b"usage")
            connection.close()
        assert gateway.client.post("/v1/completions", json={"prompt": "x"}).is_success
        refused = gateway.client.post("/v1/completions", json={"prompt": "x", "n": 4})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


# ---- the worker goes ------------------------------------------------------------------------


def test_a_silent_worker_ends_everything_in_flight_and_may_come_back(alone: FakeWorker):
    alone.plan = lambda start: [threading.Event()]
    with running(alone, worker_silence_s=1.0) as gateway:
        with _sent(gateway, body("/v1/completions", False)) as waiting:
            assert alone.wait_for(lambda: len(alone.starts) == 1)
            alone.silent = True
            answer = _received(waiting, b"silent")
            assert b" 503 " in answer and b"retry-after" in answer and b"silent" in answer
        assert alone.aborted("deadline")
        alone.silent = False
        alone.plan = lambda start: [say(start, "back"), end(start)]
        deadline = time.monotonic() + WAIT_S
        while not gateway.client.get("/ready").is_success and time.monotonic() < deadline:
            pass
        reply = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.json()["choices"][0]["text"] == "back"
        late = say(Start(request="nobody", tokens=[1], sampling=alone.starts[0].sampling), "x")
        alone.extra.append(late)
        while (
            'unknown_messages_total{role="both",worker="both-0"} 0.0'
            in gateway.client.get("/metrics").text
        ):
            assert time.monotonic() < deadline


def test_a_frame_that_is_no_message_loses_the_worker_and_not_the_gateway(alone: FakeWorker):
    alone.plan = lambda start: [b"\xc1garbage"]
    with running(alone) as gateway:
        reply = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")
        assert gateway.client.get("/health").is_success


def test_a_worker_that_forgot_a_request_does_not_hang_it(alone: FakeWorker):
    alone.plan = lambda start: []
    alone.forgets = True
    with running(alone, worker_silence_s=1.0) as gateway:
        reply = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 503 and "knew of no request" in reply.text
    alone.forgets = False


# ---- ready ----------------------------------------------------------------------------------


def test_ready_tells_a_stall_and_health_does_not(alone: FakeWorker):
    gate = threading.Event()
    alone.plan = lambda start: [gate, say(start, "x"), end(start)]
    with running(alone, stall_s=0.3) as gateway:
        assert gateway.client.get("/ready").json() == {"ready": True, "why_not": [], "missing": []}
        alone.frozen = True
        with _sent(gateway, body("/v1/completions", False)) as waiting:
            assert alone.wait_for(lambda: len(alone.starts) == 1)
            deadline = time.monotonic() + WAIT_S
            while (reply := gateway.client.get("/ready")).is_success:
                assert time.monotonic() < deadline
            assert reply.status_code == 503 and "no step" in reply.json()["why_not"][0]
            assert gateway.client.get("/health").status_code == 200
            gate.set()
            assert b"200 OK" in _received(waiting, b"200 OK")
        while not gateway.client.get("/ready").is_success:
            assert time.monotonic() < deadline


# ---- stopping -------------------------------------------------------------------------------


def test_draining_loses_nothing_that_was_accepted(alone: FakeWorker):
    gate = threading.Event()
    alone.plan = lambda start: [say(start, "half "), gate, say(start, "whole"), end(start)]
    with running(alone) as gateway:
        held = [_sent(gateway, body("/v1/completions", stream)) for stream in (False, True) * 3]
        assert alone.wait_for(lambda: len(alone.starts) == 6)
        gateway.stop()
        assert alone.wait_for(lambda: alone.drains == 1)
        assert gateway.client.get("/ready").json()["why_not"][0] == "draining"
        refused = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        gate.set()
        for connection in held:
            raw = _received(connection, b"whole", b'"length"')
            assert b"whole" in raw and b'"length"' in raw
            connection.close()
        assert gateway.join() == "drained"
    assert not alone.aborts


def test_a_drain_has_an_end_and_what_it_cuts_is_an_error(alone: FakeWorker):
    alone.plan = lambda start: [say(start, "half "), threading.Event()]
    with running(alone, drain_s=0.3) as gateway:
        with _sent(gateway, body("/v1/completions", True)) as connection:
            assert alone.wait_for(lambda: len(alone.starts) == 1)
            gateway.stop()
            raw = _received(connection, b"what never comes")
            assert b'"code":"draining"' in raw and b"[DONE]" not in raw
        assert gateway.join() == "drain_timed_out"
    assert alone.aborted("drain")


def test_a_second_signal_stops_waiting(alone: FakeWorker):
    alone.plan = lambda start: [threading.Event()]
    with running(alone) as gateway, _sent(gateway, body("/v1/completions", False)) as connection:
        assert alone.wait_for(lambda: len(alone.starts) == 1)
        gateway.stop()
        gateway.stop()
        assert b" 503 " in _received(connection, b" 503 ")
        assert gateway.join() == "drain_timed_out"
