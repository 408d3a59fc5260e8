"""Workers break: nobody waits on a silent one (D25), and no broken answer looks whole (D21)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from stanchion.core.messages import Start
from stanchion.core.outcome import Cancelled, Completed, Outcome, OutputSuspect
from stanchion.gateway import fleet
from stanchion.gateway.choice import ChoiceFold, Piece

from .conftest import Gateway, Workers, cluster
from .test_router import TwoUnits
from .worker import EOS, FakeWorker, Plan, end, say

PAIRS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SUSPECT_S = 1.0
SLACK_S = 1.0  # a tick of the gateway, and a busy machine


# ---- a prefill worker falls silent ----------------------------------------------------------


def _needs_prefill(workers: Workers) -> Callable[[Start], Plan]:
    """What a decode worker does: nothing comes of a request whose prefill worker is hung."""

    def plan(start: Start) -> Plan:
        assert start.prefill is not None
        if workers[start.prefill.name].hung:
            return [threading.Event()]
        return [say(start, "answer"), end(start)]

    return plan


def _timed(gateway: Gateway, number: int) -> tuple[int, str, float]:
    began = time.monotonic()
    reply = gateway.client.post("/v1/completions", json={"prompt": f"{number}"})
    return reply.status_code, reply.text, time.monotonic() - began


def _refused_at_once(gateway: Gateway, workers: Workers) -> None:
    """No prefill worker is there: so it is said, and no decode worker is given anything."""
    decoders = [worker for name, worker in workers.items() if name.startswith("decode")]
    for worker in decoders:
        worker.starts.clear()
    told = [_timed(gateway, at) for at in range(20)]
    refused = [status == 503 and "worker_lost" in text for status, text, _ in told]
    assert all(refused), "it is not refused"
    assert sorted(seconds for _, _, seconds in told)[10] < 0.1
    assert not any(worker.starts for worker in decoders), "a decode slot is taken"


def test_nobody_waits_on_a_silent_prefill_worker_and_the_cluster_heals(tmp_path: Path):
    with cluster(tmp_path, *PAIRS, suspect_s=SUSPECT_S) as (gateway, workers):
        for name in ("decode-0", "decode-1"):
            workers[name].plan = _needs_prefill(workers)
        workers["prefill-1"].hung = True
        with ThreadPoolExecutor(16) as threads:
            told = list(threads.map(lambda at: _timed(gateway, at), range(200)))
        assert {status for status, _, _ in told} == {200}
        assert max(seconds for _, _, seconds in told) < SUSPECT_S + SLACK_S
        used = [start.prefill.name for at in "01" for start in workers[f"decode-{at}"].starts]
        assert used.count("prefill-1") >= 1, "nothing was ever in danger"
        assert used.count("prefill-1") < 20, "it was given work after it was suspected"

        workers["prefill-0"].hung = True
        gateway.until_ready(False)
        _refused_at_once(gateway, workers)

        workers["prefill-0"].hung = workers["prefill-1"].hung = False
        gateway.until_ready()
        for name in ("decode-0", "decode-1"):
            workers[name].starts.clear()
        with ThreadPoolExecutor(16) as threads:
            told = list(threads.map(lambda at: _timed(gateway, at), range(40)))
        assert {status for status, _, _ in told} == {200}
        used = [start.prefill.name for at in "01" for start in workers[f"decode-{at}"].starts]
        assert set(used) == {"prefill-0", "prefill-1"}, "the healed one is used again"


def test_a_pair_admitted_as_two_units_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What decode has taken without a prefill worker runs into its deadline."""
    monkeypatch.setattr(fleet, "Router", TwoUnits)
    with cluster(tmp_path, "prefill-0", "decode-0", suspect_s=0.3) as (gateway, workers):
        workers["decode-0"].plan = lambda start: [end(start, Cancelled("deadline"))]
        workers["prefill-0"].hung = True
        gateway.until_ready(False)
        with pytest.raises(AssertionError, match="it is not refused"):
            _refused_at_once(gateway, workers)
        assert workers["decode-0"].starts, "no decode slot was taken"


# ---- an answer breaks off -------------------------------------------------------------------

CRASH = b"\xc1"  # what is no message loses the worker at once, as its death does
CAUSES = {
    "monitor": Cancelled("monitor"),
    "shutdown": Cancelled("drain"),
    "deadline": Cancelled("deadline"),
    "kv_loss": OutputSuspect("a page differs from its digest"),
    "crash": CRASH,
}
RETRIED = {"deadline", "kv_loss", "crash"}
LAST = 200
TEXT = "x" * LAST


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Workers]]:
    folder = tmp_path_factory.mktemp("two")
    # Off: what is broken off is told, and not taken up elsewhere (which test_integrity does).
    with cluster(folder, "both-0", "both-1", worker_silence_s=5.0, integrity="off") as made:
        yield made


def _breaks(cause: object, at: int, gate: threading.Event) -> Callable[[Start], Plan]:
    def plan(start: Start) -> Plan:
        told = [say(start, "x" * at), gate] if at else []
        return [*told, cause if isinstance(cause, bytes) else end(start, cause)]

    return plan


def _whole(start: Start) -> Plan:
    return [say(start, [*TEXT.encode(), EOS]), end(start, Completed("stop"))]


def _broken(workers: Workers, cause: object, at: int, gate: threading.Event) -> None:
    """The first attempt breaks, wherever it is made; a second one would be answered."""
    breaks, tried = _breaks(cause, at, gate), threading.Lock()

    def plan(start: Start) -> Plan:
        return breaks(start) if tried.acquire(blocking=False) else _whole(start)

    for worker in workers.values():
        worker.plan = plan
        worker.starts.clear()


def _stream_that_breaks(two: tuple[Gateway, Workers], cause: str, at: int, chat: bool) -> None:
    """It raises, or is made again; a part of it never looks whole."""
    gateway, workers = two
    gateway.until_ready()
    gate = threading.Event()
    _broken(workers, CAUSES[cause], at, gate)
    text, finished, raised = "", [], None
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as sdk:
        try:
            for piece, reason in _streamed(sdk, chat):
                text += piece
                finished += [reason] if reason else []
                if at and len(text) >= at - 1:
                    gate.set()
        except openai.APIError as error:
            raised = error
    attempts = sum(len(worker.starts) for worker in workers.values())
    if at == 0 and cause in RETRIED:
        assert (text, finished, raised, attempts) == (TEXT, ["stop"], None, 2)
    else:
        assert raised is not None and not finished and attempts == 1, "it looks whole"
        assert text == "x" * len(text) and len(text) <= at


@pytest.mark.parametrize("at", [0, 1, 128, LAST])
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("chat", [False, True])
def test_a_broken_answer_is_raised_or_made_again_and_never_looks_whole(
    two: tuple[Gateway, Workers], cause: str, at: int, chat: bool
):
    _stream_that_breaks(two, cause, at, chat)


def _streamed(sdk: openai.OpenAI, chat: bool) -> Iterator[tuple[str, str | None]]:
    if chat:
        messages = [{"role": "user", "content": "x"}]
        for chunk in sdk.chat.completions.create(model="hashed", messages=messages, stream=True):
            yield chunk.choices[0].delta.content or "", chunk.choices[0].finish_reason
    else:
        for part in sdk.completions.create(
            model="hashed", prompt="x", max_tokens=LAST + 1, stream=True
        ):
            yield part.choices[0].text, part.choices[0].finish_reason


def _piece_that_breaks(two: tuple[Gateway, Workers], cause: str, at: int) -> None:
    """It is an error, or is made again."""
    gateway, workers = two
    gateway.until_ready()
    gate = threading.Event()
    gate.set()
    _broken(workers, CAUSES[cause], at, gate)
    reply = gateway.client.post("/v1/completions", json={"prompt": "x", "max_tokens": LAST + 1})
    if at == 0 and cause in RETRIED:
        choice = reply.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    else:
        assert reply.status_code in (502, 503) and "choices" not in reply.json(), "it looks whole"
        assert reply.json()["error"]["retryable"] is True


@pytest.mark.parametrize("at", [0, 1, 128, LAST])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_broken_answer_in_one_piece_is_an_error_or_made_again(
    two: tuple[Gateway, Workers], cause: str, at: int
):
    _piece_that_breaks(two, cause, at)


@pytest.mark.parametrize("cause", CAUSES)
def test_an_abort_that_looks_like_an_end_is_caught(
    two: tuple[Gateway, Workers], cause: str, monkeypatch: pytest.MonkeyPatch
):
    """The wrong variant: however the engine ended, the client is told that it stopped."""
    true_finish = ChoiceFold.finish

    def finish(self: ChoiceFold, outcome: Outcome) -> Piece:
        return true_finish(self, Completed("stop"))

    monkeypatch.setattr(ChoiceFold, "finish", finish)
    for chat in (False, True):
        with pytest.raises(AssertionError, match="it looks whole"):
            _stream_that_breaks(two, cause, 128, chat)
    with pytest.raises(AssertionError, match="it looks whole"):
        _piece_that_breaks(two, cause, 128)


# ---- ids ------------------------------------------------------------------------------------


def test_the_same_client_id_a_hundred_times_over_two_pairs_does_not_cross(tmp_path: Path):
    """Half of all first attempts fail: retries have names of their own too."""
    failed: set[str] = set()

    def plan(start: Start) -> Plan:
        prompt = bytes(start.tokens).decode()
        if int(prompt) % 2 and prompt not in failed:
            failed.add(prompt)
            return [end(start, Cancelled("deadline"))]
        return [say(start, prompt), end(start)]

    with cluster(tmp_path, *PAIRS) as (gateway, workers):
        decoders: list[FakeWorker] = [workers["decode-0"], workers["decode-1"]]
        for worker in decoders:
            worker.plan = plan

        def one(number: int) -> tuple[int, str, str]:
            reply = gateway.client.post(
                "/v1/completions",
                json={"prompt": f"{number}"},
                headers={"x-request-id": "the-same"},
            )
            return number, reply.json()["choices"][0]["text"], reply.headers["x-request-id"]

        with ThreadPoolExecutor(16) as threads:
            told = list(threads.map(one, range(100)))
        assert told == [(number, f"{number}", "the-same") for number in range(100)]
        names = [start.request for worker in decoders for start in worker.starts]
        assert len(names) == len(set(names)) == 150
        assert not any("the-same" in name for name in names)
