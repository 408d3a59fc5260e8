"""A worker that follows a script: the other end of the wire, written a second time.

It speaks the real messages over a real ROUTER in a thread. What a request gets is a `plan`: a list
of messages and of gates (`threading.Event`); nothing after a gate is sent before it is set.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from stanchion.core.messages import (
    Abort,
    Drain,
    Drained,
    Ended,
    Flush,
    Greet,
    Hello,
    Join,
    Progress,
    Quarantine,
    Refused,
    Role,
    Spec,
    Start,
    Tokens,
    TopToken,
    Welcome,
    decode_join_reply,
    decode_to_worker,
    encode,
)
from stanchion.core.outcome import Cancelled, Completed
from stanchion.core.peerkey import connect_with, serve_with

EOS = 256
VOCABULARY = 272
POLL_MS = 2
PROGRESS_S = 0.1
JOIN_S = 0.1  # until it is answered; then every two seconds, as real ones do
JOIN_AGAIN_S = 2.0
WAIT_S = 10.0

LENGTH = Completed("length")
Plan = Sequence[Any]
HELLO = Hello(
    name="both-0",
    role="both",
    incarnation=1,
    pid=0,
    peer_address="",
    identity={"model": "hashed", "revision": "1", "schema": "s"},
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


def named(name: str, incarnation: int = 1, **changed: Any) -> Hello:
    """The Hello of a worker whose role is in its name: "prefill-1"."""
    role: Role = name.split("-")[0]  # type: ignore[assignment]
    peer = f"ipc:///nowhere/{name}" if role == "prefill" else ""
    changes = {"name": name, "role": role, "incarnation": incarnation, "peer_address": peer}
    return msgspec.structs.replace(HELLO, **changes | changed)


@dataclass
class FakeWorker:
    """`address` is where it listens; `join` is where it joins: beside it, unless told."""

    address: str
    hello: Hello = HELLO
    join: str = ""
    key: str = ""
    plan: Callable[[Start], Plan] = field(default_factory=lambda: answer("Hello there"))
    starts: list[Start] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    orders: list[Quarantine | Flush] = field(default_factory=list)
    spoke: Counter[str] = field(default_factory=Counter)  # tokens said, by attempt
    counters: dict[str, int] = field(default_factory=dict)  # what Progress says instead
    drains: int = 0
    silent: bool = False  # says no Progress
    frozen: bool = False  # its counters stand still
    deaf: bool = False  # does not answer to Abort
    forgets: bool = False  # says that it holds nothing
    extra: deque[Any] = field(default_factory=deque)  # messages to say out of turn

    joins_as: Hello | None = None  # who it says it is when it joins, if that is not `hello`
    hung: bool = False  # hears and says nothing at all
    joins: list[Welcome | Refused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.join = self.join or self.address.rpartition("/")[0] + "/join"
        self._running: dict[str, deque[Any]] = {}
        self._stop = threading.Event()
        self._heard = threading.Condition()
        self._steps = 0
        self._join_due = 0.0
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
        with (
            zmq.Context() as context,
            context.socket(zmq.ROUTER) as socket,
            context.socket(zmq.DEALER) as joining,
        ):
            for one in (socket, joining):
                one.set(zmq.LINGER, 0)
                one.set(zmq.SNDHWM, 0)
            serve_with(socket, self.key)
            socket.bind(self.address)
            joining.set(zmq.RECONNECT_IVL, 20)
            connect_with(joining, self.key)
            joining.connect(self.join)
            peer, due = b"", 0.0
            while not self._stop.is_set():
                if self.hung:
                    self._stop.wait(POLL_MS / 1000)
                    continue
                self._keep_joining(joining)
                while socket.poll(POLL_MS):
                    peer, frame = socket.recv_multipart()
                    self._hear(decode_to_worker(frame), lambda m, p=peer: self._to(socket, p, m))
                    self._follow(lambda m, p=peer: self._to(socket, p, m))
                if peer:
                    self._follow(lambda m, p=peer: self._to(socket, p, m))
                    if not self.silent and time.monotonic() > due:
                        due = time.monotonic() + PROGRESS_S
                        self._to(socket, peer, self._progress())

    def _keep_joining(self, joining: Any) -> None:
        while joining.poll(0):
            with self._heard:
                self.joins.append(decode_join_reply(joining.recv()))
                self._heard.notify_all()
        if time.monotonic() >= self._join_due:
            with suppress(zmq.Again):  # nobody is there yet, or nobody with our key
                joining.send(encode(Join(self.address, self.joins_as or self.hello)), zmq.NOBLOCK)
            self._join_due = time.monotonic() + (JOIN_AGAIN_S if self.joins else JOIN_S)

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
                case Quarantine() | Flush():
                    self.orders.append(message)
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
                if isinstance(message, Tokens):
                    self.spoke[request] += len(message.tokens)
                if isinstance(message, Ended):
                    with self._heard:
                        del self._running[request]
                        self._heard.notify_all()
                    break

    def _progress(self) -> Progress:
        self._steps += not self.frozen
        running = 0 if self.forgets else len(self._running)
        said = Progress(
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
            handoffs=3,
            pages_handoff=4,
            pages_quarantined=5,
            kv_bytes_sent=6,
            deadlines=7,
        )
        return msgspec.structs.replace(said, **self.counters)
