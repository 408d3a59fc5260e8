"""Nothing that a client or a model says is in logs or metrics (D32), whatever becomes of a call."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from itertools import count

import httpx
import pytest

from stanchion.core import outcome
from stanchion.core.messages import Start
from stanchion.gateway.intake import Intake

from .conftest import Gateway, running
from .glm import as_tokens, glm_special
from .test_metrics import until
from .worker import EOS, FakeWorker, Plan, end, say

numbers = count()
WORD = "canary"
CLIENTS = ("httpx", "httpcore")  # the test's own end of the wire


def canary() -> str:
    return f"{WORD}{next(numbers)}"


KEY = canary()
HEADERS = {
    "x-api-key": KEY,
    "x-request-id": canary(),
    "user-agent": canary(),
    "x-session-id": canary(),
}
ADMIN = {"x-api-key": f"{KEY}-admin"}
SCHEMA = {"properties": {canary(): {"type": "string", "description": canary()}}}
ASKED = [{"role": "user", "content": canary()}]
OPENAI = {
    "messages": [
        {"role": "system", "content": canary(), "name": canary()},
        *ASKED,
        {
            "role": "assistant",
            "reasoning_content": canary(),
            "tool_calls": [
                {
                    "id": canary(),
                    "function": {"name": canary(), "arguments": json.dumps({canary(): canary()})},
                }
            ],
        },
        {"role": "tool", "content": canary(), "tool_call_id": canary()},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": canary(), "description": canary(), "parameters": SCHEMA},
        }
    ],
    "stop": [canary()],
    "user": canary(),
    "cache_salt": canary(),
    "chat_template_kwargs": {canary(): canary()},
}
ANTHROPIC = {
    "model": "hashed",
    "max_tokens": 500,
    "system": [{"type": "text", "text": canary()}],
    "messages": [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": canary(), "signature": canary()},
                {"type": "tool_use", "id": canary(), "name": canary(), "input": {canary(): 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": canary(), "content": canary()}],
        },
    ],
    "tools": [{"name": canary(), "description": canary(), "input_schema": SCHEMA}],
    "metadata": {"user_id": canary()},
    "stop_sequences": [canary()],
}
GENERATING = {
    "/v1/chat/completions": OPENAI,
    "/v1/completions": {"prompt": canary(), "stop": canary()},
    "/v1/messages": ANTHROPIC,
}
OTHERS = {
    "/v1/messages/count_tokens": ANTHROPIC,
    "/tokenize": {"prompt": canary()},
    "/detokenize": {"tokens": [*canary().encode()]},
    f"/v1/models/{canary()}": {},
    f"/{canary()}": {"x": canary()},
    "/admin/abort": {"requests": [canary()]},
    "/admin/drain": {"worker": canary()},
    "/admin/flush": {"worker": canary()},
    "/admin/quarantine": {"worker": canary(), "tenant": canary(), "salt": canary()},
}
ANSWER = (
    f"{canary()}</think>{canary()}<tool_call>{canary()}<arg_key>{canary()}</arg_key>"
    f"<arg_value>{canary()}</arg_value></tool_call><tool_call>{canary()} {canary()}"
)
ENDS = [
    outcome.Completed("stop"),
    outcome.Completed("length"),
    outcome.Cancelled("monitor"),
    outcome.Rejected(canary(), canary()),
    outcome.Overloaded(canary(), 1.0),
    outcome.PeerLost(canary()),
    outcome.OutputSuspect(canary()),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('private')}/worker"
    keys = {"api_keys": (f"alice:{KEY}",), "admin_keys": (f"{KEY}-admin",)}
    with FakeWorker(address) as worker, running(worker, glm_special(), **keys) as gateway:
        gateway.client.headers.update(HEADERS)
        yield worker, gateway
        worker.reset()


@pytest.fixture
def sinks(served, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """All that is logged, at every level, and all that is counted, is searched at the end."""
    with caplog.at_level(logging.DEBUG):
        yield
        metrics = served[1].client.get("/metrics").text
        state = served[1].client.get("/admin/state", headers=ADMIN).text
    assert WORD not in state and "workers" in state
    ours = [one for one in caplog.records if one.name.split(".")[0] not in CLIENTS]
    logged = "\n".join(f"{record.getMessage()} {record.exc_info}" for record in ours)
    assert WORD not in logged and WORD not in metrics
    assert "http_replies_total" in metrics


def _spoken(ended: object):
    def plan(start: Start) -> Plan:
        ids = [*as_tokens(ANSWER, True), EOS]
        return [say(start, ids), end(start, ended)]

    return plan


def test_what_is_looked_for_would_be_found(served, caplog: pytest.LogCaptureFixture):
    """The search itself: a line that holds a prompt is one that it finds."""
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("stanchion.gateway").info("%s", ASKED)
    assert WORD in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_answers_of_every_end(served, sinks, caplog, path: str, stream: bool):
    worker, gateway = served
    for number, ended in enumerate(ENDS, start=1):
        worker.plan = _spoken(ended)
        body = GENERATING[path] | {"stream": stream}
        with gateway.client.stream("POST", path, json=body) as reply:
            try:
                reply.read()
            except httpx.RemoteProtocolError:
                assert stream
        lines = until(
            lambda: [one for one in caplog.records if one.name == "stanchion.gateway"],
            lambda found, number=number: len(found) >= number,
        )
        assert json.loads(lines[-1].getMessage())["tenant"] == "alice"


@pytest.mark.parametrize("path", [*GENERATING, *OTHERS])
def test_what_is_refused_or_answered_without_a_worker(served, sinks, path: str):
    served[0].plan = _spoken(outcome.Completed("stop"))
    client = served[1].client
    body = (GENERATING | OTHERS)[path]
    admin = ADMIN if path.startswith("/admin") else {}
    if path not in GENERATING:
        assert client.post(path, json=body, headers=admin).status_code < 500
        client.get(path)
    for broken in (
        {"model": canary()},
        {"messages": canary(), "prompt": {canary(): canary()}, "tokens": canary()},
        {"tools": [{"name": canary(), "type": canary(), "function": canary()}]},
        {"tool_choice": canary()},
        {canary(): canary()},
    ):
        assert client.post(path, json=body | broken, headers=admin).status_code < 500
    for raw in (f'{{"{canary()}": "{canary()}', canary(), f'{{"temperature": "{canary()}"}}'):
        reply = client.post(path, content=raw, headers=admin)
        assert reply.status_code in (400, 404)
    assert client.post(path, json=body, headers={"x-api-key": canary()}).status_code == 401


def test_a_client_that_leaves(served, sinks, caplog):
    worker, gateway = served
    worker.plan = lambda start: [say(start, as_tokens(ANSWER, True)), threading.Event()]
    worker.aborts = []
    raw = json.dumps(ANTHROPIC | {"stream": True}).encode()
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        head = f"POST /v1/messages HTTP/1.1\r\nhost: {canary()}\r\nx-api-key: {KEY}\r\n"
        connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        received = b""
        while b"tool_use" not in received:
            received += connection.recv(65536)
        state = gateway.client.get("/admin/state", headers=ADMIN)
        assert state.json()["requests"] and WORD not in state.text
    assert worker.aborted("client")
    until(lambda: caplog.records, bool)


@pytest.mark.parametrize("path", GENERATING)
def test_what_nobody_foresaw(served, sinks, caplog, monkeypatch, path: str):
    def broken(self: Intake) -> None:
        raise RuntimeError(canary())

    monkeypatch.setattr(Intake, "limits", broken)
    reply = served[1].client.post(path, json=GENERATING[path])
    assert reply.status_code == 500 and WORD not in reply.text
    assert "RuntimeError" in caplog.text
