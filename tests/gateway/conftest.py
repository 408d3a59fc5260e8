"""A gateway on a free port in a thread, in front of a scripted worker."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from stanchion.core.messages import Suspected
from stanchion.gateway.serve import Stopping, serve
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.supervise import Supervise, Watched
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary

from .worker import WAIT_S, FakeWorker, named


class Gateway:
    """A running gateway: `url`, a client for it, and `stop` as a signal would."""

    def __init__(
        self,
        join: str,
        vocabulary: Vocabulary,
        settings: dict[str, Any],
        expected: Sequence[str] = (),
        beside: Supervise | None = None,
    ) -> None:
        self._expected = expected
        self._beside = beside
        # Workers here fail on purpose, again and again: breakers and the budget of retries have
        # tests of their own.
        usual = {"port": 0, "suspect_s": 10.0, "breaker_faults": 10**6, "retries_spare": 10**6}
        self._settings = GatewaySettings(**(usual | settings))
        self._join = join
        self._vocabulary = vocabulary
        self._started = threading.Event()
        self.url = ""
        self.ending: str | BaseException = ""
        self.suspected: list[Suspected] = []
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
            self._join,
            self._vocabulary,
            on_started=self._on_started,
            stopping=self._stopping,
            supervise=self._supervise,
        )

    @asynccontextmanager
    async def _supervise(self, fleet: Watched) -> AsyncIterator[None]:
        self.fleet = fleet
        fleet.expect(self._expected)
        fleet.on_suspected = lambda said: self.suspected.append(said)
        async with self._beside(fleet) if self._beside else nullcontext():
            yield

    def within(self, act: Callable[[], None]) -> None:
        """On the gateway's own thread."""
        self._loop.call_soon_threadsafe(act)

    def until_ready(self, ready: bool = True) -> dict[str, Any]:
        """What /ready says once it says so, with nothing missing if it is."""
        deadline = time.monotonic() + WAIT_S
        while True:
            said: dict[str, Any] = self.client.get("/ready").json()
            if said["ready"] is ready and not (ready and said["missing"]):
                return said
            assert time.monotonic() < deadline, said

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
    gateway = Gateway(worker.join, vocabulary or byte_vocabulary(), settings)
    gateway.start()
    try:
        with gateway.client:
            yield gateway
    finally:
        gateway.stop()
        gateway.join()


Workers = dict[str, FakeWorker]


@contextmanager
def cluster(folder: Path, *names: str, **settings: Any) -> Iterator[tuple[Gateway, Workers]]:
    """Workers of these names, all joined, and the gateway in front of them."""
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(FakeWorker(f"ipc://{folder}/{name}", named(name)))
            for name in names
        }
        gateway = Gateway(f"ipc://{folder}/join", byte_vocabulary(), settings, names)
        gateway.start()
        try:
            with gateway.client:
                yield gateway, workers
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
