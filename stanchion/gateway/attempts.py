"""Attempts at requests: each is given to a worker or a pair, and may be made once more elsewhere.

Promises: an attempt that failed before a word was said is made once more elsewhere, within the
budget of all retries, and its reader notices nothing; an attempt that another one took the place
of is told to stop, and holds its permits until its worker says that it did.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from stanchion.core.errors import Overloaded, PeerLost
from stanchion.core.messages import Partner, Quarantine, Start
from stanchion.core.outcome import Outcome, OutputSuspect
from stanchion.core.outcome import PeerLost as Lost
from stanchion.core.request import Sampling
from stanchion.gateway.ledger import Ticket
from stanchion.gateway.members import Members
from stanchion.gateway.monitor.budget import RetryBudget
from stanchion.gateway.prefixes import Blocks
from stanchion.gateway.rotation import Asked, Rotation
from stanchion.gateway.router import Life, Route, Router, Standing, Why, reason_to_retry
from stanchion.gateway.settings import GatewaySettings

NOWHERE = Route(("", 0))
ANYTHING = Asked("", "", 0, Blocks())
Spoilt = Callable[[str, Sequence[Life], Quarantine], None]
Apart = Callable[[Start, Sequence[Life]], tuple[str, Sampling]]  # salt and sampling there


@dataclass
class _Held:
    """An accepted request: what was asked, who reads it, who has it now."""

    start: Start
    ticket: Ticket
    route: Route
    retried: bool = False
    kept: bool = True  # others may find what is computed for it
    used: tuple[Life, ...] = ()  # not these alone


class Attempts:
    """`apart` says with which salt and sampling a request goes to these workers; `spoilt` is told
    what an attempt had read that its worker ended as not to be trusted."""

    def __init__(
        self,
        settings: GatewaySettings,
        members: Members,
        router: Router,
        rotation: Rotation,
        apart: Apart,
        spoilt: Spoilt,
    ) -> None:
        self._settings = settings
        self._members = members
        self._router = router
        self._rotation = rotation
        self._apart = apart
        self._spoilt = spoilt
        self._held: dict[str, _Held] = {}  # by the name of the attempt that counts
        self.budget = RetryBudget(settings.retries_share, settings.retries_spare)
        self.retries: Counter[str] = Counter()
        self.over_budget = 0  # attempts that were not made again, since the budget was spent
        self.routed: Counter[Why] = Counter()
        self.draining = False

    def start(self, start: Start, ring: Callable[[], None]) -> Ticket:
        """Raise PeerLost or Overloaded if nobody takes it."""
        held = self._hold(start, ring)
        self._dispatch(held, start.request)
        return held.ticket

    def elsewhere(
        self,
        start: Start,
        ring: Callable[[], None],
        used: Collection[Life],
        wholly: bool = False,
    ) -> Ticket:
        """By a route that has at least one life that is not `used`, or, `wholly`, none that is.
        Raise PeerLost or Overloaded if there is none."""
        held = self._hold(start, ring)
        held.used, held.kept = tuple(used), False
        held.ticket.used = held.used
        self._dispatch(held, start.request, used, True, used if wholly else ())
        return held.ticket

    def who_has(self, request: str) -> Life | None:
        """The worker that was told of the attempt that counts."""
        held = self._held.get(request)
        return None if held is None else held.route.worker

    def _hold(self, start: Start, ring: Callable[[], None]) -> _Held:
        ticket = Ticket(
            start.request, ring, lambda ended: self._again(held, ended), start.tenant, self._begun
        )
        held = _Held(start, ticket, NOWHERE)
        return held

    def _dispatch(
        self,
        held: _Held,
        request: str,
        used: Collection[Life] = (),
        another: bool = False,
        barred: Collection[Life] = (),
    ) -> None:
        """Raise PeerLost or Overloaded if nobody takes it; then nothing has changed."""
        before, full = (held.ticket.request, held.route), list[Life]()
        asked = self._rotation.asked(held.start, self._members.any_hello(), held.kept)
        while (route := self.choose(used, another, [*barred, *full], asked)) is not None:
            held.ticket.request, held.route = request, route
            if self._send(held, request, asked):
                held.ticket.lives, held.ticket.why = route.lives, route.why
                self.routed[route.why] += 1
                return
            full.append(route.worker)
        held.ticket.request, held.route = before
        if full:
            raise Overloaded("the workers' queues are full", self._settings.retry_after_s)
        raise PeerLost("no worker is ready")

    @property
    def able(self) -> bool:
        """Would `choose` find a route for a new request?"""
        now = _now()
        return self.able_among(self._members.standings(now), now)

    def able_among(self, standings: Sequence[Standing], now: float) -> bool:
        """The same of workers that were looked at already."""
        return self._router.able(standings, self._rotation.shut(standings, now))

    def choose(
        self,
        used: Collection[Life] = (),
        another: bool = False,
        barred: Collection[Life] = (),
        asked: Asked = ANYTHING,
    ) -> Route | None:
        """Those that are out of rotation are taken where there is no other."""
        now = _now()
        standings = self._members.standings(now)
        shut = [*barred, *self._rotation.shut(standings, now)]
        weighed = self._rotation.weighed(asked, standings, now)
        for bars in ([*shut, *self._rotation.out(standings)], shut):
            route = self._router.choose(weighed, used, another, bars)
            if route is not None:
                return route
        return None

    def _send(self, held: _Held, request: str, asked: Asked) -> bool:
        route, partner = held.route, None
        worker = self._members.alive(route.worker)
        assert worker is not None, "chosen of those that are there"
        rooms = {route.worker: worker.room}
        if route.prefill is not None:
            prefill = self._members.alive(route.prefill)
            assert prefill is not None
            name, incarnation = route.prefill
            partner = Partner(name, prefill.hello.peer_address, incarnation)
            rooms[route.prefill] = prefill.room
        self._router.take(request, route)
        self._rotation.taken(request, route, asked, rooms, _now())
        self._held[request] = held
        salt, sampling = self._apart(held.start, route.lives)
        held.ticket.salt = salt
        start = replace(held.start, request=request, prefill=partner, salt=salt, sampling=sampling)
        return worker.link.start(start, held.ticket)

    def _begun(self, request: str) -> None:
        """A word of it came; of the first one others are told."""
        if self._router.begun(request):
            self._rotation.said(request, self._router.route(request), _now())

    def freed(self, request: str, ended: Outcome | None) -> None:
        """It left its worker's table."""
        route, known = self._router.route(request), self._held.pop(request, None)
        if known is None or ended is None:  # it was given up for another attempt, or never there
            self._rotation.let_go(request, route, _now())
        else:
            moving = [life for life in route.lives if self._moves(life)]
            self._rotation.ended(request, route, ended, _now(), moving)
            if isinstance(ended, OutputSuspect):
                start, salt = known.start, known.ticket.salt
                read = Quarantine(tokens=start.tokens, tenant=start.tenant, salt=salt)
                self._spoilt(request, route.lives, read)
        self._router.release(request)

    def _moves(self, life: Life) -> bool:
        member = self._members.alive(life)
        return member is not None and member.link.ledger.moving(_now(), self._settings.suspect_s)

    # ---- a second attempt -------------------------------------------------------------------

    def _again(self, held: _Held, ended: Outcome) -> bool:
        reason = reason_to_retry(ended)
        return reason is not None and self._retry(held, reason, isinstance(ended, OutputSuspect))

    def _retry(self, held: _Held, reason: str, another: bool) -> bool:
        """True if it was begun once more. Never while draining: workers take nothing new then."""
        tenant = held.start.tenant
        if held.retried or self.draining:
            return False
        if not self.budget.allows(tenant, _now()):
            self.over_budget += 1
            return False
        used = (*held.used, *held.route.lives)
        try:
            self._dispatch(held, f"{held.start.request}.2", used, another or bool(held.used))
        except (PeerLost, Overloaded):
            return False
        held.retried = True
        self.budget.retry(tenant, _now())
        self.retries[reason] += 1
        return True

    def leave_silent_prefill(self) -> None:
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
        standing = member.standing(_now())
        if member.link.ledger.drained or self._router.eligible(standing):
            return "there"
        return "silent"


def _now() -> float:
    return asyncio.get_running_loop().time()
