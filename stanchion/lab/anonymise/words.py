"""Which surrogate stands for which text: a keyed function of the text's tokens, tenant by tenant.

Long stretches are two spans that the key draws: of some 10 thousand million pairs, so two texts in
the same place have the same surrogate practically never. Of short ones there are few, so a table
keeps them apart; where it is full, two may share one, which is counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Literal

from stanchion.lab.anonymise.key import Key
from stanchion.lab.anonymise.pool import Pool
from stanchion.lab.anonymise.tokenised import Ids, Tokenised

TWO_SPANS_FROM = 8  # tokens: from here on chance alone keeps texts apart
PROBES = 8192
LETTERED = 256  # tries at a name of drawn letters
REMEMBERED = 500_000
# How a surrogate begins: amid others, with a space; as the first, bare; or behind a space that is
# there already, and is one token with the word that follows.
Begins = Literal["amid", "bare", "spaced"]
BEGINS: tuple[Begins, ...] = ("amid", "bare", "spaced")


class NotPlaced(Exception):
    """This prompt cannot be had with other words; why, in a word."""


@dataclass
class Words:
    """`shared`: texts that had to share their surrogate with another."""

    key: Key
    tokenised: Tokenised
    code: Pool  # with line breaks
    prose: Pool  # without
    identifiers: dict[int, list[str]]
    shared: int = 0
    _known: OrderedDict[tuple[bytes, int], bytes] = field(default_factory=OrderedDict)
    _taken: dict[tuple[str, int, Begins, bytes], bytes] = field(default_factory=dict)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _used_names: set[tuple[str, str]] = field(default_factory=set)

    def text(self, tenant: str, ids: Ids, tokens: int, begins: Begins, lines: bool) -> bytes:
        """The surrogate of these tokens, so many tokens long. `lines`: it may break them."""
        pool = self.code if lines else self.prose
        content = self.key.draw("text", tenant.encode(), ids.tobytes())
        place = (content, (tokens * 3 + BEGINS.index(begins)) * 2 + lines)
        if (known := self._known.get(place)) is not None:
            self._known.move_to_end(place)
            return known
        made = (
            self._long(pool, content, tokens, begins)
            if tokens >= TWO_SPANS_FROM
            else self._short(pool, tenant, content, tokens, begins)
        )
        self._known[place] = made
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return made

    def _long(self, pool: Pool, content: bytes, tokens: int, begins: Begins) -> bytes:
        half = tokens // 2
        one = self._drawn(pool, content + b"1", half, begins, lambda said: True)
        return one + self._drawn(pool, content + b"2", tokens - half, "amid", lambda said: True)

    def _short(self, pool: Pool, tenant: str, content: bytes, tokens: int, begins: Begins) -> bytes:
        def free(said: bytes) -> bool:
            return self._taken.setdefault((tenant, tokens, begins, said), content) == content

        return self._drawn(pool, content, tokens, begins, free)

    def _drawn(
        self,
        pool: Pool,
        content: bytes,
        tokens: int,
        begins: Begins,
        free: Callable[[bytes], bool],
    ) -> bytes:
        """The first span from a drawn place on that has so many tokens and is free."""
        count, start = len(pool.cuts), self.key.number("span", content)
        fits = b""
        for probe in range(PROBES if tokens else 0):
            cut = (start + probe) % count
            span = pool.span(cut, tokens, begins == "bare")
            if span is None:
                continue
            fits = span if begins == "amid" else span.removeprefix(b" ")
            if free(fits):
                return fits
        if not fits and tokens == 1 and pool.letters:
            fits = pool.letters[start % len(pool.letters)]
        if fits or not tokens:
            self.shared += bool(tokens)
            return fits
        # No span of just this length: a shorter one, and the rest as a span of its own.
        half = tokens // 2
        if not half:
            raise NotPlaced("there is no word of one token")
        begin = self._drawn(pool, content + b"a", half, begins, free)
        return begin + self._drawn(pool, content + b"b", tokens - half, "amid", free)

    def name(self, tenant: str, said: str) -> str:
        """An identifier for an identifier, of as many tokens where there are enough of them."""
        if not said or (tenant, said) in self._names:
            return self._names.get((tenant, said), "")
        size = len(self.tokenised.ids(said))
        known = self.identifiers.get(size, [])
        start = self.key.number("identifier", tenant.encode(), said.encode())
        for probe in range(min(PROBES, len(known))):
            found = known[(start + probe) % len(known)]
            if (tenant, found) not in self._used_names and found != said:
                return self._keep(tenant, said, found)
        for probe in range(LETTERED):
            drawn = self.key.draw("letters", tenant.encode(), said.encode(), b"%d" % probe)
            found = "".join(ascii_letters[byte % len(ascii_letters)] for byte in drawn[: len(said)])
            if (tenant, found) not in self._used_names and len(self.tokenised.ids(found)) == size:
                return self._keep(tenant, said, found)
        return self._keep(tenant, said, f"name_{self.key.name(tenant + said)}")

    def _keep(self, tenant: str, said: str, made: str) -> str:
        self._names[tenant, said] = made
        self._used_names.add((tenant, made))
        return made
