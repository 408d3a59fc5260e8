"""Which session a request belongs to: as its client says, or as its prompt shows. Pure.

A prompt that goes on where an earlier one ended is its session's next turn. Ended: up to the words
that ask for the answer (the generation prompt), which templates write another way once the answer
is there. A template that drops old reasoning breaks the newest such prefix; an older one is found.
The tables are bounded; what was not used for longest is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stanchion.gateway.record.blocks import TOKEN_BYTES, Chain, link, raw_tokens

SESSIONS_MAX = 65_536
OPEN_MAX = 256  # requests of a session at once


@dataclass
class Session:
    name: str
    turns: int = 0
    open: list[Place] = field(default_factory=list)  # requests that have not ended
    last_end: float | None = None


@dataclass(eq=False)
class Place:
    """Of one request: its session, and its turn there (from 0)."""

    session: Session
    turn: int
    arrival: float
    before: float | None  # when the last of those ended that had
    beside: tuple[Place, ...]  # those that were not known to have ended
    end: float | None = None

    def think_s(self) -> float | None:
        """What the client waited, as far as is known by now. Who arrives while another request of
        the session runs has waited for nothing of it. A client may be quicker than the news that
        its last request has ended, so this is asked when its own has."""
        ends = [one.end for one in self.beside]
        if self.before is not None:
            ends.append(self.before)
        known = [end for end in ends if end is not None and end <= self.arrival]
        return self.arrival - max(known) if known and len(known) == len(ends) else None


class Sessions:
    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._named: OrderedDict[str, Session] = OrderedDict()
        self._stems: OrderedDict[bytes, tuple[int, Session]] = (
            OrderedDict()
        )  # by their last hash; and how long the prompt was
        self._tails: OrderedDict[bytes, dict[int, None]] = OrderedDict()  # by what precedes them
        self._max = sessions_max

    def named(self, name: str, arrival: float) -> Place:
        """As the client says."""
        session = self._named.setdefault(name, Session(name))
        self._named.move_to_end(name)
        _bound(self._named, self._max)
        return _turn(session, arrival)

    def derived(
        self,
        mint: str,
        first: bytes,
        prompt: Chain,
        tokens: Sequence[int],
        stem_tokens: int,
        block_tokens: int,
        arrival: float,
    ) -> Place:
        """As the prompt shows. `first` is its chain's root; `mint`: the name if it is a new one."""
        session = self._found(first, prompt, tokens, block_tokens) or Session(mint)
        self._note(session, first, prompt, tokens, stem_tokens, block_tokens)
        return _turn(session, arrival)

    def _found(
        self, first: bytes, prompt: Chain, tokens: Sequence[int], block_tokens: int
    ) -> Session | None:
        for whole in range(len(prompt.links), -1, -1):
            before = prompt.links[whole - 1] if whole else first
            lengths = self._tails.get(before)
            if lengths is None:
                continue
            raw = raw_tokens(tokens[whole * block_tokens : (whole + 1) * block_tokens])
            for length in sorted(lengths, reverse=True):
                key = link(before, raw[: length * TOKEN_BYTES])
                known = self._stems.get(key)
                if known is not None and known[0] < len(tokens):  # the same once more is no turn
                    self._stems.move_to_end(key)
                    self._tails.move_to_end(before)
                    return known[1]
        return None

    def _note(
        self,
        session: Session,
        first: bytes,
        prompt: Chain,
        tokens: Sequence[int],
        stem_tokens: int,
        block_tokens: int,
    ) -> None:
        whole, length = divmod(stem_tokens, block_tokens)
        before = prompt.links[whole - 1] if whole else first
        rest = tokens[whole * block_tokens : stem_tokens]
        self._stems[link(before, raw_tokens(rest))] = (len(tokens), session)
        self._tails.setdefault(before, {})[length] = None
        self._tails.move_to_end(before)
        _bound(self._stems, self._max)
        _bound(self._tails, self._max)

    def ended(self, place: Place, end: float) -> float | None:
        """What its client had waited before it; see `Place`."""
        session, place.end = place.session, end
        waited, place.beside = place.think_s(), ()
        if place in session.open:
            session.open.remove(place)
        session.last_end = end if session.last_end is None else max(session.last_end, end)
        return waited


def _turn(session: Session, arrival: float) -> Place:
    place = Place(session, session.turns, arrival, session.last_end, tuple(session.open))
    session.turns += 1
    session.open.append(place)
    del session.open[:-OPEN_MAX]  # the news of an end may be lost
    return place


def _bound(table: OrderedDict[Any, Any], most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
