"""After a verdict: what the answer read is dropped where it was made, and a worker that keeps being
wrong gets no more work; and what an admin may do about either."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from stanchion.core.messages import Flush, Quarantine
from stanchion.core.outcome import OutputSuspect

from .conftest import Workers, cluster, running
from .liar import TEXT, TOKENS, Attempt
from .test_integrity import FRESH, HONEST, LOST_DRAFTS, attempts, lies, streamed, two, whole
from .test_metrics import until, values
from .worker import FakeWorker, Plan, end, say

ADMIN = {"authorization": "Bearer the-admin"}
KEYS = {"admin_keys": ("the-admin",)}


def orders(workers: Workers) -> dict[str, list[Any]]:
    return {name: worker.orders for name, worker in workers.items() if worker.orders}


def test_a_confirmed_answer_puts_what_it_read_into_quarantine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with two(tmp_path) as (gateway, workers), caplog.at_level(logging.WARNING):
        lies(workers, FRESH)
        assert streamed(gateway.client, cache_salt="mine")[0] == TEXT
        told = until(lambda: orders(workers), bool)
        ((sick, (order,)),) = told.items()
        (first,) = [one for one in attempts(workers) if len(one.tokens) == 1]
        assert first in workers[sick].starts
        assert isinstance(order, Quarantine)
        assert (order.tenant, order.salt) == (first.tenant, first.salt), "as its worker knows it"
        bad = [*TOKENS[: FRESH.onset], *FRESH.junk]
        assert (
            order.tokens[0] == first.tokens[0] and order.tokens[1:] == bad[: len(order.tokens) - 1]
        )
        assert len(order.tokens) > FRESH.onset
        seen = values(gateway.client)
        assert seen["stanchion:quarantines_ordered_total"] == 1
    lines = [json.loads(one.getMessage()) for one in caplog.records]
    assert [one["worker"] for one in lines if one["event"] == "quarantine"] == [sick]


def test_both_of_a_pair_are_told(tmp_path: Path) -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with cluster(tmp_path, *names) as (gateway, workers):
        gateway.until_ready()
        lies(workers, FRESH)
        assert streamed(gateway.client)[0] == TEXT
        (first,) = [one for one in attempts(workers) if len(one.tokens) == 1]
        decode = next(name for name, one in workers.items() if first in one.starts)
        told = until(lambda: orders(workers), lambda found: len(found) == 2)
        assert set(told) == {decode, first.prefill.name}


def test_a_clean_verdict_puts_nothing_into_quarantine(tmp_path: Path) -> None:
    with two(tmp_path, integrity="strict") as (gateway, workers):
        for worker in workers.values():
            worker.plan = HONEST
        assert streamed(gateway.client)[0] == TEXT
        assert not orders(workers)
        assert values(gateway.client)["stanchion:quarantines_ordered_total"] == 0


def test_an_engine_that_ends_an_answer_as_not_to_be_trusted_is_told_too(tmp_path: Path) -> None:
    """What it read is computed anew: NaN in a shared page would come back in every answer."""
    with cluster(tmp_path, "both-0", integrity="off") as (gateway, workers):
        worker = workers["both-0"]
        worker.plan = lambda start: [end(start, OutputSuspect("NaN"))]
        assert gateway.client.post("/v1/completions", json={"prompt": "abc"}).status_code == 502
        assert worker.wait_for(lambda: len(worker.orders) == 1)
        assert worker.orders[0].tokens == [*b"abc"]


def out_after(folder: Path, names: tuple[str, ...], **more: Any) -> tuple[dict[str, int], Any, Any]:
    """both-0 is always wrong, its damage is fresh; who is asked by the twentieth request."""
    wanted = {"retries_spare": 1000, "confirmed_max": 2}
    with cluster(folder, *names, **(wanted | more)) as (gateway, workers):
        gateway.until_ready()
        sick = workers[names[0]]

        def plan(start: Any) -> Plan:
            return FRESH(start) if len(start.tokens) == 1 else HONEST(start)

        for worker in workers.values():
            worker.plan = HONEST
        sick.plan = plan
        for _ in range(20):
            whole(gateway.client)
        asked = {name: len(attempts({name: worker})) for name, worker in workers.items()}
        return asked, values(gateway.client), gateway.client.get("/ready").json()


def test_a_worker_that_keeps_being_wrong_gets_no_more_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        asked, seen, ready = out_after(tmp_path, ("both-0", "both-1", "both-2"))
    assert asked["both-0"] == 2 and sum(asked.values()) == 22
    assert seen["stanchion:worker_out_of_rotation|both|both-0"] == 1
    assert seen["stanchion:workers_taken_out_total"] == 1
    assert ready["ready"] and ready["missing"] == ["both-0: out of rotation"]
    alerts = [json.loads(one.getMessage()) for one in caplog.records]
    assert [one["worker"] for one in alerts if one["event"] == "worker_out"] == ["both-0"]


def test_without_that_rule_it_would_get_its_share(tmp_path: Path) -> None:
    asked, seen, _ = out_after(tmp_path, ("both-0", "both-1", "both-2"), confirmed_max=0)
    assert asked["both-0"] >= 5 and seen["stanchion:workers_taken_out_total"] == 0


def test_the_only_one_is_kept_however_wrong_it_was(tmp_path: Path) -> None:
    with cluster(tmp_path, "both-0", **KEYS) as (gateway, workers):
        wanted = {"worker": "both-0"}
        reply = gateway.client.post("/admin/quarantine", json=wanted, headers=ADMIN)
        assert reply.json() == {"out": "both-0"}
        workers["both-0"].plan = lambda start: [say(start, "x"), end(start)]
        assert gateway.client.post("/v1/completions", json={"prompt": "x"}).is_success


# ---- by hand --------------------------------------------------------------------------------


def test_an_admin_takes_a_worker_out_and_lets_it_back(tmp_path: Path) -> None:
    with cluster(tmp_path, "both-0", "both-1", **KEYS) as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [say(start, "x"), end(start)]

        def asked(body: dict[str, Any]) -> dict[str, int]:
            reply = gateway.client.post("/admin/quarantine", json=body, headers=ADMIN)
            assert reply.is_success, reply.text
            for worker in workers.values():
                worker.starts.clear()
            for _ in range(6):
                assert gateway.client.post("/v1/completions", json={"prompt": "x"}).is_success
            return {name: len(worker.starts) for name, worker in workers.items()}

        assert asked({"worker": "both-1"}) == {"both-0": 6, "both-1": 0}
        assert asked({"worker": "both-1", "back": True}) == {"both-0": 3, "both-1": 3}


def test_an_admin_has_caches_flushed_and_prefixes_dropped(tmp_path: Path) -> None:
    with cluster(tmp_path, "both-0", "both-1", **KEYS) as (gateway, workers):

        def post(path: str, body: dict[str, Any] | None = None) -> Any:
            return gateway.client.post(path, json=body, headers=ADMIN)

        assert post("/admin/flush").json() == {"flushing": ["both-0", "both-1"]}
        assert post("/admin/flush", {"worker": "both-1"}).json() == {"flushing": ["both-1"]}
        prefix = {"tokens": [1, 2, 3], "tenant": "alice", "salt": "s"}
        assert post("/admin/quarantine", prefix | {"worker": "both-0"}).is_success
        one, two_ = workers["both-0"], workers["both-1"]
        assert one.wait_for(lambda: len(one.orders) == 2)
        assert one.orders == [Flush(), Quarantine(tokens=[1, 2, 3], tenant="alice", salt="s")]
        assert two_.wait_for(lambda: two_.orders == [Flush(), Flush()])
        for path, body in (
            ("/admin/flush", {"worker": "nobody"}),
            ("/admin/quarantine", {"worker": "nobody"}),
            ("/admin/quarantine", {"worker": "nobody", "tokens": [1]}),
        ):
            assert post(path, body).status_code == 404
        for wrong in ({}, {"tokens": []}, {"tokens": [-1]}, {"tokens": "x"}, {"other": 1}):
            reply = post("/admin/quarantine", wrong)
            assert reply.status_code == 400, wrong


def test_no_tenants_key_does_any_of_it(alone: FakeWorker) -> None:
    with running(alone, api_keys=("alice:one",), **KEYS) as gateway:
        for headers in ({}, {"x-api-key": "one"}, {"x-api-key": "the-admi"}):
            for path in ("/admin/flush", "/admin/quarantine"):
                assert gateway.client.post(path, json={}, headers=headers).status_code == 401
            assert gateway.client.get("/admin/state", headers=headers).status_code == 401
        assert not alone.orders


# ---- how all is -----------------------------------------------------------------------------


def test_the_state_tells_workers_and_requests_and_no_content(tmp_path: Path) -> None:

    gate = threading.Event()
    with cluster(tmp_path, "both-0", integrity="off", **KEYS) as (gateway, workers):
        worker = workers["both-0"]
        worker.plan = lambda start: [*Attempt(gates={60: gate})(start)]
        ask = threading.Thread(target=lambda: streamed(gateway.client, prompt="q"), daemon=True)
        ask.start()

        def state() -> Any:
            return gateway.client.get("/admin/state", headers=ADMIN).json()

        said = until(state, lambda now: now["requests"] and now["requests"][0]["tokens"] == 60)
        (one,) = said["requests"]
        assert one["workers"] == ["both-0"] and one["routed"] == "only"
        assert one["prompt_tokens"] == 1 and 2 < one["accept_length"] <= 3
        (shown,) = said["workers"]
        assert shown["name"] == "both-0" and shown["up"] and shown["pages_free"] == 1000
        assert said["integrity"] == "off" and said["routed"] == {"only": 1}
        assert "line" not in json.dumps(said)
        gate.set()
        ask.join()
        assert until(state, lambda now: not now["requests"])["requests"] == []


def test_drafts_at_fault_make_nobody_suspicious(tmp_path: Path) -> None:
    """Their answers are right (D15): what they hold goes on to count."""
    with two(tmp_path, **KEYS) as (gateway, workers):
        for worker in workers.values():
            worker.plan = LOST_DRAFTS
        assert all(streamed(gateway.client)[0] == TEXT for _ in range(10))
        seen = values(gateway.client)
        assert seen["stanchion:output_anomalies_total|pass|low_acceptance"] >= 1
        said = gateway.client.get("/admin/state", headers=ADMIN).json()
        assert [one["suspicious"] for one in said["workers"]] == [False, False]
        assert not orders(workers)
