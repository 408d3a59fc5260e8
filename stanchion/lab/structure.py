"""What a trace's structure is, so that two traces can be compared exactly. Pure.

Hits are those of a cache that forgets nothing: how many leading blocks of each prompt some earlier
prompt (in order of arrival) had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from stanchion.core.recording import Recorded

Blocks = Sequence[object]


@dataclass(frozen=True)
class Structure:
    """`sharing`: a digest of the whole prefix-sharing matrix; see `first_seen`."""

    requests: int
    lengths: tuple[tuple[int, int | None, int], ...]  # prompt, answer, tail
    arrivals: tuple[float, ...]
    gaps: tuple[float | None, ...]
    order: tuple[tuple[int, int], ...]  # session by first appearance, turn
    hits: tuple[int, ...]
    sharing: str

    @property
    def page_hits(self) -> int:
        return sum(self.hits)

    def differences(self, other: Structure) -> list[str]:
        """The names of what is not equal."""
        names = ("requests", "lengths", "arrivals", "gaps", "order", "hits", "sharing")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def structure(requests: Iterable[Recorded]) -> Structure:
    """In order of arrival, equal ones as they come."""
    told = sorted(requests, key=lambda one: one.times.arrival)
    sessions: dict[str, int] = {}
    for one in told:
        sessions.setdefault(one.session, len(sessions))
    prompts = [(*one.blocks, *((one.tail,) if one.tail else ())) for one in told]
    return Structure(
        requests=len(told),
        lengths=tuple((one.input_tokens, one.output_tokens, one.tail_tokens) for one in told),
        arrivals=tuple(one.times.arrival for one in told),
        gaps=tuple(one.think_s for one in told),
        order=tuple((sessions[one.session], one.turn) for one in told),
        hits=tuple(page_hits([one.blocks for one in told])),
        sharing=sharing(prompts),
    )


def page_hits(prompts: Iterable[Blocks]) -> list[int]:
    """Of each prompt, its leading blocks that were there before it."""
    seen: set[object] = set()
    hits = []
    for blocks in prompts:
        found = next((at for at, one in enumerate(blocks) if one not in seen), len(blocks))
        hits.append(found)
        seen.update(blocks)
    return hits


def first_seen(prompts: Iterable[Blocks]) -> list[list[int]]:
    """Each block as the number of its first appearance. Two traces have the same matrix of who
    shares how much with whom exactly if these numbers are equal: hashes are chained, so equal
    numbers at a place are equal prefixes."""
    numbers: dict[object, int] = {}
    return [[numbers.setdefault(one, len(numbers)) for one in blocks] for blocks in prompts]


def sharing(prompts: Iterable[Blocks]) -> str:
    mixed = blake2b(digest_size=16)
    for row in first_seen(prompts):
        mixed.update(b",".join(b"%d" % one for one in row) + b"\n")
    return mixed.hexdigest()
