"""Which worker, or which pair of workers, gets a request: filter, score, pick. Pure.

Promises: a worker that is not ready, or silent for longer than `suspect_s`, is given nothing; a
decode worker is given nothing without a prefill worker that is there; every request holds one
permit, counted on each worker of its route from dispatch until the request has left, exactly once;
the cheapest come first, and equals take turns, over all pairs. What a route costs is counted in
prompt tokens that a newcomer would wait for or compute there (`cost`); with nothing known of the
prompt that is the number of permits. Each route says why it was taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from stanchion.core.errors import Bug
from stanchion.core.messages import Role
from stanchion.core.outcome import Cancelled, Outcome, OutputSuspect, Overloaded, PeerLost

Life = tuple[str, int]  # one life of a worker: its name, and the incarnation of its process
Saving = Literal["prefix", "tier", "session"]
Why = Saving | Literal["only", "load", "turn", "again"]
WHYS: tuple[Why, ...] = ("only", "prefix", "tier", "session", "load", "turn", "again")

PERMIT_TOKENS = 1024  # a request that is there already costs a newcomer as much as such a prompt
FAVOUR_MIN = 4  # so many requests at once a worker may have for what it holds ...
FAVOUR_SHARE = 1.5  # ... or so many times the mean of its role


@dataclass(frozen=True)
class Weight:
    """One worker for one request: `tokens` that would be computed there (or sent there), `saved` of
    those by what it is believed to hold, and why; how slow it is; requests of others there."""

    tokens: int = 0
    saved: int = 0
    why: Saving | None = None
    pace: float = 1.0
    others: int = 0


PLAIN = Weight()


@dataclass(frozen=True)
class Standing:
    """`ready`: it said hello, gets on, and is not draining. `silent_s`: since its last Progress.
    `others`: requests that wait there and are not ours."""

    life: Life
    role: Role
    ready: bool
    silent_s: float
    others: int = 0
    weight: Weight = PLAIN


@dataclass(frozen=True)
class Route:
    """`worker` is told of the request; `prefill` only by that worker. `owed` prompt tokens are to
    be computed by the last of them."""

    worker: Life
    prefill: Life | None = None
    why: Why = field(default="turn", compare=False)
    owed: int = field(default=0, compare=False)

    @property
    def lives(self) -> tuple[Life, ...]:
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)

    @property
    def computes(self) -> Life:
        return self.worker if self.prefill is None else self.prefill


def reason_to_retry(ended: Outcome) -> str | None:
    """Why an attempt that ended so, and said nothing, may be made again elsewhere."""
    match ended:
        case PeerLost():
            return "peer_lost"
        case Overloaded():
            return "overloaded"
        case OutputSuspect():
            return "output_suspect"
        case Cancelled(by="deadline"):
            return "deadline"
        case _:
            return None


def cost(weight: Weight, permits: int, owed: int, saves: bool) -> float:
    """In prompt tokens. What a worker holds saves nothing once it has its share already."""
    own = weight.tokens - (weight.saved if saves else 0)
    return weight.pace * (PERMIT_TOKENS * (permits + 1 + weight.others) + owed + own)


def favoured(permits: int, every: Sequence[int]) -> bool:
    """May a worker with so many permits get one more for what it holds? `every`: of its role."""
    mean = (sum(every) + 1) / len(every)
    return permits + 1 <= max(FAVOUR_MIN, FAVOUR_SHARE * mean)


@dataclass(frozen=True)
class _Scored:
    """The workers of a role that may be chosen, each with its cost, and the cheapest of them."""

    costs: dict[Life, float] = field(default_factory=dict)
    saved: dict[Life, int] = field(default_factory=dict)
    weights: dict[Life, Weight] = field(default_factory=dict)

    @property
    def best(self) -> list[Life]:
        least = min(self.costs.values(), default=0.0)
        return [life for life, one in self.costs.items() if one == least]


class Router:
    def __init__(self, suspect_s: float) -> None:
        self._suspect_s = suspect_s
        self._routes: dict[str, Route] = {}  # by request
        self._permits: dict[Life, int] = {}
        self._owed: dict[str, int] = {}  # by requests of which nothing was said yet
        self._owes: dict[Life, int] = {}
        self._waiting: dict[Life, int] = {}
        self._turn = 0

    def permits(self, life: Life) -> int:
        return self._permits.get(life, 0)

    def owes(self, life: Life) -> int:
        """Prompt tokens that it is still to compute, as far as is known here."""
        return self._owes.get(life, 0)

    def waiting(self, life: Life) -> int:
        """Requests there of which nothing was said yet."""
        return self._waiting.get(life, 0)

    def route(self, request: str) -> Route:
        return self._routes[request]

    def take(self, request: str, route: Route) -> None:
        if request in self._routes:
            raise Bug(f"request {request} took a permit twice")
        self._routes[request], self._owed[request] = route, route.owed
        for life in route.lives:
            _add(self._permits, life, 1)
            _add(self._waiting, life, 1)
        _add(self._owes, route.computes, route.owed)
        self._turn += 1

    def begun(self, request: str) -> bool:
        """Something was said, so its prompt is computed. True the first time."""
        if request not in self._owed:
            return False
        route, owed = self._routes[request], self._owed.pop(request)
        for life in route.lives:
            _add(self._waiting, life, -1)
        _add(self._owes, route.computes, -owed)
        return True

    def release(self, request: str) -> None:
        if request not in self._routes:
            raise Bug(f"request {request} released a permit that it does not hold")
        self.begun(request)
        for life in self._routes.pop(request).lives:
            _add(self._permits, life, -1)

    def eligible(self, standing: Standing) -> bool:
        return standing.ready and standing.silent_s <= self._suspect_s

    def able(self, standings: Sequence[Standing], barred: Collection[Life] = ()) -> bool:
        """Would `choose` find a route?"""
        roles = {one.role for one in standings if self.eligible(one) and one.life not in barred}
        return "both" in roles or roles >= {"decode", "prefill"}

    def choose(
        self,
        standings: Sequence[Standing],
        used: Collection[Life] = (),
        another: bool = False,
        barred: Collection[Life] = (),
    ) -> Route | None:
        """None if there is no worker and no complete pair.

        `used` are left alone if there are others; with `another`, a route of nothing but those
        will not do. `barred` are out of question.
        """
        able = [one for one in standings if self.eligible(one) and one.life not in barred]
        scored = {
            role: self._scored([one for one in able if one.role == role], used)
            for role in ("both", "decode", "prefill")
        }
        both, decode, prefill = (scored[role].best for role in ("both", "decode", "prefill"))
        pairs = min(len(decode), len(prefill))
        single_cost = _cost(used, both[:1], [scored["both"]])
        chosen = [*decode[:1], *prefill[:1]] if pairs else []
        pair_cost = _cost(used, chosen, [scored["decode"], scored["prefill"]])
        best = min(single_cost, pair_cost)
        if best == _NEVER or (another and best[0] == (1 if best == single_cost else 2)):
            return None
        singles = len(both) if single_cost == best else 0
        round_, slot = divmod(self._turn, singles + (pairs if pair_cost == best else 0))
        if slot < singles:
            return self._reasoned(Route(both[slot]), used, scored)
        # Over all pairs, and each in turn with another partner than before.
        turn = round_ * pairs + slot - singles
        shift = turn // lcm(len(decode), len(prefill))
        route = Route(decode[(turn + shift) % len(decode)], prefill[turn % len(prefill)])
        return self._reasoned(route, used, scored)

    def _scored(self, able: Sequence[Standing], used: Collection[Life]) -> _Scored:
        """Unused ones before used ones."""
        fresh = [one for one in able if one.life not in used] or able
        every = [self.permits(one.life) for one in fresh]
        scored = _Scored()
        for one, permits in zip(fresh, every):
            weight = one.weight
            saves = bool(weight.saved) and favoured(permits, every)
            scored.costs[one.life] = cost(weight, permits, self.owes(one.life), saves)
            scored.saved[one.life] = weight.saved if saves else 0
            scored.weights[one.life] = weight
        return scored

    @staticmethod
    def _reasoned(route: Route, used: Collection[Life], scored: Mapping[str, _Scored]) -> Route:
        parts = [
            (one, life)
            for role in ("prefill", "decode", "both")
            for one in [scored[role]]
            for life in route.lives
            if life in one.costs
        ]
        part, life = parts[0]  # the one that computes
        owed = part.weights[life].tokens - part.saved[life]
        return Route(route.worker, route.prefill, _why(used, parts), owed)


def _why(used: Collection[Life], parts: Sequence[tuple[_Scored, Life]]) -> Why:
    if used:
        return "again"
    if all(len(one.costs) == 1 for one, _ in parts):
        return "only"
    for one, life in parts:
        why = one.weights[life].why
        if why is not None and one.saved[life] and one.saved[life] > min(one.saved.values()):
            return why
    uneven = any(len(set(one.costs.values())) > 1 for one, _ in parts)
    return "load" if uneven else "turn"


def _add(counts: dict[Life, int], life: Life, change: int) -> None:
    left = counts.get(life, 0) + change
    if left:
        counts[life] = left
    else:
        counts.pop(life, None)


def _cost(
    used: Collection[Life], lives: Sequence[Life], scored: Sequence[_Scored]
) -> tuple[float, float]:
    """`lives` have one of each role of `scored`."""
    if not lives:
        return _NEVER
    worst = max(one.costs[life] for one, life in zip(scored, lives, strict=True))
    return sum(life in used for life in lives), worst


_NEVER = (float("inf"), 0.0)
