"""A worker that follows a script: the other end of the wire, written a second time.

It speaks the real messages over a real ROUTER in a thread. What a request gets is a `plan`: a list
of messages and of gates (`threading.Event`); nothing after a gate is sent before it is set.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from stanchion.core.messages import (
    Abort,
    Drain,
    Drained,
    Ended,
    Greet,
    Hello,
    Progress,
    Spec,
    Start,
    Tokens,
    TopToken,
    decode_to_worker,
    encode,
)
from stanchion.core.outcome import Cancelled, Completed

EOS = 256
VOCABULARY = 272
POLL_MS = 2
PROGRESS_S = 0.1
WAIT_S = 10.0

LENGTH = Completed("length")
Plan = Sequence[Any]
HELLO = Hello(
    model="hashed",
    revision="1",
    schema="s",
    page_tokens=64,
    pages=1024,
    context_max=8192,
    vocabulary=VOCABULARY,
    draft_tokens=3,
    eos_ids=(EOS,),
    failpoints=(),
)


def say(start: Start, tokens: Sequence[int] | str, **more: Any) -> Tokens:
    ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
    k = start.sampling.logprobs
    top = None
    if k is not None:
        top = [[TopToken((i + j) % VOCABULARY, -0.5 - j) for j in range(k)] for i in ids]
    given = {"logprobs": [-0.5 for _ in ids], "top": top} | more
    return Tokens(request=start.request, tokens=ids, **given)


def end(start: Start, outcome: Any = LENGTH, **more: Any) -> Ended:
    return Ended(request=start.request, outcome=outcome, **more)


def answer(text: str, batch: int = 1, **more: Any) -> Callable[[Start], Plan]:
    """The text's bytes in batches, an end token, and the end."""

    def plan(start: Start) -> Plan:
        ids = [*text.encode(), EOS]
        cut = [ids[at : at + batch] for at in range(0, len(ids), batch)]
        return [*(say(start, part, **more) for part in cut), end(start, Completed("stop"), **more)]

    return plan


SPEC = Spec(verify_steps=4, tokens=10, proposed=12, accepted=6)


@dataclass
class FakeWorker:
    address: str
    hello: Hello = HELLO
    plan: Callable[[Start], Plan] = field(default_factory=lambda: answer("Hello there"))
    starts: list[Start] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    drains: int = 0
    silent: bool = False  # says no Progress
    frozen: bool = False  # its counters stand still
    deaf: bool = False  # does not answer to Abort
    forgets: bool = False  # says that it holds nothing
    extra: deque[Any] = field(default_factory=deque)  # messages to say out of turn

    def __post_init__(self) -> None:
        self._running: dict[str, deque[Any]] = {}
        self._stop = threading.Event()
        self._heard = threading.Condition()
        self._steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeWorker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def reset(self) -> None:
        assert self.wait_for(lambda: not self._running), "a request is still running"
        self.plan = answer("Hello there")
        self.starts, self.aborts = [], []
        self.silent = self.frozen = self.deaf = False

    def wait_for(self, met: Callable[[], bool]) -> bool:
        with self._heard:
            return self._heard.wait_for(met, WAIT_S)

    def aborted(self, by: str, count: int = 1) -> bool:
        return self.wait_for(lambda: [abort.by for abort in self.aborts] == [by] * count)

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, 0)
            socket.bind(self.address)
            peer, due = b"", 0.0
            while not self._stop.is_set():
                while socket.poll(POLL_MS):
                    peer, frame = socket.recv_multipart()
                    self._hear(decode_to_worker(frame), lambda m, p=peer: self._to(socket, p, m))
                    self._follow(lambda m, p=peer: self._to(socket, p, m))
                if peer:
                    self._follow(lambda m, p=peer: self._to(socket, p, m))
                    if not self.silent and time.monotonic() > due:
                        due = time.monotonic() + PROGRESS_S
                        self._to(socket, peer, self._progress())

    @staticmethod
    def _to(socket: Any, peer: bytes, message: Any) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        socket.send_multipart([peer, frame])

    def _hear(self, message: Any, send: Callable[[Any], None]) -> None:
        with self._heard:
            match message:
                case Greet():
                    send(self.hello)
                    if not self.silent:
                        send(self._progress())
                case Start():
                    self.starts.append(message)
                    self._running[message.request] = deque(self.plan(message))
                case Abort():
                    self.aborts.append(message)
                    if not self.deaf and self._running.pop(message.request, None) is not None:
                        send(Ended(request=message.request, outcome=Cancelled(message.by)))
                case Drain():
                    self.drains += 1
                    send(Drained())
            self._heard.notify_all()

    def _follow(self, send: Callable[[Any], None]) -> None:
        while self.extra:
            send(self.extra.popleft())
        for request, steps in list(self._running.items()):
            while steps:
                if isinstance(steps[0], threading.Event):
                    if not steps[0].is_set():
                        break
                    steps.popleft()
                    continue
                send(message := steps.popleft())
                if isinstance(message, Ended):
                    with self._heard:
                        del self._running[request]
                        self._heard.notify_all()
                    break

    def _progress(self) -> Progress:
        self._steps += not self.frozen
        running = 0 if self.forgets else len(self._running)
        return Progress(
            steps=self._steps,
            prefill_tokens=0,
            decode_tokens=0,
            cached_tokens=0,
            running=running,
            waiting=0,
            pages=1024,
            pages_free=1000,
            pages_cached=10,
            preempted=2,
            suspect=1,
            verify_steps=10,
            proposed=30,
            accepted=20,
            busy_s=1.5,
        )
