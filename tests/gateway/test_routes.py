"""Who may call what: denied by default (D36); and ids of clients are an echo, never a key (D39)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from stanchion.core.errors import ConfigError
from stanchion.gateway.app import App
from stanchion.gateway.auth import Keys
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.ledger import Ledger, Ticket
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import byte_vocabulary

from .conftest import Gateway, running
from .worker import FakeWorker, end, say

OPEN = {"/health", "/ready"}
KEYS = ("alice:one-secret", "bob:another-secret")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('locked')}/worker"
    with FakeWorker(address) as worker, running(worker, api_keys=KEYS) as gateway:
        yield worker, gateway


def routes(tmp_path: Path) -> list[tuple[str, str, str]]:
    async def table() -> list[tuple[str, str, str]]:
        fleet = Fleet(GatewaySettings(), f"ipc://{tmp_path}/none")
        async with fleet.running():
            app = App(GatewaySettings(), byte_vocabulary(), fleet)
            app.close()
            return [(route.method, route.path, route.access) for route in app.routes]

    return asyncio.run(table())


BAD_HEADERS = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer"},
    {"authorization": "one-secret"},
    {"authorization": "Basic one-secret"},
    {"authorization": "Bearer alice:one-secret"},
    {"authorization": "Bearer one-secret2"},
    {"x-api-key": "one-secre"},
    {"x-api-key": ""},
]


def test_every_route_but_two_needs_a_key(locked, tmp_path: Path):
    client = locked[1].client
    table = routes(tmp_path)
    assert {path for _, path, access in table if access == "open"} == OPEN
    for method, path, access in table:
        for headers in BAD_HEADERS:
            for query in ("", "?api_key=one-secret&key=one-secret"):
                reply = client.request(method, path + query, headers=headers)
                expected = {200} if access == "open" else {401}
                assert reply.status_code in expected, (method, path, headers)
    assert client.post("/v1/completions", json={}).json()["error"]["code"] == "invalid_api_key"


TRICKS = [
    "/",
    "/v1",
    "/v1/",
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/V1/MODELS",
    "/v1/models%2f",
    "/v1/%6dodels",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1/models",
    "/ready/v1/models",
    "/health/v1/models",
    "/metrics/",
    "/docs",
    "/openapi.json",
    "/v1/models;/health",
    "/v1/models%00",
    "/health/",
    "//health",
    "/ready%2f",
    "/v1/chat/completions/health",
    "/v1/completions%3f",
    "/v1/models/%2e%2e/%2e%2e/admin/drain",
    "/v1/models/{id}",
    "/v1/messages/",
    "//v1/messages",
    "/v1/messages/count_tokens/health",
    "/tokenize/",
    "/admin",
    "/admin/",
    "/admin/drain/",
    "/health/%2e%2e/admin/drain",
    "//admin/abort",
]


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
def test_paths_and_methods_by_trick_are_denied(locked, method: str):
    client = locked[1].client
    paths = [*TRICKS, "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions"]
    for path in paths:
        url = httpx.URL(locked[1].url).copy_with(raw_path=path.encode())
        reply = client.request(method, url)
        assert reply.status_code == 401, (method, path)
        known = client.request(method, url, headers={"x-api-key": "one-secret"})
        assert known.status_code in (
            (200, 400, 404) if path in paths[len(TRICKS) :] else (404, 200)
        )


def test_matching_paths_by_prefix_would_let_tricks_through():
    """The wrong way: `/health/../v1/models` and `/health/v1/models` begin with an open path."""
    assert any(path.startswith(tuple(OPEN)) for path in TRICKS)


def test_a_websocket_is_refused_before_it_is_accepted(locked):
    sent = []

    async def connect() -> None:
        async def receive() -> dict:
            return {"type": "websocket.connect"}

        async def send(message: dict) -> None:
            sent.append(message)

        fleet = Fleet(GatewaySettings(), locked[0].address + "x")
        async with fleet.running():
            app = App(GatewaySettings(), byte_vocabulary(), fleet)
            await app({"type": "websocket", "path": "/health"}, receive, send)
            app.close()

    asyncio.run(connect())
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_tenant_is_the_name_of_the_key(locked):
    worker, gateway = locked
    for headers, tenant in (
        ({"authorization": "Bearer one-secret"}, "alice"),
        ({"authorization": "bearer another-secret"}, "bob"),
        ({"x-api-key": "another-secret"}, "bob"),
    ):
        body = {"prompt": "x", "user": "mallory", "tenant": "alice"}
        assert gateway.client.post("/v1/completions", json=body, headers=headers).is_success
        assert worker.starts[-1].tenant == tenant


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_beyond_loopback_a_key_is_required(host: str):
    with pytest.raises(ConfigError, match="API key"):
        GatewaySettings(host=host).check()
    GatewaySettings(host=host, api_keys=("secret",)).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_loopback_no_key_is_required(host: str):
    GatewaySettings(host=host).check()


def test_keys_that_make_no_sense_are_refused_and_never_shown():
    for keys in (("",), ("name:",), (":secret",), ("a", "b:a")):
        with pytest.raises(ConfigError):
            Keys(keys)
    assert "sesame" not in repr(GatewaySettings(api_keys=("sesame",)))


# ---- ids ------------------------------------------------------------------------------------


def test_the_same_client_id_a_hundred_times_at_once_does_not_cross(
    gateway: Gateway, worker: FakeWorker
):
    worker.plan = lambda start: [say(start, bytes(start.tokens).decode()), end(start)]

    def one(number: int) -> tuple[int, str, str]:
        body = {"prompt": f"prompt {number}"}
        headers = {"x-request-id": "the-same"}
        reply = gateway.client.post("/v1/completions", json=body, headers=headers)
        return number, reply.json()["choices"][0]["text"], reply.headers["x-request-id"]

    with ThreadPoolExecutor(16) as threads:
        told = list(threads.map(one, range(100)))
    assert told == [(number, f"prompt {number}", "the-same") for number in range(100)]
    assert len({start.request for start in worker.starts}) == 100
    assert all("the-same" not in start.request for start in worker.starts)


def test_a_client_id_is_cut_and_cleaned(client: httpx.Client, worker: FakeWorker):
    echoed = client.get("/health", headers={"x-request-id": "x" * 20_000}).headers["x-request-id"]
    assert echoed == "x" * 128
    hostile = 'a"<script>\tb'
    assert (
        client.get("/health", headers={"x-request-id": hostile}).headers["x-request-id"]
        == "ascriptb"
    )
    assert len(client.get("/health").headers["x-request-id"]) == 32


def test_an_id_that_is_a_prefix_of_another_is_not_the_other():
    ledger = Ledger(1, 1)
    longer, shorter = (Ticket(name, threading.Event().set) for name in ("abc", "ab"))
    ledger.open(longer, 0.0)
    ledger.open(shorter, 0.0)
    assert ledger.leave(shorter, "client") and not longer.closed
