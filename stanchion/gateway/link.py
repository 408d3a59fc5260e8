"""The connection to the worker: one ZeroMQ DEALER, typed messages, nothing else.

Runs on the event loop's thread. The socket is read by hand and not through `zmq.asyncio`: one
wake-up then takes all messages that have come, which is what several hundred streams need.
Sending never waits: a full queue is `Overloaded`, except that an `Abort` is kept and sent later,
since the worker would otherwise compute for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import zmq

from stanchion.core.errors import Overloaded, PeerLost
from stanchion.core.messages import (
    Abort,
    Drain,
    Greet,
    Start,
    ToWorker,
    decode_from_worker,
    encode,
)
from stanchion.core.outcome import Leaver
from stanchion.gateway.ledger import Ledger, Ticket

TICK_S = 0.2
SEND_QUEUE_MAX = 1024
BATCH_MAX = 512  # messages heard before other tasks get a turn
LINGER_MS = 200


class Link:
    def __init__(
        self, address: str, ledger: Ledger, in_flight_max: int, retry_after_s: float
    ) -> None:
        self.ledger = ledger
        self._in_flight_max = in_flight_max
        self._retry_after_s = retry_after_s
        self._owed: deque[Abort] = deque()  # at most one a request in flight
        self.changed = asyncio.Event()  # rings whenever something was heard or lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IMMEDIATE, 1)  # queue only for a worker that is there
        self._socket.set(zmq.SNDHWM, SEND_QUEUE_MAX)
        self._socket.set(zmq.RCVHWM, 0)  # read at once, and merged by request
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(address)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        descriptor = int(self._socket.get(zmq.FD))
        loop.add_reader(descriptor, self._hear)
        try:
            async with asyncio.TaskGroup() as group:
                tick = group.create_task(self._tick())
                try:
                    yield
                finally:
                    tick.cancel()
        finally:
            loop.remove_reader(descriptor)
            self._socket.close()
            self._context.term()

    # ---- towards the worker -----------------------------------------------------------------

    def room(self, wanted: int) -> None:
        """Raises unless so many requests may be started now."""
        if self.ledger.hello is None:
            raise PeerLost("the worker is not ready")
        if len(self.ledger) + wanted > self._in_flight_max:
            raise Overloaded(
                f"{len(self.ledger)} requests in flight, the bound is {self._in_flight_max}",
                self._retry_after_s,
            )

    def start(self, starts: Sequence[Start], ring: Callable[[], None]) -> list[Ticket]:
        """All of them, or none."""
        self.room(len(starts))
        tickets: list[Ticket] = []
        for start in starts:
            ticket = self.ledger.open(start.request, ring, self._now())
            if self._send(start):
                tickets.append(ticket)
                continue
            self.ledger.forget(ticket)
            for accepted in tickets:
                self.leave(accepted, "client")
            raise Overloaded("the worker's queue is full", self._retry_after_s)
        return tickets

    def leave(self, ticket: Ticket, by: Leaver) -> None:
        if self.ledger.leave(ticket, by):
            self._abort([ticket.request], by)

    def leave_all(self, by: Leaver) -> None:
        self._abort(self.ledger.leave_all(by), by)

    def drain(self) -> None:
        self._send(Drain())

    def worker_died(self, why: str = "the worker process ended") -> None:
        self.ledger.lose(why)
        self._owed.clear()
        self.changed.set()

    # ---- from the worker --------------------------------------------------------------------

    def _hear(self) -> None:
        if self._socket.closed:
            return  # called soon, and the end came sooner
        heard = 0
        while heard < BATCH_MAX:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            heard += 1
            try:
                message = decode_from_worker(frame)
            except msgspec.MsgspecError as error:
                self._lose(f"the worker said what is no message: {error}")
                continue
            self.ledger.hear(message, self._now())
        else:
            asyncio.get_running_loop().call_soon(self._hear)
        if heard:
            self.changed.set()

    # ---- time -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            if self.ledger.hello is None:
                self._send(Greet())
            self._pay()
            self._hear()  # the socket's descriptor tells edges only: never rely on it alone
            if why := self.ledger.overdue(self._now()):
                self._lose(why)
            await asyncio.sleep(TICK_S)

    def _lose(self, why: str) -> None:
        # It may be alive after all: it should not go on with requests that have ended here.
        self._abort(self.ledger.lose(why), "deadline")
        self.changed.set()

    def _abort(self, requests: Sequence[str], by: Leaver) -> None:
        self._owed.extend(Abort(request, by) for request in requests)
        self._pay()

    def _pay(self) -> None:
        while self._owed and self._send(self._owed[0]):
            self._owed.popleft()

    def _send(self, message: ToWorker) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may swallow the edge that announced a message: look for it.
        asyncio.get_running_loop().call_soon(self._hear)
        return True

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
