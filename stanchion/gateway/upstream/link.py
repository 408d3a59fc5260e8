"""The connection to one foreign server: what `Link` is to a worker of ours, over HTTP.

Promises: every request that was taken ends exactly once, as one of the outcomes; its connection is
closed when nobody wants the answer any more, which is how these servers hear of it; any byte from
the server is a sign of life. Each request is a task of the group that it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import assert_never

from stanchion.core.messages import Drained, Ended, Hello, Order, Progress, Start, Tokens
from stanchion.core.outcome import Cancelled, Completed, Leaver, PeerLost, Rejected
from stanchion.gateway.connection import Signal
from stanchion.gateway.ledger import Ledger, Ticket
from stanchion.gateway.link import Ears
from stanchion.gateway.router import Life
from stanchion.gateway.upstream.client import Server
from stanchion.gateway.upstream.events import DONE
from stanchion.gateway.upstream.sglang import Sglang
from stanchion.gateway.upstream.text import Text
from stanchion.gateway.upstream.vllm import Vllm
from stanchion.gateway.upstream.wire import (
    Asked,
    Load,
    Message,
    Wrong,
    line_bytes_max,
    whole_bytes_max,
)

Wire = Vllm | Sglang | Text
HANDED_BYTES = 2**22  # what a prefill server says of a prompt's KV
ABORT_BYTES = 2**16
ABORT_S = 5.0  # the connection was closed before that: it is told twice


@dataclass(frozen=True)
class Side:
    """One server, as its partners need it."""

    life: Life
    server: Server
    host: str
    bootstrap_port: int | None = None


@dataclass
class _Counts:
    events: int = 0
    tokens: int = 0
    load: Load = field(default_factory=Load)
    draining: bool = False


class UpstreamLink:
    """`sides`: of all servers that are there now, by name; a pair's other side is found in it."""

    def __init__(
        self,
        hello: Hello,
        wire: Wire,
        side: Side,
        sides: dict[str, Side],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._hello = hello
        self.wire = wire
        self._side = side
        self._sides = sides
        self._group = tasks
        self._running: dict[str, asyncio.Task[None]] = {}
        self._aborted: dict[str, Leaver] = {}  # of those that run
        self._counts = _Counts()
        self._fresh = True  # something was heard since the last tick
        self._counted = False  # it says acceptance

    def attach(self, ledger: Ledger, ears: Ears) -> UpstreamLink:
        """It is in the fleet from now on, in place of the life before."""
        self.ledger = ledger
        self._ears = ears
        self._sides[self._hello.name] = self._side
        ledger.hear(self._hello, self._now())
        return self

    @property
    def health(self) -> str:
        return "/v1/models" if isinstance(self.wire, Text) else "/health"

    @property
    def signals(self) -> Collection[Signal]:
        last: tuple[Signal, ...] = ("final_acceptance",) if self._counted else ()
        return (*self.wire.signals, *last)

    @property
    def lost(self) -> bool:
        return self.ledger.hello is None

    def close(self) -> None:
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()

    # ---- towards the server -----------------------------------------------------------------

    def start(self, start: Start, ticket: Ticket) -> bool:
        if self.lost or self._counts.draining:
            return False
        self.ledger.open(ticket, self._now())
        tasks = self._group
        task = tasks.create_task(self._run(start, ticket.used))
        self._running[start.request] = task
        task.add_done_callback(lambda done: self._over(start.request, done))
        return True

    def leave(self, ticket: Ticket, by: Leaver) -> None:
        if self.ledger.leave(ticket, by):
            self.abort([ticket.request], by)

    def leave_all(self, by: Leaver) -> None:
        self.abort(self.ledger.leave_all(by), by)

    def abort(self, requests: Sequence[str], by: Leaver) -> None:
        for request in requests:
            if (task := self._running.get(request)) is not None:
                self._aborted[request] = by
                task.cancel()
                if (asked := self.wire.abort(request)) is not None:
                    tasks = self._group
                    tasks.create_task(self._tell(asked))

    def drain(self) -> None:
        self._counts.draining = self._fresh = True
        self.tick()

    def tell(self, order: Order) -> None:
        """There is no word for it there: fresh salts keep what was wrong out of use."""

    def lose(self, why: str) -> None:
        if self.lost:
            return
        self.close()
        self.ledger.lose(why)
        self._ears.lost()

    # ---- from the server --------------------------------------------------------------------

    def hear(self) -> None:
        """Nothing waits to be read: each request's task reads its own connection."""

    def looked(self, load: Load | None) -> None:
        """It answered. `load`: what it says of itself now; None: not asked this time."""
        self._fresh = True
        if load is not None:
            self._counts.load = load

    def tick(self) -> None:
        if self.lost:
            return
        if self._fresh:
            self._fresh = False
            self.ledger.hear(self._progress(), self._now())
            if self._counts.draining and not self._running:
                self.ledger.hear(Drained(), self._now())
        if why := self.ledger.overdue(self._now()):
            self.lose(why)

    def _progress(self) -> Progress:
        load, pages = self._counts.load, self._counts.load.pages
        return Progress(
            steps=self._counts.events,
            prefill_tokens=load.prefill_tokens,
            decode_tokens=self._counts.tokens,
            cached_tokens=load.cached_tokens,
            running=max(load.running, len(self._running)),
            waiting=load.waiting,
            pages=pages,
            pages_free=pages - round(load.used * pages),
            pages_cached=0,
            preempted=load.preempted,
            suspect=0,
            verify_steps=load.verify_steps,
            proposed=load.proposed,
            accepted=load.accepted,
            busy_s=0.0,
            draining=self._counts.draining,
        )

    def _say(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self._counts.tokens += len(message.tokens)
            self._counted = self._counted or message.spec is not None
        self.ledger.hear(message, self._now())

    def _over(self, request: str, task: asyncio.Task[None]) -> None:
        """The task has ended, in whatever way."""
        by = self._aborted.pop(request, "deadline")
        if self._running.pop(request, None) is None:
            return  # the server was lost: that has ended it
        if task.cancelled():
            self.ledger.hear(Ended(request=request, outcome=Cancelled(by)), self._now())
        self._fresh = True
        self._ears.changed()

    # ---- one request ------------------------------------------------------------------------

    async def _run(self, start: Start, used: Collection[Life]) -> None:
        try:
            await self._attempt(start, used)
        except Wrong as wrong:
            self._say(Ended(request=start.request, outcome=wrong.outcome))

    async def _tell(self, asked: Asked) -> None:
        with suppress(Wrong):  # it was told already, by the end of the connection
            await self._side.server.whole(asked, ABORT_BYTES, ABORT_S)

    async def _attempt(self, start: Start, used: Collection[Life]) -> None:
        one = start.sampling
        if start.grammar is not None:
            said = "structured output, forced and strict tools are not handed to other engines yet"
            raise Wrong(Rejected("response_format", said))
        if start.said and (one.presence_penalty or one.frequency_penalty):
            raise Wrong(Rejected("presence_penalty", "an answer with it cannot be resumed there"))
        scores = one.prompt_logprobs is not None
        if start.sampling.max_tokens == 0 and not scores:
            self._say(Ended(request=start.request, outcome=Completed("length")))
        elif start.prefill is None:
            await self._alone(self._side, start, scores)
        else:
            await self._paired(self._partner(start), start, scores, used)

    def _partner(self, start: Start) -> Side:
        assert start.prefill is not None
        side = self._sides.get(start.prefill.name)
        if side is None or side.life != (start.prefill.name, start.prefill.incarnation):
            raise Wrong(PeerLost(f"the prefill server {start.prefill.name} was lost"))
        return side

    async def _alone(self, side: Side, start: Start, scores: bool) -> None:
        if not scores:
            await self._stream(self.wire.ask(start), start)
            return
        raw = await side.server.whole(self.wire.score(start), whole_bytes_max(start))
        self._say_all(self.wire.scored(start, raw))

    async def _paired(
        self, prefill: Side, start: Start, scores: bool, used: Collection[Life]
    ) -> None:
        match self.wire:
            case Vllm() as vllm if scores:
                # Either side can do it alone; a witness is to be one that did not answer.
                fresh = self._side if self._side.life not in used else prefill
                await self._alone(fresh, start, scores)
            case Vllm() as vllm:
                handed = await prefill.server.whole(vllm.prefill(start), HANDED_BYTES)
                await self._stream(vllm.decode(start, handed), start)
            case Sglang() as sglang if scores and prefill.life in used:
                why = "in a pair the prefill server alone gives them"
                raise Wrong(Rejected("prompt_logprobs", why))
            case Sglang() as sglang:
                await self._meeting(sglang, prefill, start, scores)
            case Text():
                raise Wrong(PeerLost("servers that take text make no pairs"))
            case _:
                assert_never(self.wire)

    async def _meeting(self, sglang: Sglang, prefill: Side, start: Start, scores: bool) -> None:
        """Both sides are asked at once; when one fails the other is left."""
        plain = sglang.score(start) if scores else sglang.ask(start)
        asked = sglang.met(plain, start, prefill.host, prefill.bootstrap_port)
        first = Asked(asked.path, {**(asked.body or {}), "stream": False})
        most = whole_bytes_max(start)
        try:
            async with asyncio.TaskGroup() as group:
                computed = group.create_task(prefill.server.whole(first, most))
                if scores:
                    raw = await self._side.server.whole(asked, most)
                    self._say_all(sglang.scored_pair(start, await computed, raw))
                else:
                    await self._stream(asked, start)
                    computed.cancel()
        except BaseExceptionGroup as errors:
            raise only(errors) from None

    async def _stream(self, asked: Asked, start: Start) -> None:
        reader = self.wire.reader(start)
        most = line_bytes_max(start)
        async with aclosing(self._side.server.events(asked, most)) as events:
            async for event in events:
                self._counts.events += 1
                self._fresh = True
                if event == DONE:
                    self._say_all(reader.end())
                    return
                self._say_all(reader.read(event))
        raise Wrong(PeerLost("the answer broke off: its end mark is missing"))

    def _say_all(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._say(message)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def only(error: BaseException) -> BaseException:
    """The first of those that a group wraps."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
