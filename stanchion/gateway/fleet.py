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
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager

import zmq
from msgspec.structs import replace

from stanchion.core.errors import Overloaded, PeerLost
from stanchion.core.messages import Hello, Order, Quarantine, Role, Start, Suspected
from stanchion.core.outcome import Leaver, Outcome
from stanchion.core.request import Sampling
from stanchion.gateway import journal
from stanchion.gateway.attempts import Attempts
from stanchion.gateway.integrity import Integrity
from stanchion.gateway.join import JoinSocket
from stanchion.gateway.ledger import Ticket
from stanchion.gateway.link import Ears
from stanchion.gateway.members import Connect, Member, Members, View
from stanchion.gateway.rotation import Rotation, Told
from stanchion.gateway.router import Life, Router
from stanchion.gateway.settings import GatewaySettings

TICK_S = 0.1
LAST_WORDS_S = 0.1  # what a worker said before its end may still be on its way here


class Fleet:
    def __init__(self, settings: GatewaySettings, join: str) -> None:
        self._settings = settings
        self._address = join
        self._router = Router(settings.suspect_s)
        self.rotation = Rotation(settings)
        self.changed = asyncio.Event()  # rings whenever something was heard or lost
        ears = Ears(self.changed.set, self._suspected, self._lost)
        self._members = Members(settings, ears, self._freed)
        self._join = JoinSocket(self._members.admit)
        self._expected: tuple[str, ...] = ()
        self.attempts = Attempts(
            settings,
            self._members,
            self._router,
            self.rotation,
            self._apart,
            self.spoilt,
        )
        self.suspicions = 0
        self.quarantines = 0  # ordered, of workers
        self.taken_out = 0  # workers, by the monitor
        self.on_suspected: Callable[[Suspected], None] = lambda said: None
        self.integrity = Integrity(settings, self, self.attempts.budget, _now)
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
        now, members = _now(), list(self._members)
        standings = [one.standing(now) for one in members]
        able = [one.hello for one, at in zip(members, standings) if self._router.eligible(at)]
        if not any(hello.role == "decode" for hello in able):  # then nobody asks prefill workers
            able = [hello for hello in able if hello.role != "prefill"]
        if not able or not self.attempts.able_among(standings, now):
            return None
        least = min(able, key=lambda hello: hello.pages)
        context_max = min(hello.context_max for hello in able)
        return (
            least if least.context_max == context_max else replace(least, context_max=context_max)
        )

    def hello_of(self, life: Life) -> Hello | None:
        member = self._members.alive(life)
        return None if member is None else member.hello

    @property
    def failpoints(self) -> list[str]:
        """Armed in any worker."""
        members = self._members
        return list(dict.fromkeys(name for one in members for name in one.hello.failpoints))

    def room(self, wanted: int) -> None:
        """Raise unless so many requests may be started now."""
        if not self.attempts.able:
            for member in self._members:
                member.link.hear()  # if this loop was held up, signs of life wait to be read
            if not self.attempts.able:
                raise PeerLost("no worker is ready")
        self._bounded(wanted)

    def _bounded(self, wanted: int) -> None:
        bound = self._settings.in_flight_max
        if len(self) + wanted > bound:
            raise Overloaded(
                f"{len(self)} requests in flight, the bound is {bound}",
                self._settings.retry_after_s,
            )

    def start(self, starts: Sequence[Start], ring: Callable[[], None]) -> list[Ticket]:
        """All of them, or none."""
        self._bounded(len(starts))
        tickets: list[Ticket] = []
        for start in starts:
            try:
                tickets.append(self.attempts.start(start, ring))
            except (PeerLost, Overloaded):
                for accepted in tickets:
                    self.leave(accepted, "client")
                raise
        for start in starts:
            self.attempts.budget.request(start.tenant, _now())
        return tickets

    def elsewhere(
        self,
        start: Start,
        ring: Callable[[], None],
        used: Collection[Life],
        wholly: bool = False,
    ) -> Ticket:
        """As `Attempts.elsewhere`."""
        if self.attempts.draining:
            raise PeerLost("the workers take nothing new")
        return self.attempts.elsewhere(start, ring, used, wholly)

    def leave(self, ticket: Ticket, by: Leaver) -> None:
        life = self.attempts.who_has(ticket.request)
        if life is not None and (member := self._members.alive(life)) is not None:
            member.link.leave(ticket, by)

    def leave_all(self, by: Leaver) -> None:
        for member in self._members:
            member.link.leave_all(by)

    def drain(self) -> None:
        """The workers take nothing new. Prefill workers are told once nothing is in flight: what
        was accepted may still be on its way to them."""
        self.attempts.draining = True
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

    # ---- whom to trust ----------------------------------------------------------------------

    def doubted(self, lives: Sequence[Life]) -> None:
        """An answer of these workers is suspected."""
        for life in lives:
            self.rotation.trust.suspected(life, _now())

    def cleared(self, lives: Sequence[Life]) -> None:
        for life in lives:
            self.rotation.trust.cleared(life, _now())

    def confirmed(self, request: str, lives: Sequence[Life], read: Quarantine) -> None:
        """An answer of these workers was wrong."""
        self.spoilt(request, lives, read)
        self._at_fault(lives)

    def overruled(self, lives: Sequence[Life]) -> None:
        """What these workers computed from cold KV is not what two others did."""
        self.doubted(lives)
        self._at_fault(lives)

    def _at_fault(self, lives: Sequence[Life]) -> None:
        for life in lives:
            if self.rotation.trust.confirmed(life, _now()):
                self.taken_out += 1
                journal.write(journal.Line(event="worker_out", worker=life[0]), logging.ERROR)

    def spoilt(self, request: str, lives: Sequence[Life], read: Quarantine) -> None:
        """Nothing that it read is found again there."""
        self.doubted(lives)
        for life in lives:
            self.rotation.prefixes.forget(life)
            if (member := self._members.alive(life)) is not None:
                member.link.tell(read)
                self.quarantines += 1
                line = journal.Line(event="quarantine", request=request, worker=life[0])
                journal.write(line, logging.WARNING)

    def tell(self, order: Order, name: str | None) -> list[str]:
        """That worker, or all of them. Their names."""
        told = [one for one in self._members if name is None or one.hello.name == name]
        for member in told:
            member.link.tell(order)
            self.rotation.prefixes.forget(member.life)
        return sorted(member.hello.name for member in told)

    def take_out(self, name: str, out: bool) -> bool:
        """Out of rotation, or back into it. False if there is no such worker."""
        member = self._members.named(name)
        if member is None:
            return False
        trust = self.rotation.trust
        (trust.take_out if out else trust.let_back)(member.life)
        return True

    # ---- what is told of it -----------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """All that were asked for have said hello, and requests can be served."""
        here = {member.hello.name for member in self._able()}
        return here.issuperset(self._expected) and self.attempts.able

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

    def told(self, member: Member) -> Told:
        peers = [one.life for one in self._members if one.hello.role == member.hello.role]
        return self.rotation.view(member.life, peers, _now())

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
        return self.attempts.draining

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

    # ---- attempts ---------------------------------------------------------------------------

    def _freed(self, request: str, ended: Outcome | None) -> None:
        self.attempts.freed(request, ended)

    def _apart(self, start: Start, lives: Sequence[Life]) -> tuple[str, Sampling]:
        return self.integrity.apart(start, lives)

    # ---- members ----------------------------------------------------------------------------

    def _suspected(self, said: Suspected) -> None:
        self.suspicions += 1
        journal.write(journal.Line(event="suspected", error=said.name), logging.WARNING)
        self.on_suspected(said)

    def _lost(self) -> None:
        """A worker was."""
        self.attempts.leave_silent_prefill()
        self.changed.set()

    def _able(self) -> list[Member]:
        now = _now()
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
        if self.rotation.breakers.of(member.life).state == "open":
            found.append("shut out after faults of its own")
        if self.rotation.trust.out(member.life):
            found.append("out of rotation")
        return found

    def _sample(self) -> None:
        """How each worker gets on, seen from here."""
        now, router = _now(), self._router
        for member in self._members:
            life = member.life
            prefills = member.hello.role == "prefill"
            waits = router.waiting(life) if prefills else router.permits(life)
            self.rotation.came(life, member.link.ledger.came())
            self.rotation.sample(life, waits, now)
            if not router.eligible(member.standing(now)):
                self.rotation.paces.forget(life)
        self.rotation.keep([member.life for member in self._members])

    async def _tick(self) -> None:
        while True:
            self._join.hear()
            self._members.tick(self._expected)
            self.attempts.leave_silent_prefill()
            self._sample()
            await asyncio.sleep(TICK_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
