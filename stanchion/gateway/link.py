"""The connection to one worker: one ZeroMQ DEALER, typed messages, nothing else.

Runs on the event loop's thread. The socket is read by hand and not through `zmq.asyncio`: one
wake-up then takes all messages that have come, which is what several hundred streams need.
Sending never waits: a full queue is told, except that an `Abort` is kept and sent later, since
the worker would otherwise compute for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from stanchion.core.errors import ConfigError
from stanchion.core.messages import (
    Abort,
    Drain,
    Greet,
    Hello,
    Order,
    Start,
    Suspected,
    ToWorker,
    decode_from_worker,
    encode,
)
from stanchion.core.outcome import Leaver
from stanchion.core.peerkey import connect_with
from stanchion.gateway.connection import SIGNALS
from stanchion.gateway.ledger import Ledger, Ticket

SEND_QUEUE_MAX = 1024
BATCH_MAX = 512  # messages heard before other tasks get a turn
LINGER_MS = 200


@dataclass(frozen=True)
class Ears:
    """Who is told: `changed` whenever something was heard, `lost` after the worker was lost."""

    changed: Callable[[], None]
    suspected: Callable[[Suspected], None]
    lost: Callable[[], None]


class Link:
    """`expected` is what the worker said of itself when it joined: another is not listened to."""

    signals = SIGNALS

    def __init__(self, expected: Hello, ledger: Ledger, ears: Ears) -> None:
        self.ledger = ledger
        self._expected = expected
        self._ears = ears
        self._owed: deque[Abort | Order] = deque()  # about one a request in flight

    def open(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str) -> None:
        """Raise ConfigError if there can be no such address."""
        self._socket = socket = context.socket(zmq.DEALER)
        socket.set(zmq.IMMEDIATE, 1)  # queue only for a worker that is there
        socket.set(zmq.SNDHWM, SEND_QUEUE_MAX)
        socket.set(zmq.RCVHWM, 0)  # read at once, and merged by request
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        connect_with(socket, key)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"cannot connect to {address!r}: {error}") from None
        self._descriptor = int(socket.get(zmq.FD))
        asyncio.get_running_loop().add_reader(self._descriptor, self.hear)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._socket.close()

    # ---- towards the worker -----------------------------------------------------------------

    def start(self, start: Start, ticket: Ticket) -> bool:
        """False if the worker's queue is full, or it is not there."""
        self.ledger.open(ticket, self._now())
        if self._send(start):
            return True
        self.ledger.forget(ticket)
        return False

    def leave(self, ticket: Ticket, by: Leaver) -> None:
        if self.ledger.leave(ticket, by):
            self.abort([ticket.request], by)

    def leave_all(self, by: Leaver) -> None:
        self.abort(self.ledger.leave_all(by), by)

    def abort(self, requests: Sequence[str], by: Leaver) -> None:
        self._owed.extend(Abort(request, by) for request in requests)
        self.ledger.told(requests, by, self._now())
        self._pay()

    def drain(self) -> None:
        self._send(Drain())

    def tell(self, order: Order) -> None:
        """About what it keeps: said now, or as soon as there is room."""
        self._owed.append(order)
        self._pay()

    def lose(self, why: str) -> None:
        # It may be alive after all: it should not go on with requests that have ended here.
        self.abort(self.ledger.lose(why), "deadline")
        self._ears.lost()

    # ---- from the worker --------------------------------------------------------------------

    def hear(self) -> None:
        if self._socket.closed:
            return  # called soon, and the end came sooner
        heard = 0
        while heard < BATCH_MAX:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            heard += 1
            self._take(frame)
        else:
            asyncio.get_running_loop().call_soon(self.hear)
        if heard:
            self._ears.changed()

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_from_worker(frame)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.lose(f"the worker said what is no message: {error}")
            return
        match message:
            case Suspected():
                self._ears.suspected(message)
            case Hello() if _life(message) != _life(self._expected):
                self.ledger.unknown += 1  # another process has its address now; it must join
            case _:
                self.ledger.hear(message, self._now())

    # ---- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """To be called a few times a second."""
        if self.ledger.hello is None:
            self._send(Greet())
        for request, by in self.ledger.unheard(self._now()):
            self.abort([request], by)
        self._pay()
        self.hear()  # the socket's descriptor tells edges only: never rely on it alone
        if why := self.ledger.overdue(self._now()):
            self.lose(why)

    def _pay(self) -> None:
        while self._owed and self._send(self._owed[0]):
            self._owed.popleft()

    def _send(self, message: ToWorker) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may swallow the edge that announced a message: look for it.
        asyncio.get_running_loop().call_soon(self.hear)
        return True

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _life(hello: Hello) -> tuple[str, int]:
    return hello.name, hello.incarnation
