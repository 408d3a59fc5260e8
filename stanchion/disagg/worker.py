"""The worker process: one thread that hears messages, steps its side, and says what came of it.

It binds a ROUTER socket for gateways, and joins one by saying so until it is answered. Whoever sent
a request's Start gets its Tokens and its one Ended; all who greeted get Progress. A message that
does not parse is dropped with a line in the log: it must not stop other requests.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq

from stanchion.core.messages import (
    Abort,
    Drain,
    Drained,
    Ended,
    Flush,
    FromWorker,
    Greet,
    Hello,
    Join,
    Name,
    Progress,
    PromptScores,
    Quarantine,
    Refused,
    Start,
    Suspected,
    Tokens,
    decode_join_reply,
    decode_to_worker,
    encode,
)
from stanchion.core.outcome import Overloaded, Rejected
from stanchion.disagg.decode import DecodeSide
from stanchion.disagg.link import Link, Socket
from stanchion.disagg.prefill import PrefillSide
from stanchion.engine.condemn import condemn, flush
from stanchion.engine.loop import Engine

log = logging.getLogger(__name__)

PROGRESS_S = 0.25
JOIN_S = 2.0
ASK_S = 5.0  # unanswered for so long, a worker says so
IDLE_POLL_MS = 250
COPY_POLL_MS = 1  # while a copy between tiers is under way: somebody may wait for its end
COPIES_S = 5.0  # a worker that stops waits so long for what is still on its way to a disk
OPEN_POLL_MS = 20  # while a handoff is open: its deadline may pass
HEARD_MAX = 256  # messages taken in between two steps


class Side(Protocol):
    """What the process runs: an engine, and its part in handoffs."""

    engine: Engine

    @property
    def open(self) -> int: ...
    @property
    def pages_held(self) -> int: ...
    def step(self, heard: list[Start | Abort], now: float) -> list[FromWorker]: ...


@dataclass
class UnifiedSide:
    """Prefill and decode in one: nothing to hand over."""

    engine: Engine
    open: int = 0
    pages_held: int = 0

    def step(self, heard: list[Start | Abort], now: float) -> list[FromWorker]:
        return self.engine.step(heard)


@dataclass
class Joining:
    """Says Join on the gateway's join socket, so that a gateway that starts later learns of us."""

    socket: Socket
    join: Join
    address: str
    said_at: float | None = None
    first_said_at: float | None = None
    answered: bool = False
    refused: list[str] = field(default_factory=list)

    def turn(self, now: float) -> None:
        if self.said_at is None or now - self.said_at >= JOIN_S:
            self.first_said_at = self.first_said_at or now
            if not self.answered and self.said_at is not None and now - self.first_said_at > ASK_S:
                self.first_said_at = now
                log.warning(
                    "no answer from %s: is the gateway there, and has it the same peer key?",
                    self.address,
                )
            self.said_at = now
            try:
                self.socket.send(encode(self.join), zmq.NOBLOCK)
            except zmq.Again:
                return  # nobody is there yet
        while True:
            try:
                reply = decode_join_reply(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.MsgspecError as error:
                log.error("the join socket answers what is no message: %s", error)
                continue
            self.answered = True
            if isinstance(reply, Refused):
                self.refused = reply.differences


@dataclass
class Worker:
    """`parent` is the process whose end is ours, 0 for none."""

    side: Side
    hello: Hello
    socket: Socket
    joining: Joining | None
    link: Link | None
    parent: int
    owners: dict[str, bytes] = field(default_factory=dict)
    gateways: dict[bytes, None] = field(default_factory=dict)
    draining: bool = False
    stopping: bool = False
    busy_s: float = 0.0
    _said_progress: float = 0.0
    _stopped_at: float = 0.0
    _said_drained: bool = False

    def run(self) -> list[str]:
        """Serve until told to stop and nothing is left to do. Return why it was refused, if so."""
        engine = self.side.engine
        while not self._over():
            now = time.monotonic()
            if self.joining is not None:
                self.joining.turn(now)
                if self.joining.refused:
                    return self.joining.refused
            heard = self._hear()
            if self.link is not None:
                self.link.hear(time.monotonic())
            flew, started = engine.flight is not None, time.monotonic()
            for message in self.side.step(heard, started):
                self._say(message)
            if self.link is not None:
                self.link.say()
            now = time.monotonic()
            if flew or engine.flight is not None or heard:
                self.busy_s += now - started
            if now - self._said_progress >= PROGRESS_S:
                self._said_progress = now
                self._tell_all(self.progress())
            if self.draining and not self._working() and not self._said_drained:
                # It does not end by itself: what it said last may still be on its way, and a
                # process seen to end before that looks like one that took it along.
                self._said_drained = True
                self._tell_all(Drained())
        return []

    def stop(self, *_: object) -> None:
        """Asked for by a signal. What is accepted is finished; gateways learn of it at once."""
        self.stopping, self._stopped_at = True, time.monotonic()
        self._drain(True)
        self._said_progress = 0.0

    def _drain(self, draining: bool) -> None:
        self.draining, self._said_drained = draining, False
        if isinstance(self.side, PrefillSide):
            self.side.draining = draining

    def _over(self) -> bool:
        if self.parent and os.getppid() != self.parent:
            return True
        if not self.stopping or self._working():
            return False
        return not self.side.engine.copies or time.monotonic() - self._stopped_at > COPIES_S

    def _working(self) -> bool:
        waits = self.side.open if isinstance(self.side, PrefillSide) else 0
        return self.side.engine.working or bool(waits)

    def progress(self) -> Progress:
        side, engine, counts = self.side, self.side.engine, self.side.engine.counters
        return Progress(
            steps=counts.steps,
            prefill_tokens=counts.prefill_tokens,
            decode_tokens=counts.decode_tokens,
            cached_tokens=counts.cached_tokens,
            running=len(engine.running),
            waiting=len(engine.waiting),
            pages=engine.pool.size - 1,
            pages_free=engine.pool.available,
            pages_cached=engine.tree.pages,
            preempted=counts.preempted,
            suspect=counts.suspect,
            verify_steps=counts.verify_steps,
            proposed=counts.proposed,
            accepted=counts.accepted,
            busy_s=self.busy_s,
            handoffs=side.open,
            pages_handoff=side.pages_held,
            pages_quarantined=engine.pool.quarantined,
            kv_bytes_sent=side.bytes_sent if isinstance(side, PrefillSide) else 0,
            deadlines=side.deadlines if isinstance(side, DecodeSide) else 0,
            draining=self.draining or self.stopping,
            quarantines=counts.quarantines,
            pages_dropped=counts.pages_dropped,
            tiers=None if engine.tiered is None else engine.tiered.tiers.progress(),
        )

    def _hear(self) -> list[Start | Abort]:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        if self.joining is not None:
            poller.register(self.joining.socket, zmq.POLLIN)
        if self.link is not None:
            self.link.register(poller)
        idle_ms = OPEN_POLL_MS if self.side.open else IDLE_POLL_MS
        if self.side.engine.copies:
            idle_ms = COPY_POLL_MS
        poller.poll(0 if self.side.engine.flight is not None else idle_ms)
        heard: list[Start | Abort] = []
        while len(heard) < HEARD_MAX:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return heard
            if len(parts) != 2:
                log.error("a message of %d frames: dropped", len(parts))
                continue
            message = self._take(*parts)
            if message is not None:
                heard.append(message)
        return heard

    def _take(self, peer: bytes, frame: bytes) -> Start | Abort | None:
        try:
            message = decode_to_worker(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            log.error("a message of %d bytes does not parse: %s", len(frame), error)
            self._refuse(peer, frame)
            return None
        match message:
            case Greet():
                if peer not in self.gateways and not self.stopping:
                    self._drain(False)  # another gateway, that wants us: the one before is gone
                self.gateways[peer] = None
                self._send(peer, self.hello)
                self._send(peer, self.progress())
            case Drain():
                self._drain(True)
            case Quarantine():
                condemn(self.side.engine, message)
            case Flush():
                flush(self.side.engine)
            case Start() if message.request in self.owners:
                log.error("a second request has the name of one that is running: dropped")
            case Start() if self.draining or self.stopping:
                refused = Overloaded("this worker is draining", 1.0)
                self._send(peer, Ended(request=message.request, outcome=refused))
            case Start():
                self.owners[message.request] = peer
                return message
            case Abort():
                return message
        return None

    def _refuse(self, peer: bytes, frame: bytes) -> None:
        """End the request of a Start that does not parse, if it can be named: somebody waits."""
        try:
            said = msgspec.msgpack.decode(frame, type=dict[str, msgspec.Raw])
            name = msgspec.msgpack.decode(said["request"], type=Name)
        except (msgspec.DecodeError, KeyError):
            return
        if name not in self.owners:
            outcome = Rejected("request", "the engine cannot read this request")
            self._send(peer, Ended(request=name, outcome=outcome))

    def _say(self, message: FromWorker) -> None:
        if isinstance(message, Suspected):
            self._tell_all(message)
            return
        assert isinstance(message, Tokens | PromptScores | Ended)
        owner = self.owners[message.request]
        if isinstance(message, Ended):
            del self.owners[message.request]
        self._send(owner, message)

    def _tell_all(self, message: FromWorker) -> None:
        for gateway in list(self.gateways):
            self._send(gateway, message)

    def _send(self, peer: bytes, message: FromWorker) -> None:
        try:
            self.socket.send_multipart((peer, encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.gateways.pop(peer, None)  # it is gone, and a successor has another identity


def serve(worker: Worker) -> list[str]:
    """Serve until SIGTERM or the end of the parent, which may have come while the model loaded."""
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent drains first
    return worker.run()
