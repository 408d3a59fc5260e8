"""Runs the gateway: binds, waits for its worker, serves, and drains when told to stop.

`run` returns when everything that was accepted has ended, or `drain_s` has passed; what it returns
says why it stopped. The first SIGTERM or SIGINT drains, a second one stops waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import uvicorn
import uvloop

from stanchion.core.errors import ConfigError
from stanchion.gateway.app import App
from stanchion.gateway.ledger import Ledger
from stanchion.gateway.link import Link
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import Vocabulary

Ending = Literal["drained", "drain_timed_out", "worker_died"]
OnStarted = Callable[[str], Awaitable[None] | None]
KEEP_ALIVE_S = 75
CLOSE_S = 5  # for replies already written to reach their clients
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
                    return await _serve(app, listener, url, on_started, link, stop, settings)
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


async def _serve(
    app: App,
    listener: socket.socket,
    url: str,
    on_started: OnStarted | None,
    link: Link,
    stop: Stopping,
    settings: GatewaySettings,
) -> Ending:
    server = _Server(_config(app))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        try:
            if await _hello(link, stop):
                _fits(app_vocabulary=app.vocabulary_size, model=_model_vocabulary(link))
                await _tell(on_started, url)
                await stop.drain.wait()
            app.draining = True
            in_time = await _drain(app, link, stop, settings.drain_s)
        finally:
            server.should_exit = True
    if stop.worker_died:
        return "worker_died"
    return "drained" if in_time else "drain_timed_out"


async def _hello(link: Link, stop: Stopping) -> bool:
    """Waits for the worker. False if told to stop before it came."""
    while link.ledger.hello is None and not stop.drain.is_set():
        link.changed.clear()
        await link.changed.wait()
    return link.ledger.hello is not None


def _model_vocabulary(link: Link) -> int:
    hello = link.ledger.hello
    return 0 if hello is None else hello.vocabulary


def _fits(app_vocabulary: int, model: int) -> None:
    if model and app_vocabulary > model:
        raise ConfigError(
            f"the tokenizer has {app_vocabulary} tokens, the worker's model only {model}"
        )


async def _tell(on_started: OnStarted | None, url: str) -> None:
    if on_started is not None:
        told = on_started(url)
        if told is not None:
            await told


async def _drain(app: App, link: Link, stop: Stopping, drain_s: float) -> bool:
    """True if everything accepted ended by itself."""
    link.drain()
    try:
        async with asyncio.timeout(drain_s):
            while (len(link.ledger) or app.open_calls) and not stop.now.is_set():
                link.changed.clear()
                await link.changed.wait()
    except TimeoutError:
        pass
    if not len(link.ledger) and not app.open_calls:
        return True
    link.leave_all("drain")
    return False


@contextlib.contextmanager
def _told(given: Stopping | None, link: Link, worker_sentinel: int | None) -> Iterator[Stopping]:
    """Signals and the worker's death, turned into events of the loop."""
    loop = asyncio.get_running_loop()
    stop = given or Stopping()
    stop.ring = link.changed.set

    def died() -> None:
        assert worker_sentinel is not None
        loop.remove_reader(worker_sentinel)
        stop.worker_died = True
        link.worker_died()
        stop()

    signals = (signal.SIGTERM, signal.SIGINT) if given is None else ()
    for one in signals:
        loop.add_signal_handler(one, stop)
    if worker_sentinel is not None:
        loop.add_reader(worker_sentinel, died)
    try:
        yield stop
    finally:
        for one in signals:
            loop.remove_signal_handler(one)
        if worker_sentinel is not None:
            loop.remove_reader(worker_sentinel)


@contextlib.contextmanager
def _listening(settings: GatewaySettings) -> Iterator[tuple[socket.socket, str]]:
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
        family, kind, protocol, _, address = found[0]
        # With the protocol named: only then does asyncio turn Nagle's delay off on its streams.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error}") from None
    with listener:
        host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
        yield listener, f"http://{host}:{listener.getsockname()[1]}"


def _config(app: App) -> uvicorn.Config:
    # uvicorn's own log repeats what ours says, and shows an answer cut on purpose as an error.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        app,
        http="httptools",
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
