"""`/admin` opens for its own credential alone, and what it does is told to those it is done to."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from stanchion.core.errors import ConfigError
from stanchion.gateway.auth import AdminKeys
from stanchion.gateway.settings import GatewaySettings

from .conftest import cluster, events, running
from .worker import FakeWorker, end, say

ADMIN = {"authorization": "Bearer the-admin"}
KEYS = {"api_keys": ("alice:one",), "admin_keys": ("the-admin",)}
TENANT = {"x-api-key": "one"}


def test_no_tenants_key_opens_admin_and_the_admins_opens_nothing_else(alone: FakeWorker):
    with running(alone, **KEYS) as gateway:
        for path in ("/admin/drain", "/admin/abort"):
            for headers in ({}, TENANT, {"x-api-key": "the-admi"}, {"authorization": "the-admin"}):
                reply = gateway.client.post(path, json={}, headers=headers)
                assert (reply.status_code, reply.json()["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                )
        assert gateway.client.get("/v1/models", headers=ADMIN).status_code == 401
        assert gateway.client.get("/v1/models", headers=TENANT).is_success


def test_without_an_admin_key_nobody_is_the_admin(alone: FakeWorker):
    with running(alone) as gateway:
        for headers in ({}, {"x-api-key": ""}, {"authorization": "Bearer"}, TENANT):
            assert gateway.client.post("/admin/drain", headers=headers).status_code == 401
        assert gateway.client.get("/v1/models").is_success  # not locked: no tenant keys are set


def test_admin_keys_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError):
        AdminKeys(("",))
    with pytest.raises(ConfigError, match="admin_keys"):
        GatewaySettings(api_keys=("alice:same",), admin_keys=("same",)).check()
    assert "sesame" not in repr(GatewaySettings(admin_keys=("sesame",)))


def test_an_abort_ends_one_answer_with_an_error_and_leaves_the_others(alone: FakeWorker):
    gate = threading.Event()
    alone.plan = lambda start: [say(start, "begun"), gate, say(start, "ended"), end(start)]
    body = {"prompt": "x", "stream": True, "max_tokens": 99}
    with running(alone, **KEYS) as gateway, ThreadPoolExecutor(1) as threads:
        client = gateway.client
        other = threads.submit(client.post, "/v1/completions", json=body, headers=TENANT)
        assert alone.wait_for(lambda: len(alone.starts) == 1)
        raw = ""
        with (
            client.stream("POST", "/v1/completions", json=body, headers=TENANT) as reply,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            for part in reply.iter_text():
                if not raw:
                    (first, *_) = events(part)
                    asked = {"requests": [first["id"], "nobody", first["id"][:-1]]}
                    told = client.post("/admin/abort", json=asked, headers=ADMIN).json()
                    assert told["aborted"] == [first["id"].removeprefix("cmpl-")]
                    assert len(told["unknown"]) == 2
                raw += part
        assert events(raw)[-1]["error"]["code"] == "aborted" and "[DONE]" not in raw
        assert alone.aborted("admin")
        gate.set()
        assert other.result().text.endswith("[DONE]\n\n")


def test_abort_all_and_bodies_that_make_no_sense(alone: FakeWorker):
    alone.plan = lambda start: [threading.Event()]
    body = {"prompt": "x"}
    with running(alone, **KEYS) as gateway, ThreadPoolExecutor(3) as threads:
        client = gateway.client
        held = [
            threads.submit(client.post, "/v1/completions", json=body, headers=TENANT)
            for _ in range(3)
        ]
        assert alone.wait_for(lambda: len(alone.starts) == 3)
        for wrong in ({}, {"all": True, "requests": ["x"]}, {"requests": "x"}, {"every": True}):
            reply = client.post("/admin/abort", json=wrong, headers=ADMIN)
            assert reply.status_code == 400
        told = client.post("/admin/abort", json={"all": True}, headers=ADMIN).json()
        assert len(told["aborted"]) == 3
        for reply in (one.result() for one in held):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "aborted")
            assert reply.json()["error"]["retryable"] is True
    assert alone.aborted("admin", 3)


def test_a_drained_worker_gets_nothing_new(tmp_path: Path):
    with cluster(tmp_path, "both-0", "both-1", admin_keys=("the-admin",)) as (gateway, workers):
        client = gateway.client
        reply = client.post("/admin/drain", json={"worker": "both-0"}, headers=ADMIN)
        assert reply.json() == {"draining": "both-0"}
        assert workers["both-0"].wait_for(lambda: workers["both-0"].drains == 1)
        while "both-0: draining" not in client.get("/ready").json()["missing"]:
            pass
        for _ in range(6):
            assert client.post("/v1/completions", json={"prompt": "x"}).is_success
        assert (len(workers["both-0"].starts), len(workers["both-1"].starts)) == (0, 6)
        unknown = client.post("/admin/drain", json={"worker": "both-7"}, headers=ADMIN)
        assert unknown.status_code == 404


def test_draining_the_server_is_what_sigterm_does_however_often_it_is_said(alone: FakeWorker):
    gate = threading.Event()
    alone.plan = lambda start: [gate, say(start, "whole"), end(start)]
    with running(alone, **KEYS) as gateway, ThreadPoolExecutor(1) as threads:
        client = gateway.client
        held = threads.submit(client.post, "/v1/completions", json={"prompt": "x"}, headers=TENANT)
        assert alone.wait_for(lambda: len(alone.starts) == 1)
        for _ in range(3):
            assert client.post("/admin/drain", headers=ADMIN).json() == {"draining": "all"}
        assert alone.wait_for(lambda: alone.drains == 1)
        refused = client.post("/v1/completions", json={"prompt": "x"}, headers=TENANT)
        assert refused.json()["error"]["code"] == "draining"
        gate.set()
        assert held.result().json()["choices"][0]["text"] == "whole"
        assert gateway.join() == "drained"
