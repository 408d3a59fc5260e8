"""Plans of a worker that knows one answer, TEXT, and may lie: tokens, log-probabilities, counters.

A prompt is one byte, so what follows n known tokens is TEXT from n - 1 on: an attempt that goes on
behind clean tokens says the rest. Cold scores are a function of (token, place) that all workers
share; a sick attempt logs others from its onset on, as one does that reads somebody else's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stanchion.core.messages import PromptScores, Spec, Start
from stanchion.core.outcome import Completed

from .worker import EOS, Plan, end, say

TEXT = "".join(f"line {at}: {at * 7919 % 1000:03d} de la r\u00e9ponse\n" for at in range(16))
TOKENS = [*TEXT.encode(), EOS]
DRAFTS = 3


def cold(token: int, place: int) -> float:
    return -0.1 - (token * 31 + place * 17) % 100 / 50


def witnessing(start: Start) -> bool:
    return start.sampling.prompt_logprobs is not None and start.sampling.max_tokens == 0


def scored(start: Start) -> Plan:
    logprobs = [cold(token, place) for place, token in enumerate(start.tokens) if place]
    top = [[] for _ in logprobs]
    said = PromptScores(request=start.request, logprobs=logprobs, top=top)
    return [said, end(start, Completed("length"))]


@dataclass
class Attempt:
    """What a worker says: `junk` takes the place of TEXT from `onset` on, and may end early.
    `accepted` drafts a verify step. `gates` stand before the token of their number."""

    onset: int | None = None
    junk: Sequence[int] = ()
    batch: int = 1
    accepted: int = 2
    gates: dict[int, Any] | None = None
    outcome: Any = None

    def __call__(self, start: Start) -> Plan:
        if witnessing(start):
            return scored(start)
        known = len(start.tokens) - 1
        clean = TOKENS[known:] if self.onset is None else TOKENS[known : self.onset]
        tokens = [*clean, *self.junk] if self.onset is not None else clean
        tokens = tokens[: start.sampling.max_tokens]
        logprobs = [
            cold(token, 1 + known + at) - (3.0 if at >= len(clean) else 0.0)
            for at, token in enumerate(tokens)
        ]
        return [*self._said(start, tokens, logprobs), end(start, self._end(start, tokens))]

    def _said(self, start: Start, tokens: list[int], logprobs: list[float]) -> list[Any]:
        said: list[Any] = []
        edges = sorted({*range(1, len(tokens), self.batch), *(self.gates or {}), len(tokens)})
        first = 0
        for edge in edges:
            edge = min(edge, len(tokens))
            if edge > first:
                said.append(
                    say(
                        start,
                        tokens[first:edge],
                        logprobs=logprobs[first:edge],
                        spec=self._spec(edge),
                    )
                )
            if self.gates and edge in self.gates:
                said.append(self.gates[edge])
            first = edge
        return said

    def _spec(self, generated: int) -> Spec | None:
        """The first token comes from the prompt, each step then gives `accepted` and one more."""
        steps = (generated - 1) // (self.accepted + 1)
        if not steps:
            return None
        tokens = steps * (self.accepted + 1)
        return Spec(steps, tokens, steps * DRAFTS, steps * self.accepted)

    def _end(self, start: Start, tokens: list[int]) -> Any:
        if self.outcome is not None:
            return self.outcome
        return Completed("stop" if tokens[-1:] == [EOS] else "length")


def once(first: Callable[[Start], Plan], then: Callable[[Start], Plan]) -> Callable[[Start], Plan]:
    """The first attempt anywhere is one thing, all others and all witnesses another."""
    tried: list[str] = []

    def plan(start: Start) -> Plan:
        if witnessing(start) or tried:
            return then(start)
        tried.append(start.request)
        return first(start)

    return plan
