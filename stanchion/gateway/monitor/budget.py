"""What quality may cost: prefill tokens for witnesses, attempts made again. And whose fault a
string of suspicions is. Pure: the time comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Literal, assert_never

from stanchion.gateway.monitor.witness import Clean, Confirmed, Unwitnessed, Verdict
from stanchion.gateway.monitor.words import ACCEPTANCE, Kind

WINDOW_S = 60.0
SLOTS = 60  # the window moves on in sixtieths
CLEARED_IN_A_ROW = 3


class Window:
    """A sum over the last minute, to the second."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, float]] = deque()
        self._total = 0.0

    def add(self, amount: float, now: float) -> None:
        slot = int(now * SLOTS / WINDOW_S)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, self._slots[-1][1] + amount)
        else:
            self._slots.append((slot, amount))
        self._total += amount

    def total(self, now: float) -> float:
        oldest = int(now * SLOTS / WINDOW_S) - SLOTS
        while self._slots and self._slots[0][0] <= oldest:
            self._total -= self._slots.popleft()[1]
        return self._total


class Allowance:
    """So many prefill tokens a minute, for all witnesses together."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._spent = Window()

    def take(self, tokens: int, now: float) -> bool:
        """False, and nothing is taken, where it does not fit."""
        if self._spent.total(now) + tokens > self._tokens:
            return False
        self._spent.add(tokens, now)
        return True


class RetryBudget:
    """Attempts made again are at most `share` of the requests of the last minute, over all and for
    each tenant. `spare` may be made besides, so that little traffic has any: (attempts - spare) /
    requests is then at most 1 + share, whoever asks and whatever breaks."""

    def __init__(self, share: float, spare: int) -> None:
        self._share = share
        self._spare = spare
        self._all = (Window(), Window())
        self._tenants: dict[str, tuple[Window, Window]] = {}

    def request(self, tenant: str, now: float) -> None:
        for requests, _ in self._accounts(tenant, now):
            requests.add(1, now)

    def allows(self, tenant: str, now: float) -> bool:
        return all(
            retries.total(now) + 1 <= self._share * requests.total(now) + self._spare
            for requests, retries in self._accounts(tenant, now)
        )

    def retry(self, tenant: str, now: float) -> bool:
        """False, and nothing is taken, where it is spent."""
        allowed = self.allows(tenant, now)
        if allowed:
            for _, retries in self._accounts(tenant, now):
                retries.add(1, now)
        return allowed

    def _accounts(self, tenant: str, now: float) -> tuple[tuple[Window, Window], ...]:
        if tenant not in self._tenants:
            self._forget(now)
            self._tenants[tenant] = (Window(), Window())
        return self._all, self._tenants[tenant]

    def _forget(self, now: float) -> None:
        """Tenants that asked for nothing within the window: their accounts are empty."""
        quiet = [name for name, (asked, _) in self._tenants.items() if not asked.total(now)]
        for name in quiet:
            del self._tenants[name]


Finding = Literal["clean", "confirmed", "unwitnessed"]


class DraftFaults:
    """Acceptance that keeps looking sick on one worker while witnesses clear the text: its drafts
    are at fault, its answers are right, and a retry would help nobody."""

    def __init__(self) -> None:
        self._cleared: dict[Hashable, int] = {}
        self._faulty: dict[Hashable, None] = {}

    def __contains__(self, worker: Hashable) -> bool:
        return worker in self._faulty

    def found(self, worker: Hashable, kind: Kind, finding: Finding) -> bool:
        """What a witness said of a suspicion there. True if the fault is known from now on."""
        if kind not in ACCEPTANCE or finding == "unwitnessed":
            return False
        if finding == "confirmed":
            self._cleared.pop(worker, None)
            self._faulty.pop(worker, None)
            return False
        self._cleared[worker] = self._cleared.get(worker, 0) + 1
        if self._cleared[worker] < CLEARED_IN_A_ROW or worker in self._faulty:
            return False
        self._faulty[worker] = None
        return True


def finding(said: Verdict) -> Finding:
    match said:
        case Clean():
            return "clean"
        case Confirmed():
            return "confirmed"
        case Unwitnessed():
            return "unwitnessed"
        case _:
            assert_never(said)
