"""Who may be given work now, and how dear each worker is for one request. Pure.

Puts together what is known of each life of a worker: its breaker, its pace, how far it is trusted,
what it is believed to hold, and whether it asked for rest. `Router` counts permits and picks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stanchion.core.messages import Hello, Start
from stanchion.core.outcome import (
    Cancelled,
    Completed,
    Outcome,
    Overloaded,
    PeerLost,
    fault_owner,
)
from stanchion.gateway.breaker import Breakers, Rules, State
from stanchion.gateway.pace import PROMPT_TOKENS, Paces
from stanchion.gateway.prefixes import Blocks, Prefixes, blocks_of
from stanchion.gateway.router import Life, Route, Saving, Standing, Weight
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.trust import Trust

TIER_SHARE = 0.5  # of what a token on the device saves does one in a tier save
SESSION_SHARE = 0.5  # of a prompt's tokens may be where its session was last, for all we know
SEND_SHARE = 0.25  # of what computing a token costs does sending its KV cost
RESTING = 8.0  # times as dear is a worker that asked for rest
REST_MAX_S = 5.0
SESSIONS_MAX = 65_536


@dataclass(frozen=True)
class Asked:
    """One request as it is routed. `kept`: what is computed for it may be found by others."""

    tenant: str
    session: str
    tokens: int
    blocks: Blocks
    kept: bool = True


@dataclass(frozen=True)
class Room:
    """How many tokens of KV a worker has room for."""

    device: int
    tiers: int


@dataclass(frozen=True)
class Told:
    """One worker, for whoever looks."""

    breaker: State
    opened: int
    pace: float
    out: bool
    suspicious: bool


class Rotation:
    def __init__(self, settings: GatewaySettings) -> None:
        rules = Rules(
            settings.breaker_faults,
            settings.breaker_rest_s,
            settings.breaker_probes,
            settings.stall_s,
        )
        self.breakers = Breakers(rules)
        self.paces = Paces()
        self.trust = Trust(settings.confirmed_max, settings.confirmed_window_s)
        self.prefixes = Prefixes(settings.prefix_blocks_max)
        self.owners: Counter[str] = Counter()  # of endings that were not good
        self._rests: dict[Life, float] = {}  # until when
        self._sessions: OrderedDict[tuple[str, str], tuple[Life, ...]] = OrderedDict()
        self._progress: Counter[Life] = Counter()  # in tokens, since the last sample

    # ---- before -----------------------------------------------------------------------------

    @staticmethod
    def asked(start: Start, hello: Hello | None, kept: bool) -> Asked:
        blocks = blocks_of(start, hello) if hello is not None and kept else Blocks()
        return Asked(start.tenant, start.session, len(start.tokens), blocks, kept)

    def shut(self, standings: Sequence[Standing], now: float) -> list[Life]:
        """Those whose breakers let nothing through now."""
        return [one.life for one in standings if not self.breakers.of(one.life).admits(now)]

    def out(self, standings: Sequence[Standing]) -> list[Life]:
        return [one.life for one in standings if self.trust.out(one.life)]

    def weighed(self, asked: Asked, standings: Sequence[Standing], now: float) -> list[Standing]:
        """The same, each with what it costs for this request."""
        session = self._sessions.get((asked.tenant, asked.session), ())
        roles: dict[str, list[Life]] = {}
        for one in standings:
            roles.setdefault(one.role, []).append(one.life)
        return [
            replace(one, weight=self._weight(asked, one, roles[one.role], session, now))
            for one in standings
        ]

    def _weight(
        self,
        asked: Asked,
        one: Standing,
        peers: Sequence[Life],
        session: Collection[Life],
        now: float,
    ) -> Weight:
        pace = self.paces.factor(one.life, peers)
        if self._rests.get(one.life, now) > now:
            pace *= RESTING
        saved: float = 0
        why: Saving | None = None
        if not self.trust.suspicious(one.life, now):
            hit = self.prefixes.hit(one.life, asked.blocks)
            saved = hit.device + TIER_SHARE * hit.tiers
            if saved:
                why = "prefix" if hit.device else "tier"
            if one.life in session and saved < SESSION_SHARE * asked.tokens:
                saved, why = SESSION_SHARE * asked.tokens, "session"
        share = SEND_SHARE if one.role == "decode" else 1.0
        return Weight(int(share * asked.tokens), int(share * saved), why, pace, one.others)

    # ---- after ------------------------------------------------------------------------------

    def taken(
        self, request: str, route: Route, asked: Asked, rooms: Mapping[Life, Room], now: float
    ) -> None:
        for life in route.lives:
            self.breakers.of(life).taken(request, now)
            if asked.kept and asked.blocks.keys:
                size, room = asked.blocks.tokens, rooms[life]
                self.prefixes.sent(life, asked.blocks, room.device // size, room.tiers // size)
        if asked.session:
            self._sessions[asked.tenant, asked.session] = route.lives
            self._sessions.move_to_end((asked.tenant, asked.session))
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)

    def said(self, request: str, route: Route, now: float) -> None:
        """The first word of it came."""
        for life in route.lives:
            self.breakers.of(life).said(request, now)
        self._progress[route.computes] += 1 + route.owed // PROMPT_TOKENS

    def came(self, life: Life, tokens: int) -> None:
        self._progress[life] += tokens

    def let_go(self, request: str, route: Route, now: float) -> None:
        """It was ended from here, which says nothing of the worker."""
        for life in route.lives:
            self.breakers.of(life).ended(request, False, None, now)

    def ended(
        self,
        request: str,
        route: Route,
        ended: Outcome,
        now: float,
        moving: Collection[Life] = (),
    ) -> None:
        """`moving`: those that get on with their work. A deadline that passes there is a queue's
        length and no fault of theirs; were it one, a rush would shut out whoever stands it."""
        owner = fault_owner(ended)
        to_blame = blamed(ended, route)
        if isinstance(ended, Cancelled) and owner == "worker" and to_blame in moving:
            owner = "capacity"
        if owner is not None:
            self.owners[owner] += 1
        if isinstance(ended, Overloaded):
            self._rests[route.worker] = now + min(ended.retry_after_s, REST_MAX_S)
        for life in route.lives:
            own = owner if life == to_blame else None
            well = isinstance(ended, Completed)
            self.breakers.of(life).ended(request, well, own, now)

    def view(self, life: Life, peers: Sequence[Life], now: float) -> Told:
        breaker, trust = self.breakers.of(life), self.trust
        pace = self.paces.factor(life, peers)
        out, suspicious = trust.out(life), trust.suspicious(life, now)
        return Told(breaker.state, breaker.opened, pace, out, suspicious)

    def sample(self, life: Life, waiting: int, now: float) -> None:
        self.paces.sample(life, waiting, self._progress.pop(life, 0), now)
        self.breakers.of(life).tick(now)

    def keep(self, lives: Sequence[Life]) -> None:
        """All others are gone, and what was known of them with them."""
        for known in (self.paces, self.breakers, self.trust, self.prefixes):
            known.keep(lives)
        self._rests = {life: at for life, at in self._rests.items() if life in lives}


def blamed(ended: Outcome, route: Route) -> Life:
    """Of a pair, the one whose fault it was."""
    if route.prefill is None:
        return route.worker
    late = isinstance(ended, Cancelled) and ended.by == "deadline"
    lost = isinstance(ended, PeerLost) and ended.peer == route.prefill[0]
    return route.prefill if late or lost else route.worker
