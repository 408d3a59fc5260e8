"""Runs the gateway: binds, waits for its workers, serves, and drains when told to stop.

`run` returns when everything that was accepted has ended, or `drain_s` has passed; what it returns
says why it stopped. The first SIGTERM, SIGINT or SIGHUP drains, a second one stops waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import uvicorn
import uvloop

from stanchion.core.errors import ConfigError
from stanchion.gateway.app import App
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.protocol import BoundedHeaders
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.supervise import Supervise
from stanchion.gateway.tokens import Vocabulary

Ending = Literal["drained", "drain_timed_out", "workers_failed"]
OnStarted = Callable[[str], Awaitable[None] | None]
GIVE_WAY_S = 0.0005  # by then another thread lets go of the interpreter; Python's default is 5 ms
COLLECT_AFTER = (10_000, 20, 50)  # objects, and collections of the younger generation
KEEP_ALIVE_S = 75
CLOSE_S = 5  # for replies already written to reach their clients
BACKLOG = 2048


def run(
    settings: GatewaySettings,
    join: str,
    vocabulary: Vocabulary,
    *,
    on_started: OnStarted | None = None,
    supervise: Supervise | None = None,
) -> Ending:
    """Blocks. Workers join at `join` (ipc://PATH or tcp://HOST:PORT); `supervise` keeps the
    processes of those that are ours, from before the start until after the drain."""
    serving = serve(settings, join, vocabulary, on_started=on_started, supervise=supervise)
    # What was loaded stays, and what a stream makes is soon dropped: walking all of it again and
    # again would hold up everybody's next token for tens of milliseconds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(GIVE_WAY_S)  # streams do not wait for a record or a long prompt's text
    return uvloop.run(serving)


async def serve(
    settings: GatewaySettings,
    join: str,
    vocabulary: Vocabulary,
    *,
    on_started: OnStarted | None = None,
    supervise: Supervise | None = None,
    stopping: Stopping | None = None,
) -> Ending:
    """The same on a running loop. Signals are heard only where `stopping` is not given."""
    settings.check()
    with _listening(settings) as (listener, url):
        fleet = Fleet(settings, join)
        app = App(settings, vocabulary, fleet)
        try:
            async with fleet.running():
                with _told(stopping, fleet) as stop:
                    app.on_drain = stop.begin
                    served = _Served(app, fleet, stop, settings.drain_s)
                    async with supervise(fleet) if supervise else contextlib.nullcontext():
                        return await served.until_stopped(listener, vocabulary, url, on_started)
        except BaseExceptionGroup as group:
            raise only(group) from group
        finally:
            app.close()


def only(error: BaseException) -> BaseException:
    """Task groups wrap what was raised inside; a caller wants the one error itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class Stopping:
    """How a running gateway is told to stop: once to drain, twice to stop waiting."""

    def __init__(self) -> None:
        self.drain = False
        self.now = False
        self.ring: Callable[[], None] = lambda: None  # wakes whoever waits for the workers

    def begin(self) -> None:
        """To drain, however often it is said."""
        self.drain = True
        self.ring()

    def __call__(self) -> None:
        self.drain, self.now = True, self.drain
        self.ring()


@dataclass(frozen=True)
class _Served:
    app: App
    fleet: Fleet
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
                await self._until(lambda: self.fleet.complete or self._over())
                if not self._over():
                    _fits(vocabulary, self.fleet)
                    await _tell(on_started, url)
                    await self._until(self._over)
                in_time = await self._drain()
            finally:
                server.should_exit = True
        if self.fleet.failed:
            return "workers_failed"
        return "drained" if in_time else "drain_timed_out"

    def _over(self) -> bool:
        return self.stop.drain or bool(self.fleet.failed)

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            self.fleet.changed.clear()
            await self.fleet.changed.wait()

    async def _drain(self) -> bool:
        """True if everything accepted ended by itself."""
        self.app.intake.draining = True
        self.fleet.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.drain_s):
                await self._until(lambda: not self._busy() or self.stop.now)
        in_time = not self._busy()
        if not in_time:
            self.fleet.leave_all("drain")
        self.fleet.drain_prefill()
        return in_time

    def _busy(self) -> bool:
        return bool(len(self.fleet) or self.app.intake.open_calls)


def _fits(vocabulary: Vocabulary, fleet: Fleet) -> None:
    hello = fleet.hello
    if hello is not None and vocabulary.size > hello.vocabulary:
        raise ConfigError(
            f"the tokenizer has {vocabulary.size} tokens, the workers' model {hello.vocabulary}"
        )


async def _tell(on_started: OnStarted | None, url: str) -> None:
    if on_started is not None:
        told = on_started(url)
        if told is not None:
            await told


@contextlib.contextmanager
def _told(given: Stopping | None, fleet: Fleet) -> Iterator[Stopping]:
    """Signals, turned into what the loop waits for."""
    loop = asyncio.get_running_loop()
    stop = given or Stopping()
    stop.ring = fleet.changed.set
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if given is None else ()
    for one in signals:
        loop.add_signal_handler(one, stop)
    try:
        yield stop
    finally:
        for one in signals:
            loop.remove_signal_handler(one)


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
    # uvicorn's own logs repeat what ours says, show an answer cut on purpose as an error, and
    # write paths as they came, with whatever is in them.
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
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
