"""The gateway as a process: signals, the worker's death, and what stops it from starting."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from stanchion.core.errors import ConfigError, Overloaded
from stanchion.core.messages import PromptScores, Start, Suspected, TopToken
from stanchion.gateway.serve import Stopping, run, serve
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import SMALL_TEXT_CHARACTERS, byte_vocabulary
from stanchion.gateway.web import Budget, Held

from .conftest import Gateway, running
from .worker import HELLO, WAIT_S, FakeWorker, Plan, end, say

PROGRAM = """
import contextlib, subprocess, sys
from stanchion.gateway.serve import run
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import byte_vocabulary

@contextlib.asynccontextmanager
async def supervise(fleet):
    fleet.expect(["both-0"])
    fleet.on_suspected = lambda said: fleet.give_up(said.why)
    yield

ending = run(GatewaySettings(port=0), sys.argv[1], byte_vocabulary(), supervise=supervise,
             on_started=lambda url: print(url, flush=True))
print(ending, flush=True)
"""


@contextmanager
def process(worker: FakeWorker) -> Iterator[tuple[subprocess.Popen, str]]:
    """A gateway of its own process, and its URL."""
    command = [sys.executable, "-c", PROGRAM, worker.join]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        try:
            yield gateway, gateway.stdout.readline().strip()
        finally:
            gateway.kill()


def test_sigterm_drains_and_what_was_accepted_ends_well(alone: FakeWorker):
    gate = threading.Event()
    alone.plan = lambda start: [gate, say(start, "whole"), end(start)]
    with process(alone) as (gateway, url), ThreadPoolExecutor(1) as threads:
        reply = threads.submit(_ask, url)
        assert alone.wait_for(lambda: len(alone.starts) == 1)
        gateway.terminate()
        assert alone.wait_for(lambda: alone.drains == 1)
        gate.set()
        assert reply.result(WAIT_S).json()["choices"][0]["text"] == "whole"
        assert gateway.stdout.readline().strip() == "drained"
        assert gateway.wait(WAIT_S) == 0


def test_when_there_will_be_no_more_workers_what_is_accepted_ends_and_then_the_gateway(
    alone: FakeWorker,
):
    gate = threading.Event()
    alone.plan = lambda start: [gate, say(start, "whole"), end(start)]
    with process(alone) as (gateway, url), ThreadPoolExecutor(1) as threads:
        reply = threads.submit(_ask, url)
        assert alone.wait_for(lambda: len(alone.starts) == 1)
        alone.extra.append(Suspected("both-0", 1, "no hope"))
        assert alone.wait_for(lambda: alone.drains == 1)
        gate.set()
        assert reply.result(WAIT_S).json()["choices"][0]["text"] == "whole"
        assert gateway.stdout.readline().strip() == "workers_failed"


def _ask(url: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": "x"}, timeout=WAIT_S, trust_env=False
    )


# ---- what stops it from starting ------------------------------------------------------------


def test_a_tokenizer_that_the_model_cannot_hold_is_a_config_error(tmp_path: Path):
    small = msgspec.structs.replace(HELLO, vocabulary=200)
    with FakeWorker(f"ipc://{tmp_path}/worker", hello=small) as worker:
        gateway = Gateway(worker.join, byte_vocabulary(), {})
        with pytest.raises(AssertionError):
            gateway.start()
        ending = gateway.join()
        assert isinstance(ending, ConfigError) and "272 tokens" in str(ending)


def test_a_taken_port_is_a_config_error(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            run(GatewaySettings(port=port), f"ipc://{tmp_path}/none", byte_vocabulary())


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"in_flight_max": 0},
        {"drain_s": 0.0},
        {"worker_silence_s": float("nan")},
        {"port": 70000},
    ],
)
def test_settings_that_make_no_sense_are_refused_at_start(tmp_path: Path, wrong: dict):
    with pytest.raises(ConfigError):
        run(GatewaySettings(**wrong), f"ipc://{tmp_path}/none", byte_vocabulary())


def test_before_the_worker_says_hello_it_is_alive_and_not_ready(tmp_path: Path):
    stopping, told = [], []

    async def serving() -> str:
        stopping.append(Stopping())
        return await serve(
            GatewaySettings(port=port),
            f"ipc://{tmp_path}/none",
            byte_vocabulary(),
            on_started=told.append,
            stopping=stopping[0],
        )

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def check() -> None:
        async with asyncio.TaskGroup() as group:
            server = group.create_task(serving())
            async with httpx.AsyncClient(trust_env=False) as client:
                url = f"http://127.0.0.1:{port}"
                assert (await client.get(f"{url}/health")).status_code == 200
                ready = await client.get(f"{url}/ready")
                assert (ready.status_code, ready.json()["ready"]) == (503, False)
                refused = await client.post(f"{url}/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503 and "retry-after" in refused.headers
            stopping[0]()
            assert await server == "drained"

    asyncio.run(check())
    assert told == []


# ---- memory ---------------------------------------------------------------------------------


def test_headers_without_end_are_cut_off(gateway: Gateway):
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-endless: ")
        raw = b""
        try:
            for _ in range(64):
                connection.sendall(b"x" * 65536)
            raw = connection.recv(65536)
        except ConnectionError:
            pass  # cut off while we were still sending
        assert raw == b"" or b"400" in raw
    assert gateway.client.get("/health", headers={"x": "y" * 100_000}).is_success


def test_bodies_that_are_arriving_share_a_budget_and_give_it_back(alone: FakeWorker):
    budget = Budget(100)
    with Held(budget) as first, Held(budget) as second:
        first.take(60)
        with pytest.raises(Overloaded):
            second.take(41)
        second.take(40)
    with Held(budget) as third:
        third.take(100)
    with running(alone, bodies_bytes_max=100_000) as gateway:
        for _ in range(3):
            large = gateway.client.post("/v1/completions", json={"prompt": "x" * 200_000})
            assert (large.status_code, "retry-after" in large.headers) == (429, True)
            assert gateway.client.post("/v1/completions", json={"prompt": "x" * 90}).is_success


def test_a_long_text_is_tokenised_beside_the_loop(alone: FakeWorker):
    entered, gate = threading.Event(), threading.Event()
    plain = byte_vocabulary()

    def slow(text: str, special: bool) -> list[int]:
        if len(text) > SMALL_TEXT_CHARACTERS:
            entered.set()
            assert gate.wait(WAIT_S)
        return plain.encoder(text, special)

    vocabulary = dataclasses.replace(plain, encoder=slow)
    with running(alone, vocabulary) as gateway, ThreadPoolExecutor(1) as threads:
        body = {"prompt": "x" * 5000}
        long = threads.submit(gateway.client.post, "/v1/completions", json=body)
        assert entered.wait(WAIT_S)
        assert gateway.client.post("/v1/completions", json={"prompt": "x"}).is_success
        gate.set()
        assert long.result(WAIT_S).json()["usage"]["prompt_tokens"] == 5000


def test_log_probabilities_of_a_long_prompt_are_written_beside_the_loop(alone: FakeWorker):
    def plan(start: Start) -> Plan:
        count = len(start.tokens) - 1
        tops = [[TopToken(97, -1.0)]] * count
        scores = PromptScores(request=start.request, logprobs=[-1.0] * count, top=tops)
        return [scores, say(start, "x"), end(start)]

    alone.plan = plan
    with running(alone) as gateway:
        body = {"prompt": "x" * 5000, "prompt_logprobs": 1}
        reply = gateway.client.post("/v1/completions", json=body).json()
        assert len(reply["choices"][0]["prompt_logprobs"]) == 5000


def test_armed_failpoints_mark_every_reply(tmp_path: Path):
    armed = msgspec.structs.replace(HELLO, failpoints=("slow_load", "release_before_drained"))
    with FakeWorker(f"ipc://{tmp_path}/worker", hello=armed) as worker, running(worker) as gateway:
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": 5}):
            reply = gateway.client.post("/v1/completions", json=body)
            assert reply.headers["x-stanchion-failpoints"] == "slow_load,release_before_drained"


def test_a_draft_record_comes_with_the_finish_where_the_worker_kept_one(alone: FakeWorker):
    alone.plan = lambda start: [say(start, "x"), end(start, draft_record=[([1, 2], 1)])]
    with running(alone) as gateway:
        reply = gateway.client.post("/v1/completions", json={"prompt": "x"}).json()
        assert reply["choices"][0]["spec_draft_record"] == [[[1, 2], 1]]
