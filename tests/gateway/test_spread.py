"""Routing over the wire: permits on every route (D26), breakers and budgets under load, health by
forward progress (D27), pairs (D25), books (D23), sessions and priorities."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Start
from stanchion.core.outcome import Cancelled, Completed, PeerLost, Rejected
from stanchion.core.request import AHEAD
from stanchion.gateway.ledger import Ledger, Ticket
from stanchion.gateway.priority import Range, ranges
from stanchion.gateway.router import WHYS
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.waiting import Line

from .conftest import Gateway, Workers, cluster
from .test_healing import PAIRS
from .test_metrics import until, values
from .worker import EOS, WAIT_S, FakeWorker, Plan, end, named, say

EIGHT = [f"both-{at}" for at in range(8)]
SHARED = "the same beginning " * 30
MESSAGES = [{"role": "user", "content": SHARED}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SHARED, "max_tokens": 9},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/messages": {"model": "hashed", "messages": MESSAGES, "max_tokens": 9},
}


def by(gateway: Gateway, name: str) -> dict[str, float]:
    prefix, found = f"stanchion:{name}|", values(gateway.client)
    return {key[len(prefix) :]: value for key, value in found.items() if key.startswith(prefix)}


def in_flight(gateway: Gateway) -> float:
    return sum(by(gateway, "requests_in_flight").values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_permit_is_taken_at_dispatch_on_every_route(tmp_path: Path, path: str, stream: bool):
    """D26: all begin alike, nobody answers, and yet nobody has more than twice the mean."""
    gate = threading.Event()
    with cluster(tmp_path, *EIGHT) as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [gate, say(start, "x"), end(start)]
        with ThreadPoolExecutor(48) as threads:
            body = ROUTES[path] | {"stream": stream}
            replies = [threads.submit(gateway.client.post, path, json=body) for _ in range(48)]
            until(lambda: sum(len(one.starts) for one in workers.values()), lambda all_: all_ == 48)
            assert max(len(one.starts) for one in workers.values()) <= 2 * 48 / 8
            assert in_flight(gateway) == 48
            gate.set()
            assert all(reply.result(WAIT_S).is_success for reply in replies)
        until(lambda: in_flight(gateway), lambda held: held == 0)
        assert sum(by(gateway, "routed_total").values()) == 48


def test_a_prompt_goes_back_to_where_its_beginning_was_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with cluster(tmp_path, *EIGHT[:4]) as (gateway, workers), caplog.at_level(logging.INFO):
        for _ in range(6):
            assert gateway.client.post("/v1/completions", json={"prompt": SHARED}).is_success
        (home,) = [name for name, worker in workers.items() if worker.starts]
        assert len(workers[home].starts) == 6
        found = until(
            lambda: [json.loads(one.getMessage()) for one in caplog.records if "routed" in one.msg
                     or '"routed"' in one.getMessage()],
            lambda lines: len(lines) == 6,
        )  # fmt: skip
        assert [one["routed"] for one in found] == ["turn", *["prefix"] * 5]
        assert {one["worker"] for one in found} == {home}
        assert set(by(gateway, "routed_total")) == set(WHYS)


def test_a_conversation_is_named_by_its_header_and_the_name_is_our_own(tmp_path: Path):
    with cluster(tmp_path, *EIGHT[:4]) as (gateway, workers):
        for at in range(6):
            other = "".join(Random(at).choices("abcdef", k=300))
            reply = gateway.client.post(
                "/v1/completions", json={"prompt": other}, headers={"x-session-id": "secret-7"}
            )
            assert reply.is_success
        (home,) = [worker for worker in workers.values() if worker.starts]
        names = {start.session for start in home.starts}
        assert len(names) == 1 and "secret" not in names.pop()
        assert by(gateway, "routed_total")["session"] == 5


# ---- faults ---------------------------------------------------------------------------------


def test_bad_clients_shut_nobody_out_and_broken_workers_are(tmp_path: Path):
    with cluster(tmp_path, "both-0", breaker_rest_s=0.5, breaker_faults=5) as (gateway, workers):
        worker = workers["both-0"]
        worker.plan = lambda start: [end(start, Rejected("prompt", "too long"))]
        replies = [gateway.client.post("/v1/completions", json={"prompt": "x"}) for _ in range(100)]
        assert {reply.status_code for reply in replies} == {400}
        assert by(gateway, "breaker_state") == {"both|both-0": 0}
        worker.plan = lambda start: [end(start, PeerLost("broken"))]
        for _ in range(20):
            reply = gateway.client.post("/v1/completions", json={"prompt": "x"})
            assert reply.status_code == 503
        assert len(worker.starts) < 110, "it was given work while it was shut out"
        ready = gateway.client.get("/ready").json()
        assert not ready["ready"] and "shut out" in ready["missing"][0]
        worker.plan = lambda start: [say(start, "well"), end(start)]
        until(
            lambda: gateway.client.post("/v1/completions", json={"prompt": "x"}).status_code,
            lambda status: status == 200,
        )
        assert by(gateway, "breaker_state") == {"both|both-0": 0}
        owners = by(gateway, "attempt_faults_total")
        assert owners["client"] == 100 and owners["worker"] >= 5 and not owners["data"]


def broken_pair(gateway: Gateway, workers: Workers) -> None:
    """D25: prefill-1 is broken, and it is decode that says so."""
    broken = threading.Event()
    broken.set()

    def plan(start: Start) -> Plan:
        assert start.prefill is not None
        if start.prefill.name == "prefill-1" and broken.is_set():
            return [end(start, PeerLost("prefill-1 is gone", "prefill-1"))]
        return [say(start, "x"), end(start)]

    for name in ("decode-0", "decode-1"):
        workers[name].plan = plan
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: timed(gateway), range(200)))
    starts = [start for at in "01" for start in workers[f"decode-{at}"].starts]
    tried = sum(start.prefill.name == "prefill-1" for start in starts if start.prefill)
    assert tried <= 20, f"{tried} decode slots were taken for a prefill worker that is shut out"
    assert {status for status, _ in replies} == {200}, "all are made again in time"
    states = by(gateway, "breaker_state")
    assert states.pop("prefill|prefill-1") > 0 and not any(states.values())
    broken.clear()
    healed = time.monotonic()
    until(
        lambda: (timed(gateway), by(gateway, "breaker_state"))[1]["prefill|prefill-1"],
        lambda state: state == 0,
    )
    assert time.monotonic() - healed < 2 * REST_S + 2.0


REST_S = 1.0


def timed(gateway: Gateway) -> tuple[int, float]:
    began = time.monotonic()
    reply = gateway.client.post("/v1/completions", json={"prompt": "x"})
    return reply.status_code, time.monotonic() - began


def test_a_broken_prefill_worker_takes_no_decode_slots_and_heals(tmp_path: Path):
    with cluster(tmp_path, *PAIRS, breaker_rest_s=REST_S, breaker_faults=5) as (gateway, workers):
        broken_pair(gateway, workers)


def test_a_fault_that_its_speaker_is_blamed_for_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The wrong variant (D25): decode, which only tells, is what gets shut out."""
    monkeypatch.setattr("stanchion.gateway.rotation.blamed", lambda ended, route: route.worker)
    with (
        cluster(tmp_path, *PAIRS, breaker_rest_s=REST_S, breaker_faults=5) as (gateway, workers),
        pytest.raises(AssertionError),
    ):
        broken_pair(gateway, workers)


def test_the_only_pair_broken_is_refused_at_once(tmp_path: Path):
    with cluster(tmp_path, "prefill-0", "decode-0", breaker_rest_s=60.0, breaker_faults=5) as (
        gateway,
        workers,
    ):
        gone = PeerLost("prefill-0 is gone", "prefill-0")
        workers["decode-0"].plan = lambda start: [end(start, gone)]
        for _ in range(10):
            timed(gateway)
        took = len(workers["decode-0"].starts)
        told = [timed(gateway) for _ in range(20)]
        assert {status for status, _ in told} == {503}
        assert sorted(seconds for _, seconds in told)[10] < 0.1
        assert len(workers["decode-0"].starts) == took, "a decode slot was taken"


# ---- forward progress (D27) -----------------------------------------------------------------


def test_a_worker_that_only_says_it_lives_is_out_of_rotation(tmp_path: Path):
    with cluster(tmp_path, "both-0", "both-1", stall_s=0.4) as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [threading.Event()]
        hung = threading.Thread(target=timed, args=(gateway,), daemon=True)
        hung.start()
        (stuck,) = until(lambda: [one for one in workers.values() if one.starts], bool)
        stuck.frozen = True
        until(lambda: gateway.client.get("/ready").json()["missing"], bool)
        for worker in workers.values():
            worker.plan = lambda start: [say(start, "x"), end(start)]
        for _ in range(8):
            assert timed(gateway)[0] == 200
        assert len(stuck.starts) == 1, "a frozen worker was given work"
        stuck.frozen = False
        stuck.extra.append(end(stuck.starts[0]))
        gateway.until_ready()
        for _ in range(8):
            assert timed(gateway)[0] == 200
        assert len(stuck.starts) > 1, "it moves again, and gets work again"


def test_long_prefill_and_idleness_are_no_stall():
    ledger = Ledger(silence_s=10, stall_s=1)
    worker = FakeWorker("ipc:///nowhere")
    ledger.open(Ticket("r", lambda: None), 0.0)
    for at in range(60):
        worker.counters = {"steps": 1, "prefill_tokens": 4096 * at}
        ledger.hear(worker._progress(), float(at))
        assert not ledger.stalled_s(at + 0.9), "chunks of a long prompt are progress"
    assert ledger.stalled_s(61.0)
    ledger.forget(ledger._tickets["r"])
    worker.counters = {"steps": 1}
    for at in range(61, 700, 10):
        ledger.hear(worker._progress(), float(at))
        assert not ledger.stalled_s(at + 9.0), "nothing was asked of it"


def progressing(name: str, **counters: int) -> Ledger:
    """Of that worker, after five seconds in which its counters stood still."""
    ledger, worker = Ledger(silence_s=10, stall_s=1), FakeWorker("ipc:///nowhere", named(name))
    worker.counters, worker.frozen = counters, True
    ledger.hear(worker.hello, 0.0)
    if name.startswith("decode"):
        ledger.open(Ticket("r", lambda: None), 0.0)
    for at in range(6):
        ledger.hear(worker._progress(), float(at))
    return ledger


def test_a_frozen_prefill_worker_is_seen_though_the_gateway_gave_it_nothing():
    busy = {"running": 2, "waiting": 1}
    assert progressing("prefill-0", **busy).stalled_s(5.5)
    assert not progressing("prefill-0", running=0, waiting=0).stalled_s(5.5)


def test_decode_that_waits_for_long_prompts_of_others_is_no_stall():
    for running, stalled in ((3, False), (4, True)):  # of which one has its KV, and gets nowhere
        ledger = progressing("decode-0", running=running, waiting=2, handoffs=3)
        assert bool(ledger.stalled_s(5.5)) is stalled


def test_a_worker_that_does_not_end_what_it_should_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("stanchion.gateway.ledger.TELL_AGAIN_S", 0.2)
    with cluster(tmp_path, "both-0") as (gateway, workers):
        worker = workers["both-0"]
        worker.plan, worker.deaf = lambda start: [threading.Event()], True
        with pytest.raises(httpx.ReadTimeout):
            gateway.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
        assert worker.wait_for(lambda: len(worker.aborts) >= 3)
        assert {abort.by for abort in worker.aborts} == {"client"}
        assert by(gateway, "requests_leaving") == {"both|both-0": 1}
        worker.extra.append(end(worker.starts[0], Cancelled("client")))
        until(lambda: by(gateway, "requests_leaving"), lambda held: not any(held.values()))
        assert not by(gateway, "attempt_faults_total")["worker"]


# ---- budgets --------------------------------------------------------------------------------


def storm(gateway: Gateway, requests: int) -> list[int]:
    with ThreadPoolExecutor(16) as threads:
        return [status for status, _ in threads.map(lambda _: timed(gateway), range(requests))]


def saturated(folder: Path) -> None:
    """Every attempt fails before a word: attempts stay within 1.1 of the requests."""
    spare, requests = 5, 300
    wanted = {"retries_spare": spare}
    with cluster(folder, "both-0", "both-1", **wanted) as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [end(start, PeerLost("gone"))]
        assert set(storm(gateway, requests)) == {503}
        attempts = sum(len(worker.starts) for worker in workers.values())
        assert attempts - spare <= 1.1 * requests, f"{attempts} attempts"
        assert attempts > requests, "some are made again"
        assert by(gateway, "request_retries_total")["peer_lost"] == attempts - requests
        over = values(gateway.client)["stanchion:retries_over_budget_total"]
        assert over == 2 * requests - attempts


def test_retries_before_a_word_are_within_the_budget_too(tmp_path: Path):
    saturated(tmp_path)


def test_retries_without_a_budget_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "stanchion.gateway.monitor.budget.RetryBudget.allows", lambda self, tenant, now: True
    )
    with pytest.raises(AssertionError, match="attempts"):
        saturated(tmp_path)


def test_one_tenant_cannot_spend_the_retries_of_another(tmp_path: Path):
    wanted = {"retries_share": 0.5, "retries_spare": 0, "api_keys": ("alice:a", "bob:b")}
    with cluster(tmp_path, "both-0", "both-1", **wanted) as (
        gateway,
        workers,
    ):
        for worker in workers.values():
            worker.plan = lambda start: [end(start, PeerLost("gone"))]

        def ask(key: str) -> None:
            headers = {"x-api-key": key}
            gateway.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)

        for _ in range(40):
            ask("a")
        before = sum(len(worker.starts) for worker in workers.values()) - 40
        for _ in range(10):
            ask("b")
        after = sum(len(worker.starts) for worker in workers.values()) - 50
        assert 15 <= before <= 20 and after > before


# ---- books (D23) ----------------------------------------------------------------------------


def books(folder: Path, streams: int) -> None:
    """Cut at random, some made again: what the workers said is what is counted, of each attempt,
    and each request is billed once, by what was released to its client."""
    random = Random(23)
    lost: set[str] = set()
    lock, gate = threading.Lock(), threading.Event()

    def plan(start: Start) -> Plan:
        with lock:
            name = bytes(start.tokens).decode()
            if int(name) % 8 == 0 and name not in lost:
                lost.add(name)
                return [end(start, PeerLost("gone"))]
        said = [say(start, [120] * 3) for _ in range(20)]
        if leaves[int(name)]:  # its worker goes on for a while
            said.insert(1 + int(name) % 18, gate)
        return [*said, say(start, [EOS]), end(start, Completed("stop"))]

    leaves = [random.random() < 0.7 for _ in range(streams)]
    wanted = {"retries_spare": 1000, "api_keys": ("a:a", "b:b", "c:c")}
    wanted |= {"in_flight_max": streams}
    with cluster(folder, "both-0", "both-1", **wanted) as (gateway, workers):
        for worker in workers.values():
            worker.plan, worker.deaf = plan, True

        def one(at: int) -> None:
            body = {"prompt": f"{at:04d}", "stream": True, "max_tokens": 100}
            headers = {"x-api-key": "abc"[at % 3]}
            with gateway.client.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as reply:
                for part in reply.iter_bytes():
                    if leaves[at] and part:
                        return

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(one, range(streams)))
        gate.set()
        headers = {"x-api-key": "a"}
        gateway.client.headers.update(headers)
        until(lambda: in_flight(gateway), lambda held: held == 0)
        spoke = {name: sum(worker.spoke.values()) for name, worker in workers.items()}
        told = by(gateway, "attempt_tokens_total")
        assert {key.split("|")[1]: value for key, value in told.items()} == spoke
        views = {view.name: view.computed for view in gateway.fleet.views()}
        tenants = sum(views.values(), Counter())
        assert sum(tenants.values()) == sum(spoke.values()), "tenants and workers differ"
        assert set(tenants) == {*"abc"}
        billed = by(gateway, "billed_tokens_total")
        for at, tenant in enumerate("abc"):
            asked = len(range(at, streams, 3))
            assert billed[f"prompt|{tenant}"] == 4 * asked, "billed once a request"
            assert billed[f"generated|{tenant}"] <= tenants[tenant]
        assert sum(billed[f"generated|{one}"] for one in "abc") > 0
        starts = sum(len(worker.starts) for worker in workers.values())
        assert starts == streams + len(lost)


def test_what_is_counted_is_what_was_said(tmp_path: Path):
    books(tmp_path, 120)


@pytest.mark.soak
def test_what_is_counted_is_what_was_said_a_thousand_times(tmp_path: Path):
    books(tmp_path, 1000)


def test_books_that_hang_on_the_last_word_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The wrong variant (D23): what comes for nobody is not counted."""
    true_put = Ticket.put

    def put(self: Ticket, message: Any) -> None:
        if self.closed and hasattr(message, "tokens"):
            for ledger in ledgers:
                ledger.computed[self.tenant] -= len(message.tokens)
        true_put(self, message)

    ledgers: list[Ledger] = []
    true_open = Ledger.open

    def opened(self: Ledger, ticket: Ticket, now: float) -> None:
        if self not in ledgers:
            ledgers.append(self)
        true_open(self, ticket, now)

    monkeypatch.setattr(Ledger, "open", opened)
    monkeypatch.setattr(Ticket, "put", put)
    with pytest.raises(AssertionError):
        books(tmp_path, 120)


# ---- priorities -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_a_priority_is_the_tenants_unless_it_asks_and_has_a_bound(tmp_path: Path, path: str):
    wanted = {"api_keys": ("gold:g", "plain:p"), "priorities": ("gold=-5:-10",)}
    with cluster(tmp_path, "both-0", **wanted) as (gateway, workers):

        def ask(key: str, **more: int) -> httpx.Response:
            headers = {"x-api-key": key}
            return gateway.client.post(path, json=ROUTES[path] | more, headers=headers)

        for key, more in (("g", {}), ("g", {"priority": -10}), ("p", {}), ("p", {"priority": 7})):
            assert ask(key, **more).is_success
        assert [start.priority for start in workers["both-0"].starts] == [-5, -10, 0, 7]
        for key, value, bound in (("g", -11, "-10"), ("p", -1, "0"), ("p", -101, "-100")):
            reply = ask(key, priority=value)
            assert reply.status_code == 400
            assert "priority" in reply.text and bound in reply.text


@pytest.mark.parametrize("said", ["x", "=1:0", "a=0:1", "a=1", "a=200:0", "a=0:-101", "a=x:y"])
def test_priorities_that_make_no_sense_are_refused(said: str):
    with pytest.raises(ConfigError, match="priority"):
        GatewaySettings(priorities=(said,)).check()


def test_priorities_are_read_as_they_are_written():
    assert ranges(("a=2:-3", "b=0:0")) == {"a": Range(2, -3), "b": Range(0, 0)}
    with pytest.raises(ConfigError, match="two"):
        ranges(("a=0:0", "a=0:0"))
    with pytest.raises(ConfigError, match="priority_best"):
        GatewaySettings(priority_best=1).check()


# ---- the line -------------------------------------------------------------------------------


def test_the_most_urgent_is_first_and_nobody_waits_for_ever():
    line = Line(1000)
    patient = line.enter(2)
    others = [line.enter(0) for _ in range(3 * AHEAD)]
    overtaken = 0
    while not line.first(patient):
        line.leave(others.pop(0))
        overtaken += 1
    assert overtaken == 2 * AHEAD - 1
    urgent = line.enter(-3)
    assert line.first(urgent)
    for _ in range(2 * AHEAD):
        line.leave(line.enter(0))
    later = line.enter(-3)
    line.leave(urgent)
    assert line.first(patient) and not line.first(later), "it has waited long enough"
    assert Line(0).full


def waits(gateway: Gateway, priority: int) -> httpx.Response:
    body = {"prompt": f"{priority}", "priority": priority}
    return gateway.client.post("/v1/completions", json=body)


def lined_up(gateway: Gateway, workers: Workers, threads: ThreadPoolExecutor) -> list[Any]:
    """One runs, and three wait behind it, the least urgent first."""
    gate = threading.Event()
    workers["both-0"].plan = lambda start: [gate, say(start, "x"), end(start)]
    replies = [threads.submit(waits, gateway, 0)]
    assert workers["both-0"].wait_for(lambda: len(workers["both-0"].starts) == 1)
    for at, priority in enumerate((9, 5, -5), start=1):
        replies.append(threads.submit(waits, gateway, priority))
        until(lambda: values(gateway.client)[WAITING], lambda held, at=at: held == at)
    return [gate, *replies]


WAITING = "stanchion:requests_waiting_for_room"
ROOM_FOR_ONE = {"in_flight_max": 1, "waiting_max": 3, "priority_best": -9}


def test_those_that_wait_for_room_are_let_in_by_priority(tmp_path: Path):
    with (
        cluster(tmp_path, "both-0", **ROOM_FOR_ONE) as (gateway, workers),
        ThreadPoolExecutor(8) as threads,
    ):
        gate, *replies = lined_up(gateway, workers, threads)
        assert waits(gateway, -9).status_code == 429, "the line has a bound"
        gate.set()
        assert all(reply.result(WAIT_S).is_success for reply in replies)
        asked = [bytes(start.tokens).decode() for start in workers["both-0"].starts]
        assert asked == ["0", "-5", "5", "9"]
        assert values(gateway.client)[WAITING] == 0


def test_who_waits_too_long_is_refused_and_who_leaves_is_out_of_the_line(tmp_path: Path):
    wanted = ROOM_FOR_ONE | {"waiting_s": 1.0}
    with cluster(tmp_path, "both-0", **wanted) as (gateway, workers):
        gate = threading.Event()
        workers["both-0"].plan = lambda start: [gate, say(start, "x"), end(start)]
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(waits, gateway, 0)
            assert workers["both-0"].wait_for(lambda: len(workers["both-0"].starts) == 1)
            assert waits(gateway, 0).status_code == 429
            with pytest.raises(httpx.ReadTimeout):
                gateway.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.1)
            until(lambda: values(gateway.client)[WAITING], lambda held: held == 0)
            gate.set()
            assert first.result(WAIT_S).is_success
            assert len(workers["both-0"].starts) == 1
