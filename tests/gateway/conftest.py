"""A gateway on a free port in a thread, in front of a scripted worker."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stanchion.gateway.serve import Stopping, serve
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary

from .worker import WAIT_S, FakeWorker


class Gateway:
    """A running gateway: `url`, a client for it, and `stop` as a signal would."""

    def __init__(self, address: str, vocabulary: Vocabulary, settings: dict[str, Any]) -> None:
        self._settings = GatewaySettings(**({"port": 0} | settings))
        self._address = address
        self._vocabulary = vocabulary
        self._started = threading.Event()
        self.url = ""
        self.ending: str | BaseException = ""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.ending = asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 (the test reads it)
            self.ending = error
        self._started.set()

    async def _serve(self) -> str:
        self._loop = asyncio.get_running_loop()
        self._stopping = Stopping()
        return await serve(
            self._settings,
            self._address,
            self._vocabulary,
            on_started=self._on_started,
            stopping=self._stopping,
        )

    def _on_started(self, url: str) -> None:
        self.url = url
        self._started.set()

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(WAIT_S)
        assert self.url, self.ending
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping)

    def join(self) -> str | BaseException:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.ending


@contextmanager
def running(
    worker: FakeWorker, vocabulary: Vocabulary | None = None, **settings: Any
) -> Iterator[Gateway]:
    gateway = Gateway(worker.address, vocabulary or byte_vocabulary(), settings)
    gateway.start()
    try:
        with gateway.client:
            yield gateway
    finally:
        gateway.stop()
        gateway.join()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('wire')}/worker"
    with FakeWorker(address) as worker, running(worker) as gateway:
        yield worker, gateway


@pytest.fixture
def worker(shared: tuple[FakeWorker, Gateway]) -> Iterator[FakeWorker]:
    yield shared[0]
    shared[0].reset()


@pytest.fixture
def gateway(shared: tuple[FakeWorker, Gateway], worker: FakeWorker) -> Gateway:
    return shared[1]


@pytest.fixture
def client(gateway: Gateway) -> httpx.Client:
    return gateway.client


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[FakeWorker]:
    """A worker for a test that needs a gateway of its own."""
    with FakeWorker(f"ipc://{tmp_path}/worker") as worker:
        yield worker


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream's text."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
