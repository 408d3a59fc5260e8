"""Who is there: the workers that have joined, each with its link, life after life.

Promises: one member a name; a new life takes the place of the old one, and what that held is over;
a life that is over does not come back; counters of a worker go on from life to life.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Hello, Join, Refused, Role, Welcome
from stanchion.gateway.admission import MEMBERS_MAX, Admission
from stanchion.gateway.connection import Connection
from stanchion.gateway.ledger import Freed, Ledger
from stanchion.gateway.link import Ears, Link
from stanchion.gateway.rotation import Room
from stanchion.gateway.router import Life, Standing
from stanchion.gateway.settings import GatewaySettings

FORGET_S = 60.0  # a worker of which nothing is heard for so long is forgotten
Connect = Callable[[Ledger, Ears], Connection]


@dataclass
class Member:
    """One life of a worker, from its Join on."""

    hello: Hello
    link: Connection
    joined_at: float  # its last Join
    ended: bool = False  # its process is gone

    @property
    def life(self) -> Life:
        return self.hello.name, self.hello.incarnation

    @property
    def heard_at(self) -> float:
        return max(self.joined_at, self.link.ledger.heard_at)

    def standing(self, now: float) -> Standing:
        ledger = self.link.ledger
        draining = ledger.drained or (ledger.progress is not None and ledger.progress.draining)
        ready = ledger.hello is not None and not draining and not self.ended
        ready = ready and not ledger.stalled_s(now)
        waiting = ledger.progress.waiting if ledger.progress is not None else 0
        others = max(0, waiting - len(ledger))
        return Standing(self.life, self.hello.role, ready, now - ledger.progress_at, others)

    @property
    def room(self) -> Room:
        """How many tokens of KV it can hold."""
        hello, said = self.hello, self.link.ledger.progress
        tiers = said.tiers if said is not None else None
        pages = 0 if tiers is None else tiers.host_pages + tiers.disk_pages
        return Room(hello.pages * hello.page_tokens, pages * hello.page_tokens)


@dataclass(frozen=True)
class View:
    """One worker for whoever counts, over all its lives. `member` is the present one."""

    name: str
    role: Role
    lost: int
    unknown: int
    miscounted: int
    computed: Counter[str]  # tokens that it said, by tenant
    member: Member | None


@dataclass
class _Past:
    """What is left of the earlier lives of a worker."""

    role: Role
    lost: int = 0
    unknown: int = 0
    miscounted: int = 0
    computed: Counter[str] = field(default_factory=Counter)


class Members:
    """`freed` is called with the name of each request that a worker's table lets go, and how it
    ended there."""

    def __init__(self, settings: GatewaySettings, ears: Ears, freed: Freed) -> None:
        self._settings = settings
        self._ears = ears
        self._freed = freed
        self._admission = Admission(settings.peer_key)
        self._members: dict[str, Member] = {}
        self._past: dict[str, _Past] = {}

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context

    def close(self) -> None:
        members, self._members = self._members, {}
        for member in members.values():
            member.link.close()

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def any_hello(self) -> Hello | None:
        """All agree on what a prefix is the prefix of."""
        return next((member.hello for member in self._members.values()), None)

    def named(self, name: str) -> Member | None:
        return self._members.get(name)

    def alive(self, life: Life) -> Member | None:
        member = self._members.get(life[0])
        return member if member is not None and member.life == life else None

    def standings(self, now: float) -> list[Standing]:
        return [member.standing(now) for member in self._members.values()]

    def views(self) -> Iterator[View]:
        for name, past in self._past.items():
            lost, unknown, member = past.lost, past.unknown, self._members.get(name)
            miscounted, computed = past.miscounted, past.computed
            if member is not None:
                ledger = member.link.ledger
                lost, unknown = lost + ledger.lost, unknown + ledger.unknown
                miscounted += ledger.miscounted
                computed = computed + ledger.computed
            yield View(name, past.role, lost, unknown, miscounted, computed, member)

    def admit(self, join: Join) -> Welcome | Refused:
        now = asyncio.get_running_loop().time()
        known = self._members.get(join.hello.name)
        if known is not None and known.life == (join.hello.name, join.hello.incarnation):
            known.joined_at = now
            return Welcome()
        others = [one.hello for name, one in self._members.items() if name != join.hello.name]
        if wrong := self._admission.refusals(join, others):
            return Refused(wrong)
        link = Link(join.hello, self._ledger(), self._ears)
        try:
            link.open(self._context, join.address, self._settings.peer_key)
        except ConfigError as error:
            return Refused([f"address: {error}"])
        self._take(join.hello, link)
        return Welcome()

    def seat(self, hello: Hello, connect: Connect) -> list[str]:
        """A server that does not join by itself: somebody here has found it. Why it does not fit,
        each naming a field; it is in if that is empty."""
        others = [one.hello for one in self if one.hello.name != hello.name]
        if wrong := self._admission.unfit(hello, others):
            return wrong
        self._take(hello, connect(self._ledger(), self._ears))
        return []

    def _ledger(self) -> Ledger:
        return Ledger(self._settings.worker_silence_s, self._settings.stall_s, self._freed)

    def _take(self, hello: Hello, link: Connection) -> None:
        if (known := self._members.get(hello.name)) is not None:
            self.over(known, "the worker was replaced by a new process")
        self._remember(hello)
        self._members[hello.name] = Member(hello, link, asyncio.get_running_loop().time())
        link.tick()

    def over(self, member: Member, why: str) -> None:
        """That life is over, and does not come back."""
        if self._members.get(member.hello.name) is member:
            self._admission.over(member.life)
            self._remove(member, why)

    def tick(self, expected: tuple[str, ...]) -> None:
        """To be called a few times a second. Whoever is `expected` is not forgotten."""
        for member in self:
            member.link.tick()
            quiet_s = asyncio.get_running_loop().time() - member.heard_at
            lost = member.link.ledger.hello is None and quiet_s > FORGET_S
            if lost and member.hello.name not in expected:
                self._remove(member, "the worker was not heard of again")

    def _remember(self, hello: Hello) -> None:
        """Of the oldest that are not there any more, the counters are lost."""
        self._past.setdefault(hello.name, _Past(hello.role)).role = hello.role
        if len(self._past) > 2 * MEMBERS_MAX:
            del self._past[next(name for name in self._past if name not in self._members)]

    def _remove(self, member: Member, why: str) -> None:
        """What it held ends, or is begun again elsewhere."""
        member.ended = True
        member.link.lose(why)
        del self._members[member.hello.name]
        member.link.close()
        past, ledger = self._past[member.hello.name], member.link.ledger
        past.lost, past.unknown = past.lost + ledger.lost, past.unknown + ledger.unknown
        past.miscounted += ledger.miscounted
        past.computed += ledger.computed
