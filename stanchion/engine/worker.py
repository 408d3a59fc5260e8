"""The engine process: one thread that hears messages, steps the engine, and says what came of it.

It binds a ROUTER socket. Whoever sent a request's Start gets its Tokens and its one Ended; all who
greeted get Progress. A message that does not parse is dropped with a line in the log: the peer is
ours, so it is a fault of ours, but it must not stop other requests.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from stanchion.core.messages import (
    Abort,
    Drain,
    Drained,
    Ended,
    FromWorker,
    Greet,
    Hello,
    Name,
    Progress,
    PromptScores,
    Start,
    Tokens,
    decode_to_worker,
    encode,
)
from stanchion.core.outcome import Overloaded, Rejected
from stanchion.engine.loop import Engine

log = logging.getLogger(__name__)

PROGRESS_S = 0.25
IDLE_POLL_MS = 250
HEARD_MAX = 256  # messages taken in between two steps


@dataclass
class Worker:
    """`parent` is the process whose end is ours: nobody keeps a worker that nobody can reach."""

    engine: Engine
    hello: Hello
    socket: zmq.Socket[bytes]
    parent: int
    owners: dict[str, bytes] = field(default_factory=dict)
    peers: dict[bytes, None] = field(default_factory=dict)
    draining: bool = False
    stopping: bool = False
    busy_s: float = 0.0
    _said_progress: float = 0.0
    _said_drained: bool = False

    def run(self) -> None:
        """Serve until told to stop and nothing is left to do."""
        while not (self.stopping and not self.engine.busy) and os.getppid() == self.parent:
            heard = self._hear()
            started = time.monotonic()
            busy = self.engine.busy or bool(heard)
            said = self.engine.step(heard) if busy else []
            now = time.monotonic()
            self.busy_s += (now - started) if busy else 0.0
            for message in said:
                self._say(message)
            if now - self._said_progress >= PROGRESS_S:
                self._said_progress = now
                self._tell_all(self.progress())
            if self.draining and not self.engine.busy and not self._said_drained:
                # It does not end by itself: what it said last may still be on its way, and a
                # process seen to end before that looks like one that took it along.
                self._said_drained = True
                self._tell_all(Drained())

    def stop(self, *_: object) -> None:
        self.stopping = True

    def progress(self) -> Progress:
        engine, counts = self.engine, self.engine.counters
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
        )

    def _hear(self) -> list[Start | Abort]:
        heard: list[Start | Abort] = []
        if not self.socket.poll(0 if self.engine.busy else IDLE_POLL_MS):
            return heard
        while len(heard) < HEARD_MAX:
            try:
                peer, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return heard
            message = self._take(peer, frame)
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
                self.peers[peer] = None
                self._send(peer, self.hello)
                self._send(peer, self.progress())
            case Drain():
                self.draining = True
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
        assert isinstance(message, Tokens | PromptScores | Ended)
        owner = self.owners[message.request]
        if isinstance(message, Ended):
            del self.owners[message.request]
        self._send(owner, message)

    def _tell_all(self, message: FromWorker) -> None:
        for peer in self.peers:
            self._send(peer, message)

    def _send(self, peer: bytes, message: FromWorker) -> None:
        self.socket.send_multipart((peer, encode(message)))


def serve(engine: Engine, hello: Hello, bind: str, parent: int) -> None:
    """Bind `bind` (ipc:// or tcp:// on loopback) and serve until SIGTERM or the end of `parent`,
    which may have come while the model was loading."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    # A ROUTER drops frames beyond its mark without a word. What may queue is bounded by what was
    # accepted: at most one frame a token of each request, so there is no mark.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.bind(bind)
    worker = Worker(engine, hello, socket, parent)
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent drains first
    try:
        worker.run()
    finally:
        socket.close()
        context.term()
