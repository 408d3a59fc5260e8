"""How far each worker's answers are trusted: what is suspected, what was confirmed. Pure.

A worker under suspicion is not favoured for what it holds. One with `faults_max` confirmed answers
within `window_s` is out of rotation until its next life, or until an admin lets it back; so is one
that an admin took out. Whoever chooses may still take such a worker where there is no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from stanchion.gateway.router import Life

SUSPICION_S = 60.0  # without a verdict


@dataclass(eq=False)
class _Record:
    confirmed: deque[float] = field(default_factory=deque)  # when
    suspected_until: float = -inf
    out: bool = False


class Trust:
    """`faults_max` 0: nobody goes out by himself."""

    def __init__(self, faults_max: int, window_s: float) -> None:
        self._faults_max = faults_max
        self._window_s = window_s
        self._of: dict[Life, _Record] = {}

    def suspected(self, life: Life, now: float) -> None:
        record = self._record(life)
        record.suspected_until = max(record.suspected_until, now + SUSPICION_S)

    def cleared(self, life: Life, now: float) -> None:
        record = self._record(life)
        if not self._recent(record, now):
            record.suspected_until = -inf

    def confirmed(self, life: Life, now: float) -> bool:
        """True if it goes out of rotation for this."""
        record = self._record(life)
        record.confirmed.append(now)
        record.suspected_until = now + self._window_s
        before = record.out
        record.out = before or 0 < self._faults_max <= self._recent(record, now)
        return record.out and not before

    def take_out(self, life: Life) -> None:
        self._record(life).out = True

    def let_back(self, life: Life) -> None:
        self._of.pop(life, None)

    def suspicious(self, life: Life, now: float) -> bool:
        record = self._of.get(life)
        return record is not None and (record.out or now < record.suspected_until)

    def out(self, life: Life) -> bool:
        record = self._of.get(life)
        return record is not None and record.out

    def keep(self, lives: Iterable[Life]) -> None:
        """All others are gone."""
        self._of = {life: self._of[life] for life in lives if life in self._of}

    def _record(self, life: Life) -> _Record:
        return self._of.setdefault(life, _Record())

    def _recent(self, record: _Record, now: float) -> int:
        while record.confirmed and now - record.confirmed[0] > self._window_s:
            record.confirmed.popleft()
        return len(record.confirmed)
