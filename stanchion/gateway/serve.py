"""Runs the gateway: binds, waits for its worker, serves, and drains when told to stop.

`run` returns when everything that was accepted has ended, or `drain_s` has passed; what it returns
says why it stopped. The first SIGTERM, SIGINT or SIGHUP drains, a second one stops waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import uvicorn
import uvloop

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Hello
from stanchion.gateway.app import App
from stanchion.gateway.ledger import Ledger
from stanchion.gateway.link import Link
from stanchion.gateway.protocol import BoundedHeaders
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import Vocabulary

Ending = Literal["drained", "drain_timed_out", "worker_died"]
OnStarted = Callable[[str], Awaitable[None] | None]
KEEP_ALIVE_S = 75
CLOSE_S = 5  # for replies already written to reach their clients
LAST_WORDS_S = 0.1  # what a worker said before its end may still be on its way here
BACKLOG = 2048


def run(
    settings: GatewaySettings,
    address: str,
    vocabulary: Vocabulary,
    *,
    on_started: OnStarted | None = None,
    worker_sentinel: int | None = None,
) -> Ending:
    """Blocks. `worker_sentinel` is a descriptor that becomes readable when the worker's process
    ends (`multiprocessing.Process.sentinel`, a pidfd)."""
    serving = serve(
        settings, address, vocabulary, on_started=on_started, worker_sentinel=worker_sentinel
    )
    return uvloop.run(serving)


async def serve(
    settings: GatewaySettings,
    address: str,
    vocabulary: Vocabulary,
    *,
    on_started: OnStarted | None = None,
    worker_sentinel: int | None = None,
    stopping: Stopping | None = None,
) -> Ending:
    """The same on a running loop. Signals are heard only where `stopping` is not given."""
    settings.check()
    ledger = Ledger(settings.worker_silence_s, settings.stall_s)
    with _listening(settings) as (listener, url):
        link = Link(address, ledger, settings.in_flight_max, settings.retry_after_s)
        app = App(settings, vocabulary, link)
        try:
            async with link.running():
                with _told(stopping, link, worker_sentinel) as stop:
                    served = _Served(app, link, stop, settings.drain_s)
                    return await served.until_stopped(listener, vocabulary, url, on_started)
        except BaseExceptionGroup as group:
            raise _only(group) from group
        finally:
            app.close()


def _only(error: BaseException) -> BaseException:
    """Task groups wrap what was raised inside; a caller wants the one error itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class Stopping:
    """How a running gateway is told to stop: once to drain, twice to stop waiting."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.worker_died = False
        self.ring: Callable[[], None] = lambda: None  # wakes whoever waits for the worker

    def __call__(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()
        self.ring()


@dataclass(frozen=True)
class _Served:
    app: App
    link: Link
    stop: Stopping
    drain_s: float

    async def until_stopped(
        self,
        listener: socket.socket,
        vocabulary: Vocabulary,
        url: str,
        on_started: OnStarted | None,
    ) -> Ending:
        server = _Server(_config(self.app))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            try:
                hello = await self._hello()
                if hello is not None:
                    _fits(vocabulary, hello)
                    await _tell(on_started, url)
                    await self.stop.drain.wait()
                in_time = await self._drain()
            finally:
                server.should_exit = True
        if self.stop.worker_died:
            return "worker_died"
        return "drained" if in_time else "drain_timed_out"

    async def _hello(self) -> Hello | None:
        """Waits for the worker. None if told to stop before it came."""
        while (hello := self.link.ledger.hello) is None and not self.stop.drain.is_set():
            self.link.changed.clear()
            await self.link.changed.wait()
        return hello

    async def _drain(self) -> bool:
        """True if everything accepted ended by itself."""
        self.app.draining = True
        self.link.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.drain_s):
                while self._busy() and not self.stop.now.is_set():
                    self.link.changed.clear()
                    await self.link.changed.wait()
        if not self._busy():
            return True
        self.link.leave_all("drain")
        return False

    def _busy(self) -> bool:
        return bool(len(self.link.ledger) or self.app.open_calls)


def _fits(vocabulary: Vocabulary, hello: Hello) -> None:
    if vocabulary.size > hello.vocabulary:
        raise ConfigError(
            f"the tokenizer has {vocabulary.size} tokens, the worker's model {hello.vocabulary}"
        )


async def _tell(on_started: OnStarted | None, url: str) -> None:
    if on_started is not None:
        told = on_started(url)
        if told is not None:
            await told


@contextlib.contextmanager
def _told(given: Stopping | None, link: Link, worker_sentinel: int | None) -> Iterator[Stopping]:
    """Signals and the worker's death, turned into events of the loop."""
    loop = asyncio.get_running_loop()
    stop = given or Stopping()
    stop.ring = link.changed.set

    def exited() -> None:
        assert worker_sentinel is not None
        loop.remove_reader(worker_sentinel)
        loop.call_later(LAST_WORDS_S, died)

    def died() -> None:
        if stop.drain.is_set() and not len(link.ledger):
            return  # a drained worker may leave
        stop.worker_died = True
        link.worker_died()
        stop()

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if given is None else ()
    for one in signals:
        loop.add_signal_handler(one, stop)
    if worker_sentinel is not None:
        loop.add_reader(worker_sentinel, exited)
    try:
        yield stop
    finally:
        for one in signals:
            loop.remove_signal_handler(one)
        if worker_sentinel is not None:
            loop.remove_reader(worker_sentinel)


@contextlib.contextmanager
def _listening(settings: GatewaySettings) -> Iterator[tuple[socket.socket, str]]:
    named = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {named}: {error}") from None
    family, kind, protocol, _, address = found[0]
    # With the protocol named: only then does asyncio turn Nagle's delay off on its streams.
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {named}: {error}") from None
        host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
        yield listener, f"http://{host}:{listener.getsockname()[1]}"


def _config(app: App) -> uvicorn.Config:
    # uvicorn's own log repeats what ours says, and shows an answer cut on purpose as an error.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        app,
        http=BoundedHeaders,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would drop what is still being answered."""
        yield
