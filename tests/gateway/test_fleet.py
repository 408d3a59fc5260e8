"""Several workers behind one gateway: who joins, who is asked, and one more attempt elsewhere."""

from __future__ import annotations

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

import httpx
import msgspec
import pytest
import zmq

from stanchion.core.errors import ConfigError
from stanchion.core.messages import (
    Join,
    Partner,
    Refused,
    Start,
    Suspected,
    Welcome,
    decode_join,
    decode_join_reply,
    encode,
)
from stanchion.core.outcome import Cancelled, OutputSuspect, Overloaded, PeerLost
from stanchion.gateway.serve import run
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import byte_vocabulary

from .conftest import Gateway, cluster
from .test_metrics import until, values
from .test_outcomes import _sent
from .worker import HELLO, WAIT_S, FakeWorker, Plan, end, named, say

PAIRS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def ask(gateway: Gateway, prompt: str = "x") -> httpx.Response:
    return gateway.client.post("/v1/completions", json={"prompt": prompt})


def retries(gateway: Gateway) -> dict[str, float]:
    prefix = "stanchion:request_retries_total|"
    found = values(gateway.client)
    return {name[len(prefix) :]: count for name, count in found.items() if name.startswith(prefix)}


# ---- who is asked ---------------------------------------------------------------------------


def test_a_request_goes_to_decode_alone_and_names_its_prefill_worker(tmp_path: Path):
    with cluster(tmp_path, *PAIRS) as (gateway, workers):
        for _ in range(8):
            assert ask(gateway).is_success
        partners = [start.prefill for at in "01" for start in workers[f"decode-{at}"].starts]
        assert len(partners) == 8
        expected = [Partner(f"prefill-{at}", f"ipc:///nowhere/prefill-{at}", 1) for at in "01"]
        assert sorted(map(partners.count, expected)) == [4, 4]
        assert not workers["prefill-0"].starts and not workers["prefill-1"].starts
        assert [len(workers[name].starts) for name in ("decode-0", "decode-1")] == [4, 4]


def test_a_request_in_flight_counts_on_both_of_its_workers_until_it_has_ended(tmp_path: Path):
    gate = threading.Event()
    with cluster(tmp_path, "prefill-0", "decode-0", "both-0") as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [gate, say(start, "x"), end(start)]
        with ThreadPoolExecutor(4) as threads:
            replies = [threads.submit(ask, gateway) for _ in range(4)]
            for name in ("decode-0", "both-0"):
                assert workers[name].wait_for(lambda w=workers[name]: len(w.starts) == 2)
            assert _in_flight(gateway) == {"prefill-0": 2, "decode-0": 2, "both-0": 2}
            gate.set()
            assert all(reply.result(WAIT_S).is_success for reply in replies)
        assert _in_flight(gateway) == {"prefill-0": 0, "decode-0": 0, "both-0": 0}


def test_a_reader_that_left_holds_its_permits_until_the_worker_says_that_it_ended(tmp_path: Path):
    with cluster(tmp_path, "prefill-0", "decode-0") as (gateway, workers):
        decode = workers["decode-0"]
        decode.plan, decode.deaf = lambda start: [threading.Event()], True
        with _sent(gateway, {"prompt": "x"}):
            assert decode.wait_for(lambda: len(decode.starts) == 1)
        assert decode.aborted("client")
        assert _in_flight(gateway) == {"prefill-0": 1, "decode-0": 1}
        decode.extra.append(end(decode.starts[0], Cancelled("client")))
        until(lambda: _in_flight(gateway), lambda now: now == {"prefill-0": 0, "decode-0": 0})


def _in_flight(gateway: Gateway) -> dict[str, float]:
    prefix = "stanchion:requests_in_flight|"
    found = values(gateway.client)
    return {name.split("|")[-1]: value for name, value in found.items() if name.startswith(prefix)}


def test_without_a_whole_pair_nobody_is_asked(tmp_path: Path):
    with cluster(tmp_path, "prefill-0", "decode-0", suspect_s=0.3) as (gateway, workers):
        workers["prefill-0"].hung = True
        said = gateway.until_ready(False)
        assert said["missing"] == said["why_not"] and "prefill-0: no report" in said["missing"][0]
        reply = ask(gateway)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")
        assert not workers["decode-0"].starts
        workers["prefill-0"].hung = False
        gateway.until_ready()
        assert ask(gateway).is_success


def test_ready_tells_who_is_missing_even_where_others_serve(tmp_path: Path):
    with cluster(tmp_path, "both-0", "both-1", suspect_s=0.3) as (gateway, workers):
        workers["both-1"].hung = True
        said = until(lambda: gateway.client.get("/ready").json(), lambda said: said["missing"])
        assert said["ready"] and not said["why_not"] and "both-1" in said["missing"][0]
        for _ in range(4):
            assert ask(gateway).is_success
        assert len(workers["both-0"].starts) == 4


def test_limits_are_those_of_the_smallest_pool_that_decides(tmp_path: Path):
    hellos = [named("both-0", pages=4), named("both-1", pages=2), named("prefill-0", pages=1)]
    with ExitStack() as stack:
        for hello in hellos:
            stack.enter_context(FakeWorker(f"ipc://{tmp_path}/{hello.name}", hello))
        names = [hello.name for hello in hellos]
        gateway = Gateway(f"ipc://{tmp_path}/join", byte_vocabulary(), {}, names)
        gateway.start()
        with gateway.client:
            models = gateway.client.get("/v1/models").json()
            assert models["data"][0]["max_model_len"] == 2 * 64
            gateway.stop()
            assert gateway.join() == "drained"


# ---- once more elsewhere --------------------------------------------------------------------

RETRIED = [
    (PeerLost("gone"), "peer_lost", 503),
    (Overloaded("full", 3.0), "overloaded", 429),
    (Cancelled("deadline"), "deadline", 503),
    (OutputSuspect("NaN"), "output_suspect", 502),
]


def _failing(ended: object, *before: str) -> object:
    return lambda start: [*(say(start, text) for text in before), end(start, ended)]


@pytest.mark.parametrize(("ended", "reason", "status"), RETRIED)
@pytest.mark.parametrize("stream", [False, True])
def test_an_attempt_of_which_nothing_was_said_is_made_once_more_elsewhere(
    tmp_path: Path, ended, reason, status, stream
):
    with cluster(tmp_path, "both-0", "both-1") as (gateway, workers):
        workers["both-0"].plan = _failing(ended)
        for _ in range(4):
            body = {"prompt": "x", "stream": stream}
            reply = gateway.client.post("/v1/completions", json=body)
            assert (reply.is_success and "Hello" in reply.text.replace('"', "")) or stream
            assert "error" not in reply.text
        tried, answered = workers["both-0"].starts, workers["both-1"].starts
        assert tried and len(answered) == 4
        names = [start.request for start in [*tried, *answered]]
        assert len(set(names)) == len(names), "a retry must not have the old name"
        assert retries(gateway) == {reason: len(tried)}


@pytest.mark.parametrize(("ended", "reason", "status"), RETRIED)
def test_it_is_made_once_more_and_not_twice(tmp_path: Path, ended, reason, status):
    with cluster(tmp_path, "both-0", "both-1", "both-2") as (gateway, workers):
        for worker in workers.values():
            worker.plan = _failing(ended)
        assert ask(gateway).status_code == status
        assert sum(len(worker.starts) for worker in workers.values()) == 2
        assert max(len(worker.starts) for worker in workers.values()) == 1
        assert retries(gateway) == {reason: 1}


@pytest.mark.parametrize(("ended", "reason", "status"), RETRIED)
def test_the_same_worker_will_do_if_it_is_alone_but_not_after_a_suspect_output(
    tmp_path: Path, ended, reason, status
):
    with cluster(tmp_path, "both-0") as (gateway, workers):
        worker = workers["both-0"]
        worker.plan = lambda start: (
            [end(start, ended)] if len(worker.starts) == 1 else [say(start, "ok"), end(start)]
        )
        reply = ask(gateway)
        if reason == "output_suspect":
            assert reply.status_code == status and len(worker.starts) == 1
        else:
            assert reply.is_success and len(worker.starts) == 2


@pytest.mark.parametrize(("ended", "reason", "status"), RETRIED)
def test_after_a_word_was_said_there_is_no_other_attempt(tmp_path: Path, ended, reason, status):
    """Of the fleet's own: what the integrity of answers asks for is another matter."""
    with cluster(tmp_path, "both-0", "both-1", integrity="off") as (gateway, workers):
        for worker in workers.values():
            worker.plan = _failing(ended, "a")
        assert ask(gateway).status_code == status
        assert sum(len(worker.starts) for worker in workers.values()) == 1
        assert retries(gateway) == {}


def test_for_a_client_that_left_there_is_no_other_attempt(tmp_path: Path):
    gate = threading.Event()
    with cluster(tmp_path, "both-0", "both-1") as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [gate, end(start, PeerLost("gone"))]
            worker.deaf = True
        with _sent(gateway, {"prompt": "x"}):
            (tried,) = until(lambda: [one for one in workers.values() if one.starts], bool)
        assert tried.aborted("client")
        gate.set()
        until(lambda: _in_flight(gateway), lambda now: not any(now.values()))
        assert sum(len(worker.starts) for worker in workers.values()) == 1


def test_what_the_old_attempt_says_later_is_for_nobody(tmp_path: Path):
    """Its prefill worker fell silent, so it was begun again; then the old decode worker speaks."""
    gate = threading.Event()
    with cluster(tmp_path, *PAIRS, suspect_s=0.4) as (gateway, workers):
        silent = workers["prefill-0"]

        def plan(start: Start) -> Plan:
            if start.prefill.name == silent.hello.name:
                return [gate, say(start, "old"), end(start)]
            return [say(start, "new"), end(start)]

        for name in ("decode-0", "decode-1"):
            workers[name].plan, workers[name].deaf = plan, True
        silent.hung = True
        with ThreadPoolExecutor(2) as threads:
            replies = list(threads.map(lambda _: ask(gateway), range(2)))
        assert [reply.json()["choices"][0]["text"] for reply in replies] == ["new"] * 2
        assert retries(gateway) == {"prefill_silent": 1}
        assert sum(_in_flight(gateway).values()) == 2, "the old attempt holds its pair"
        gate.set()
        until(lambda: _in_flight(gateway), lambda now: not any(now.values()))


# ---- lives ----------------------------------------------------------------------------------


def test_a_new_life_takes_the_place_of_the_old_one_and_what_that_held_goes_on(tmp_path: Path):
    with cluster(tmp_path, "both-0", "both-1") as (gateway, workers):
        for worker in workers.values():
            worker.plan = lambda start: [threading.Event()]
        with ThreadPoolExecutor(1) as threads:
            reply = threads.submit(ask, gateway)
            name = until(lambda: [n for n in workers if workers[n].starts], bool)[0]
            other = workers["both-1" if name == "both-0" else "both-0"]
            other.plan = lambda start: [say(start, "rescued"), end(start)]
            workers[name].hung = True
            with FakeWorker(f"ipc://{tmp_path}/next", named(name, incarnation=2)):
                said = reply.result(WAIT_S).json()
                assert said["choices"][0]["text"] == "rescued"
                gateway.until_ready()
                assert retries(gateway) == {"peer_lost": 1}
                workers[name].hung = False  # the old life is not dead after all: it is refused
                assert workers[name].wait_for(
                    lambda: any("incarnation" in str(said) for said in workers[name].joins)
                )


def test_the_only_worker_comes_back_under_a_new_life(tmp_path: Path):
    with cluster(tmp_path, "both-0") as (gateway, workers):
        old = workers["both-0"]
        old.plan = lambda start: [say(start, "half"), threading.Event()]
        with ThreadPoolExecutor(1) as threads:
            reply = threads.submit(ask, gateway)
            assert old.wait_for(lambda: len(old.starts) == 1)
            until(lambda: values(gateway.client), _a_word_was_said)
            old.hung = True
            with FakeWorker(f"ipc://{tmp_path}/next", named("both-0", incarnation=2)) as new:
                assert reply.result(WAIT_S).status_code == 503
                gateway.until_ready()
                assert ask(gateway).is_success and len(new.starts) == 1
        assert values(gateway.client)["stanchion:worker_lost_total|both|both-0"] == 1


def _a_word_was_said(found: dict[str, float]) -> bool:
    return found["stanchion:generation_tokens_total"] > 0


def test_losing_a_prefill_worker_costs_nothing_to_those_that_are_past_it(tmp_path: Path):
    gate = threading.Event()
    with cluster(tmp_path, "prefill-0", "decode-0") as (gateway, workers):
        decode = workers["decode-0"]
        decode.plan = lambda start: [say(start, "half "), gate, say(start, "whole"), end(start)]
        with ThreadPoolExecutor(1) as threads:
            reply = threads.submit(ask, gateway)
            until(lambda: values(gateway.client), _a_word_was_said)
            workers["prefill-0"].hung = True
            hello = named("prefill-0", incarnation=2)
            with FakeWorker(f"ipc://{tmp_path}/next", hello) as new:
                assert new.wait_for(lambda: bool(new.joins))
                gate.set()
                assert reply.result(WAIT_S).json()["choices"][0]["text"] == "half whole"
                gateway.until_ready()
                assert ask(gateway).is_success
                assert decode.starts[-1].prefill.incarnation == 2
        assert not decode.aborts


def test_a_suspicion_is_handed_on(tmp_path: Path):
    with cluster(tmp_path, "prefill-0", "decode-0") as (gateway, workers):
        said = Suspected("prefill-0", 1, "no answer")
        workers["decode-0"].extra.append(said)
        until(lambda: gateway.suspected, bool)
        assert gateway.suspected == [said]


def test_another_process_at_the_address_of_a_worker_is_not_listened_to(tmp_path: Path):
    with cluster(tmp_path, "both-0") as (gateway, workers):
        joined = named("both-1")
        other = FakeWorker(f"ipc://{tmp_path}/x", named("both-1", incarnation=9), joins_as=joined)
        with other:
            said = until(lambda: gateway.client.get("/ready").json(), lambda said: said["missing"])
            assert said["missing"] == ["both-1: the worker has not said hello"]
            until(
                lambda: values(gateway.client),
                lambda found: found.get("stanchion:unknown_messages_total|both|both-1", 0.0) > 0,
            )
            for _ in range(4):
                assert ask(gateway).is_success
            assert len(workers["both-0"].starts) == 4 and not other.starts


# ---- joining --------------------------------------------------------------------------------


def test_a_worker_that_differs_is_refused_and_told_each_difference(tmp_path: Path):
    other = {**HELLO.identity, "page_tokens": "16", "schema": "other"}
    with cluster(tmp_path, "both-0"):
        with FakeWorker(f"ipc://{tmp_path}/x", named("both-1", identity=other)) as worker:
            assert worker.wait_for(lambda: bool(worker.joins))
            refused = worker.joins[0]
            assert isinstance(refused, Refused)
            assert [one.split(":")[0] for one in refused.differences] == ["page_tokens", "schema"]
            assert refused.differences[1] == "schema: s in the cluster, other in this worker"
        with FakeWorker(f"ipc://{tmp_path}/y", named("both-2")) as fitting:
            assert fitting.wait_for(lambda: bool(fitting.joins))
            assert fitting.joins[0] == Welcome()


def test_a_cluster_that_nobody_is_left_of_may_become_another_one(tmp_path: Path):
    other = {**HELLO.identity, "revision": "2"}
    with cluster(tmp_path, "both-0") as (gateway, workers):
        gateway.within(lambda: gateway.fleet.ended("both-0", 0, "it ended"))
        workers["both-0"].hung = True
        with FakeWorker(f"ipc://{tmp_path}/x", named("both-1", identity=other)) as worker:
            assert worker.wait_for(lambda: Welcome() in worker.joins)
            until(lambda: ask(gateway), lambda reply: reply.is_success)


@pytest.mark.parametrize(
    ("changed", "address", "field"),
    [
        ({"pages": -1}, "ipc:///x", "pages"),
        ({"page_tokens": 0}, "ipc:///x", "page_tokens"),
        ({"vocabulary": 0}, "ipc:///x", "vocabulary"),
        ({}, "inproc://x", "address"),
        ({}, "tcp://", "address"),
        ({}, "tcp://127.0.0.1:99999999", "address"),
        ({}, "tcp://10.0.0.1:5", "address"),
        ({"role": "prefill", "peer_address": ""}, "ipc:///x", "peer_address"),
        ({"role": "prefill", "peer_address": "ipc://" + "x" * 600}, "ipc:///x", "peer_address"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, changed, address, field):
    with cluster(tmp_path, "both-0") as (gateway, _):
        hello = msgspec.structs.replace(named("both-1"), **changed)
        reply = _said(gateway, encode(Join(address, hello)))
        assert isinstance(reply, Refused) and reply.differences[0].startswith(f"{field}:")
        assert ask(gateway).is_success


def _said(gateway: Gateway, frame: bytes) -> Welcome | Refused:
    with zmq.Context() as context, context.socket(zmq.DEALER) as joining:
        joining.set(zmq.LINGER, 0)
        joining.set(zmq.RCVTIMEO, int(WAIT_S * 1000))
        joining.connect(gateway.fleet.join)
        joining.send(frame)
        return decode_join_reply(joining.recv())


class Gadget:
    """Pickled, this runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self._path}",)


def _garbage(folder: Path) -> list[list[bytes]]:
    import pickle

    good, random = encode(Join("ipc:///x", HELLO)), Random(5)
    made = [[pickle.dumps(Gadget(folder / "gadget"))], [b""], [b"\xc1"], [good, good], [b"", good]]
    made += [[good[:cut]] for cut in range(0, len(good), 7)]
    made += [[bytes([*good[:at], random.randrange(256), *good[at + 1 :]])] for at in range(40)]
    made += [[random.randbytes(random.randrange(1, 200))] for _ in range(200)]
    made += [[b"\xdf\xff\xff\xff\xff"], [b"\xc6\xff\xff\xff\xff"], [b"\x91" * 5000]]
    made += [[b"\x81\xa4type\xa4join" + b"x" * 60_000], [b"x"] * 2000, [b"x" * (1 << 20)]]
    return made


def _garbage_joins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage on the join socket: no gadget runs, the loop goes on, and so does who has joined."""
    with cluster(tmp_path, "both-0") as (gateway, workers):
        workers["both-0"].plan = lambda start: [say(start, "fine"), end(start)]
        for frames in _garbage(tmp_path):
            with zmq.Context() as context, context.socket(zmq.DEALER) as joining:
                joining.set(zmq.LINGER, 1000)
                joining.connect(gateway.fleet.join)
                joining.send_multipart(frames)
        found = until(
            lambda: values(gateway.client),
            lambda found: found["stanchion:join_garbage_total"] > 200,
        )
        assert found["stanchion:worker_up|both|both-0"] == 1
        assert ask(gateway).json()["choices"][0]["text"] == "fine"
        assert not (tmp_path / "gadget").exists(), "the gadget ran"
        assert "Exception in callback" not in caplog.text
        lines = [record for record in caplog.records if "join_garbage" in record.getMessage()]
        assert 1 <= len(lines) < 20, "a line for each would fill the disk"


def test_garbage_on_the_join_socket_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    _garbage_joins(tmp_path, caplog)


def _unpickled(frame: bytes) -> Join:
    """The wrong variant (D38): what is no message of ours may be anybody's pickled object."""
    import pickle

    try:
        return decode_join(frame)
    except msgspec.DecodeError:
        if frame.startswith(pickle.dumps(None)[:2]):
            pickle.loads(frame)
        raise


def test_a_join_socket_that_unpickles_what_comes_is_caught(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("stanchion.gateway.join.decode_join", _unpickled)
    with pytest.raises(AssertionError, match="the gadget ran"):
        _garbage_joins(tmp_path, caplog)


def test_a_wire_that_is_no_zeromq_or_claims_too_much_changes_nothing(tmp_path: Path):
    gateway = Gateway("tcp://127.0.0.1:0", byte_vocabulary(), {})
    gateway_thread = threading.Thread(target=gateway.start, daemon=True)
    gateway_thread.start()
    endpoint = until(lambda: getattr(getattr(gateway, "fleet", None), "join", ""), bool)
    host, port = endpoint.removeprefix("tcp://").split(":")
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    ready = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
    for tail in (b"", b"\x02" + struct.pack(">Q", 2**62), b"\x02" + struct.pack(">Q", 2**63 + 5)):
        for raw in (Random(3).randbytes(500), greeting + ready + tail, greeting + tail):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as wire:
                wire.sendall(raw)
                wire.shutdown(socket.SHUT_WR)
                try:
                    while wire.recv(4096):
                        pass
                except ConnectionError:
                    pass
    with FakeWorker(f"ipc://{tmp_path}/real", join=endpoint):
        gateway_thread.join(WAIT_S)
        with gateway.client:
            assert ask(gateway).is_success
            gateway.stop()
            assert gateway.join() == "drained"


def test_a_join_address_for_other_machines_needs_a_key():
    with pytest.raises(ConfigError, match="peer-key"):
        run(GatewaySettings(port=0), "tcp://0.0.0.0:0", byte_vocabulary())


def test_with_a_key_only_those_that_have_it_join(tmp_path: Path):
    thief = FakeWorker(f"ipc://{tmp_path}/thief", named("both-1"), key="other")
    plain = FakeWorker(f"ipc://{tmp_path}/plain", named("both-2"))
    owner = FakeWorker(f"ipc://{tmp_path}/owner", key="sesame")
    gateway = Gateway(owner.join, byte_vocabulary(), {"peer_key": "sesame"})
    with thief, plain, owner:
        gateway.start()
        with gateway.client:
            assert owner.wait_for(lambda: Welcome() in owner.joins)
            began = time.monotonic()
            while time.monotonic() - began < 0.5:  # theirs would have come by now
                assert ask(gateway).is_success
            assert not thief.joins and not plain.joins
            gateway.stop()
            assert gateway.join() == "drained"


def test_draining_tells_prefill_workers_last(tmp_path: Path):
    gate = threading.Event()
    with cluster(tmp_path, "prefill-0", "decode-0") as (gateway, workers):
        workers["decode-0"].plan = lambda start: [gate, say(start, "whole"), end(start)]
        with ThreadPoolExecutor(1) as threads:
            reply = threads.submit(ask, gateway)
            assert workers["decode-0"].wait_for(lambda: len(workers["decode-0"].starts) == 1)
            gateway.stop()
            assert workers["decode-0"].wait_for(lambda: workers["decode-0"].drains == 1)
            assert workers["prefill-0"].drains == 0
            gate.set()
            assert reply.result(WAIT_S).json()["choices"][0]["text"] == "whole"
            assert workers["prefill-0"].wait_for(lambda: workers["prefill-0"].drains == 1)
            assert gateway.join() == "drained"
