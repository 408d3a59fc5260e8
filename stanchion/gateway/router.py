"""Which worker, or which pair of workers, gets a request. Pure.

Promises: a worker that is not ready, or silent for longer than `suspect_s`, is given nothing; a
decode worker is given nothing without a prefill worker that is there; every request holds one
permit, counted on each worker of its route from dispatch until the request has left, exactly once;
fewest permits come first, and equals take turns, over all pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm

from stanchion.core.errors import Bug
from stanchion.core.messages import Role
from stanchion.core.outcome import Cancelled, Outcome, OutputSuspect, Overloaded, PeerLost

Life = tuple[str, int]  # one life of a worker: its name, and the incarnation of its process


@dataclass(frozen=True)
class Standing:
    """`ready`: it said hello and is not draining. `silent_s`: since its last Progress."""

    life: Life
    role: Role
    ready: bool
    silent_s: float


@dataclass(frozen=True)
class Route:
    """`worker` is told of the request; `prefill` only by that worker."""

    worker: Life
    prefill: Life | None = None

    @property
    def lives(self) -> tuple[Life, ...]:
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)


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


class Router:
    def __init__(self, suspect_s: float) -> None:
        self._suspect_s = suspect_s
        self._routes: dict[str, Route] = {}  # by request
        self._permits: dict[Life, int] = {}
        self._turn = 0

    def permits(self, life: Life) -> int:
        return self._permits.get(life, 0)

    def take(self, request: str, route: Route) -> None:
        if request in self._routes:
            raise Bug(f"request {request} took a permit twice")
        self._routes[request] = route
        for life in route.lives:
            self._permits[life] = self.permits(life) + 1
        self._turn += 1

    def release(self, request: str) -> None:
        if (route := self._routes.pop(request, None)) is None:
            raise Bug(f"request {request} released a permit that it does not hold")
        for life in route.lives:
            self._permits[life] -= 1
            if not self._permits[life]:
                del self._permits[life]

    def eligible(self, standing: Standing) -> bool:
        return standing.ready and standing.silent_s <= self._suspect_s

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
        both, decode, prefill = (
            self._least([one.life for one in able if one.role == role], used)
            for role in ("both", "decode", "prefill")
        )
        pairs = min(len(decode), len(prefill))
        single_cost = self._cost(used, both[:1])
        pair_cost = self._cost(used, [*decode[:1], *prefill[:1]] if pairs else [])
        best = min(single_cost, pair_cost)
        if best == _NEVER or (another and best[0] == (1 if best == single_cost else 2)):
            return None
        singles = len(both) if single_cost == best else 0
        round_, slot = divmod(self._turn, singles + (pairs if pair_cost == best else 0))
        if slot < singles:
            return Route(both[slot])
        # Over all pairs, and each in turn with another partner than before.
        turn = round_ * pairs + slot - singles
        shift = turn // lcm(len(decode), len(prefill))
        return Route(decode[(turn + shift) % len(decode)], prefill[turn % len(prefill)])

    def _least(self, lives: list[Life], used: Collection[Life]) -> list[Life]:
        """Those with the fewest permits, in order; unused ones before used ones."""
        fresh = [life for life in lives if life not in used] or lives
        fewest = min(map(self.permits, fresh), default=0)
        return [life for life in fresh if self.permits(life) == fewest]

    def _cost(self, used: Collection[Life], lives: Sequence[Life]) -> tuple[float, int]:
        if not lives:
            return _NEVER
        return sum(life in used for life in lives), max(map(self.permits, lives))


_NEVER = (float("inf"), 0)
