"""All workers as one: who has joined, who gets a request, and what happens when one is lost.

Promises: a request that was accepted has one reader's `Ticket` and ends there exactly once; an
attempt that failed before a word was said is made once more elsewhere, and its reader notices
nothing; a request holds its permits until the worker that has it says that it ended, or is lost;
a prefill worker that falls silent holds up nobody who can be served by another one.

Does not know processes: whoever starts them (`Supervise`) tells what ended, and is told whom a
worker suspects.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import zmq
from msgspec.structs import replace

from stanchion.core.errors import Overloaded, PeerLost
from stanchion.core.messages import Hello, Partner, Role, Start, Suspected
from stanchion.core.outcome import Leaver, Outcome, OutputSuspect
from stanchion.core.outcome import PeerLost as Lost
from stanchion.gateway import journal
from stanchion.gateway.integrity import Integrity
from stanchion.gateway.join import JoinSocket
from stanchion.gateway.ledger import Ticket
from stanchion.gateway.link import Ears
from stanchion.gateway.members import Connect, Member, Members, View
from stanchion.gateway.router import Life, Route, Router, reason_to_retry
from stanchion.gateway.settings import GatewaySettings

TICK_S = 0.1
LAST_WORDS_S = 0.1  # what a worker said before its end may still be on its way here
NOWHERE = Route(("", 0))


@dataclass
class _Held:
    """An accepted request: what was asked, who reads it, who has it now."""

    start: Start
    ticket: Ticket
    route: Route
    retried: bool = False
    used: tuple[Life, ...] = ()  # not these alone


class Fleet:
    def __init__(self, settings: GatewaySettings, join: str) -> None:
        self._settings = settings
        self._address = join
        self._router = Router(settings.suspect_s)
        self.changed = asyncio.Event()  # rings whenever something was heard or lost
        ears = Ears(self.changed.set, self._suspected, self._lost)
        self._members = Members(settings, ears, self._freed)
        self._join = JoinSocket(self._members.admit)
        self._held: dict[str, _Held] = {}  # by the name of the attempt that counts
        self._expected: tuple[str, ...] = ()
        self.retries: Counter[str] = Counter()
        self.suspicions = 0
        self.on_suspected: Callable[[Suspected], None] = lambda said: None
        self.integrity = Integrity(settings, self, lambda: asyncio.get_running_loop().time())
        self._draining = False
        self.failed = ""  # why there will be no more workers

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raise ConfigError if the join socket cannot be bound."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._members.open(context)
        try:
            self._join.open(context, self._address, self._settings.peer_key)
            try:
                async with asyncio.TaskGroup() as group:
                    tick = group.create_task(self._tick())
                    try:
                        yield
                    finally:
                        tick.cancel()
            finally:
                self._join.close()
                self._members.close()
        finally:
            context.term()

    # ---- what the API asks ------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(member.link.ledger) for member in self._members)

    @property
    def hello(self) -> Hello | None:
        """What is served: the least of what any of the workers can take. None if none is."""
        able = [one.hello for one in self._able()]
        if not any(hello.role == "decode" for hello in able):  # then nobody asks prefill workers
            able = [hello for hello in able if hello.role != "prefill"]
        if not able or self._choose() is None:
            return None
        least = min(able, key=lambda hello: hello.pages)
        return replace(least, context_max=min(hello.context_max for hello in able))

    @property
    def failpoints(self) -> list[str]:
        """Armed in any worker."""
        members = self._members
        return list(dict.fromkeys(name for one in members for name in one.hello.failpoints))

    def room(self, wanted: int) -> None:
        """Raise unless so many requests may be started now."""
        if self._choose() is None:
            for member in self._members:
                member.link.hear()  # if this loop was held up, signs of life wait to be read
            if self._choose() is None:
                raise PeerLost("no worker is ready")
        bound = self._settings.in_flight_max
        if len(self) + wanted > bound:
            raise Overloaded(
                f"{len(self)} requests in flight, the bound is {bound}",
                self._settings.retry_after_s,
            )

    def start(self, starts: Sequence[Start], ring: Callable[[], None]) -> list[Ticket]:
        """All of them, or none."""
        self.room(len(starts))
        tickets: list[Ticket] = []
        for start in starts:
            held = self._hold(start, ring)
            try:
                self._dispatch(held, start.request)
            except (PeerLost, Overloaded):
                for accepted in tickets:
                    self.leave(accepted, "client")
                raise
            tickets.append(held.ticket)
        return tickets

    def elsewhere(self, start: Start, ring: Callable[[], None], used: Collection[Life]) -> Ticket:
        """By a route that has at least one life that is not `used`. Raise PeerLost or Overloaded
        if there is none."""
        if self._draining:
            raise PeerLost("the workers take nothing new")
        held = self._hold(start, ring)
        held.used = held.ticket.used = tuple(used)
        self._dispatch(held, start.request, used, another=True)
        return held.ticket

    def leave(self, ticket: Ticket, by: Leaver) -> None:
        held = self._held.get(ticket.request)
        if held is not None and (member := self._members.alive(held.route.worker)) is not None:
            member.link.leave(ticket, by)

    def leave_all(self, by: Leaver) -> None:
        for member in self._members:
            member.link.leave_all(by)

    def drain(self) -> None:
        """The workers take nothing new. Prefill workers are told once nothing is in flight: what
        was accepted may still be on its way to them."""
        self._draining = True
        for member in self._members:
            if member.hello.role != "prefill":
                member.link.drain()

    def drain_worker(self, name: str) -> Role | None:
        """Give it nothing new; what it has, it ends. Its role, or None if there is no such worker.
        A prefill worker is not told: what was accepted may still be on its way to it."""
        member = self._members.named(name)
        if member is None:
            return None
        if member.hello.role != "prefill":
            member.link.drain()
        return member.hello.role

    def drain_prefill(self) -> None:
        for member in self._members:
            if member.hello.role == "prefill":
                member.link.drain()

    # ---- what is told of it -----------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """All that were asked for have said hello, and requests can be served."""
        here = {member.hello.name for member in self._able()}
        return here.issuperset(self._expected) and self._choose() is not None

    def troubles(self, now: float) -> list[str]:
        """All that is missing or wrong, whether or not requests can be served."""
        missing = [name for name in self._expected if self._members.named(name) is None]
        found = [f"{name} has not joined" for name in missing]
        for member in self._members:
            found += [f"{member.hello.name}: {reason}" for reason in self._unfit(member, now)]
        return found

    def why_not_ready(self, now: float) -> list[str]:
        """Empty if requests can be served by workers of which nothing bad is known."""
        fit = [one.standing(now) for one in self._members if not self._unfit(one, now)]
        if self._router.choose(fit) is not None:
            return []
        return self.troubles(now) or ["no worker has joined that could serve a whole request"]

    def views(self) -> Iterator[View]:
        return self._members.views()

    def permits(self, member: Member) -> int:
        return self._router.permits(member.life)

    @property
    def garbage(self) -> int:
        return self._join.garbage

    # ---- what the supervisor says and asks --------------------------------------------------

    @property
    def join(self) -> str:
        """Where workers join: the bound endpoint."""
        return self._join.endpoint

    @property
    def draining(self) -> bool:
        return self._draining

    def expect(self, names: Sequence[str]) -> None:
        self._expected = tuple(names)

    def seat(self, hello: Hello, connect: Connect) -> list[str]:
        """See `Members.seat`."""
        wrong = self._members.seat(hello, connect)
        self.changed.set()
        return wrong

    def who_is(self, name: str) -> Hello | None:
        """The life of that name that joined last, unless it is known to have ended."""
        member = self._members.named(name)
        return None if member is None or member.ended else member.hello

    def heard_at(self, name: str) -> float:
        """By the loop's clock; everything that has come by now is heard first."""
        member = self._members.named(name)
        if member is None:
            return 0.0
        member.link.hear()
        return member.heard_at

    def ended(self, name: str, pid: int, why: str) -> None:
        """That process is gone. What it said last may still be on its way here."""
        member = self._members.named(name)
        if member is not None and member.hello.pid == pid:
            member.ended = True
            loop = asyncio.get_running_loop()
            loop.call_later(LAST_WORDS_S, self._members.over, member, why)

    def give_up(self, why: str) -> None:
        self.failed = self.failed or why
        self.changed.set()

    # ---- dispatch ---------------------------------------------------------------------------

    def _hold(self, start: Start, ring: Callable[[], None]) -> _Held:
        ticket = Ticket(start.request, ring, lambda ended: self._again(held, ended))
        held = _Held(start, ticket, NOWHERE)
        return held

    def _dispatch(
        self, held: _Held, request: str, used: Collection[Life] = (), another: bool = False
    ) -> None:
        """Raise PeerLost or Overloaded if nobody takes it; then nothing has changed."""
        before, full = (held.ticket.request, held.route), list[Life]()
        while (route := self._choose(used, another, full)) is not None:
            held.ticket.request, held.route = request, route
            if self._send(held, request):
                held.ticket.lives = route.lives
                return
            full.append(route.worker)
        held.ticket.request, held.route = before
        if full:
            raise Overloaded("the workers' queues are full", self._settings.retry_after_s)
        raise PeerLost("no worker is ready")

    def _choose(
        self,
        used: Collection[Life] = (),
        another: bool = False,
        barred: Collection[Life] = (),
    ) -> Route | None:
        standings = self._members.standings(asyncio.get_running_loop().time())
        return self._router.choose(standings, used, another, barred)

    def _send(self, held: _Held, request: str) -> bool:
        route, partner = held.route, None
        worker = self._members.alive(route.worker)
        assert worker is not None, "chosen of those that are there"
        if route.prefill is not None:
            prefill = self._members.alive(route.prefill)
            assert prefill is not None
            name, incarnation = route.prefill
            partner = Partner(name, prefill.hello.peer_address, incarnation)
        self._router.take(request, route)
        self._held[request] = held
        salt, sampling = self.integrity.apart(held.start, route.lives)
        start = replace(held.start, request=request, prefill=partner, salt=salt, sampling=sampling)
        return worker.link.start(start, held.ticket)

    def _freed(self, request: str) -> None:
        """It left its worker's table."""
        self._router.release(request)
        self._held.pop(request, None)

    # ---- a second attempt -------------------------------------------------------------------

    def _again(self, held: _Held, ended: Outcome) -> bool:
        reason = reason_to_retry(ended)
        return reason is not None and self._retry(held, reason, isinstance(ended, OutputSuspect))

    def _retry(self, held: _Held, reason: str, another: bool) -> bool:
        """True if it was begun once more. Never while draining: workers take nothing new then."""
        if held.retried or self._draining:
            return False
        used = (*held.used, *held.route.lives)
        try:
            self._dispatch(held, f"{held.start.request}.2", used, another or bool(held.used))
        except (PeerLost, Overloaded):
            return False
        held.retried = True
        self.retries[reason] += 1
        return True

    def _leave_silent_prefill(self) -> None:
        """Requests that wait for KV from a worker that is silent or lost go elsewhere."""
        for request, held in list(self._held.items()):
            if held.route.prefill is None or held.ticket.said or held.ticket.closed:
                continue
            state = self._state(held.route.prefill)
            decode = self._members.alive(held.route.worker)
            if state == "there" or decode is None:
                continue
            if self._retry(held, f"prefill_{state}", False):
                decode.link.ledger.detach(request)
            elif state == "lost":
                name = held.route.prefill[0]
                held.ticket.close(Lost(f"the prefill worker {name} was lost"))
            else:
                continue  # nobody else could do it: it may speak again
            self._held.pop(request, None)
            decode.link.abort([request], "deadline")

    def _state(self, life: Life) -> Literal["there", "silent", "lost"]:
        member = self._members.alive(life)
        if member is None or member.ended or member.link.ledger.hello is None:
            return "lost"
        standing = member.standing(asyncio.get_running_loop().time())
        if member.link.ledger.drained or self._router.eligible(standing):
            return "there"
        return "silent"

    # ---- members ----------------------------------------------------------------------------

    def _suspected(self, said: Suspected) -> None:
        self.suspicions += 1
        journal.write(journal.Line(event="suspected", error=said.name), logging.WARNING)
        self.on_suspected(said)

    def _lost(self) -> None:
        """A worker was."""
        self._leave_silent_prefill()
        self.changed.set()

    def _able(self) -> list[Member]:
        now = asyncio.get_running_loop().time()
        return [one for one in self._members if self._router.eligible(one.standing(now))]

    def _unfit(self, member: Member, now: float) -> list[str]:
        if member.ended:
            return ["its process has ended"]
        ledger = member.link.ledger
        found = ledger.why_not_ready(now)
        if ledger.drained:
            found.append("draining")
        elif not found and not self._router.eligible(member.standing(now)):
            found.append(f"no report from the worker for {now - ledger.progress_at:.1f} s")
        return found

    async def _tick(self) -> None:
        while True:
            self._join.hear()
            self._members.tick(self._expected)
            self._leave_silent_prefill()
            await asyncio.sleep(TICK_S)
