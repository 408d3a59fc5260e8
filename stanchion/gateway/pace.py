"""Which workers are slow: tokens that come for each second that a request waits there. Pure.

Sampled from outside, so a worker that says nothing is as slow as it looks; compared with the others
of its role alone, over about half a minute. Little evidence says little: a worker counts as slow
once its requests take twice as long for a token as those of the others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import exp

from stanchion.gateway.router import Life

MEMORY_S = 30.0
PROMPT_TOKENS = 256  # of a prompt take about as long as one token of an answer
PRIOR_TOKENS = 128.0  # as the others' pace: what little evidence is mixed with
SLOW = 2.0
SLOWEST = 32.0


@dataclass(eq=False)
class _Seen:
    waited_s: float = 0.0  # seconds times requests
    tokens: float = 0.0
    at: float = 0.0


class Paces:
    def __init__(self) -> None:
        self._seen: dict[Life, _Seen] = {}

    def sample(self, life: Life, waiting: int, tokens: float, now: float) -> None:
        """Since the last sample `waiting` requests were there, and so much came of them."""
        seen = self._seen.setdefault(life, _Seen(at=now))
        since = max(0.0, now - seen.at)
        left = exp(-since / MEMORY_S)
        seen.waited_s = seen.waited_s * left + waiting * since
        seen.tokens = seen.tokens * left + tokens
        seen.at = now

    def forget(self, life: Life) -> None:
        """It was silent, or stood still: what was seen of it says nothing of how it will be."""
        self._seen.pop(life, None)

    def keep(self, lives: Container[Life]) -> None:
        """All others are gone."""
        self._seen = {life: seen for life, seen in self._seen.items() if life in lives}

    def factor(self, life: Life, peers: Sequence[Life]) -> float:
        """How many times longer a request takes there than at `peers`; 1 if it is not slow."""
        own = self._seen.get(life)
        others = [self._seen[one] for one in peers if one != life and one in self._seen]
        waited_s, tokens = sum(one.waited_s for one in others), sum(one.tokens for one in others)
        if own is None or not tokens or not waited_s:
            return 1.0
        usual_s = waited_s / tokens
        taken = (own.waited_s / usual_s + PRIOR_TOKENS) / (own.tokens + PRIOR_TOKENS)
        return min(taken, SLOWEST) if taken >= SLOW else 1.0
