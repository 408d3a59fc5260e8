"""The circuit breaker of each worker: fed by whose fault an ending was, and by nothing else. Pure.

    closed      all may pass. Opens once, within `window_s`, there were `faults_min` faults of the
                worker's own and they were at least half of what ended
    open        nobody passes for `rest_s`
    half open   `probes` requests pass. The first that ends well closes it, one that fails by the
                worker's fault opens it, any other makes room for another probe. One that has
                spoken for `proof_s` counts as one that ended well, one that has said nothing for
                `probe_s` as a fault: so this state is always left.

What clients do, back-pressure and wrong data never open it (D24). Times are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from stanchion.core.outcome import FaultOwner

State = Literal["closed", "open", "half_open"]
ENDINGS_MAX = 256


@dataclass(frozen=True)
class Rules:
    faults_min: int
    rest_s: float
    probes: int
    probe_s: float
    proof_s: float = 2.0
    window_s: float = 30.0


@dataclass(eq=False)
class _Probe:
    began_at: float
    said_at: float | None = None  # its first word


class Breaker:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.state: State = "closed"
        self.opened = 0
        self._until = 0.0
        self._ended: deque[tuple[float, bool]] = deque(maxlen=ENDINGS_MAX)  # when, and if a fault
        self._probes: dict[str, _Probe] = {}

    def admits(self, now: float) -> bool:
        self.tick(now)
        if self.state == "half_open":
            return len(self._probes) < self._rules.probes
        return self.state == "closed"

    def taken(self, request: str, now: float) -> None:
        """It was given this request."""
        if self.state == "half_open":
            self._probes[request] = _Probe(now)

    def said(self, request: str, now: float) -> None:
        if request in self._probes:
            self._probes[request].said_at = now

    def ended(self, request: str, well: bool, owner: FaultOwner | None, now: float) -> None:
        """`owner` where it did not end well. Endings of requests from before it opened say nothing
        of how it is since."""
        probe, fault = self._probes.pop(request, None), owner == "worker"
        if probe is not None:
            if fault:
                self._open(now)
            elif well or probe.said_at is not None:
                self._close()
        elif self.state == "closed" and (well or fault):
            self._ended.append((now, fault))
            if fault and self._too_many(now):
                self._open(now)

    def tick(self, now: float) -> None:
        if self.state == "open" and now >= self._until:
            self.state = "half_open"
        for probe in list(self._probes.values()):
            if probe.said_at is not None and now - probe.said_at >= self._rules.proof_s:
                self._close()
                return
            if probe.said_at is None and now - probe.began_at >= self._rules.probe_s:
                self._open(now)
                return

    def _too_many(self, now: float) -> bool:
        while self._ended and now - self._ended[0][0] > self._rules.window_s:
            self._ended.popleft()
        faults = sum(fault for _, fault in self._ended)
        return faults >= self._rules.faults_min and 2 * faults >= len(self._ended)

    def _open(self, now: float) -> None:
        self.state, self._until = "open", now + self._rules.rest_s
        self.opened += 1
        self._forget()

    def _close(self) -> None:
        self.state = "closed"
        self._forget()

    def _forget(self) -> None:
        self._ended.clear()
        self._probes.clear()


@dataclass
class Breakers:
    """One a life of a worker: a new life begins closed."""

    rules: Rules
    _of: dict[tuple[str, int], Breaker] = field(default_factory=dict)

    def of(self, life: tuple[str, int]) -> Breaker:
        if life not in self._of:
            self._of[life] = Breaker(self.rules)
        return self._of[life]

    def keep(self, lives: Iterable[tuple[str, int]]) -> None:
        """All others are gone."""
        self._of = {life: self._of[life] for life in lives if life in self._of}
