"""One answer of a request: the worker's messages in, what the client may see out. Pure.

Promises, for every way the worker batches its tokens (speculation gives several at once):
* text, token records, usage and finish reason are the same;
* a stop string ends the choice at the token that completes it, however many more had arrived;
* only a `Completed` outcome, or our own stop string, ends it as a success;
* the end token's own text is not part of the answer (as in vLLM) unless stops are included.

Text follows characters and stops, so it may lag behind the tokens; token records (ids,
log-probabilities) do not lag, and cover every token that usage counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan

from stanchion.core.messages import Spec, TopToken
from stanchion.core.outcome import Completed, Outcome, OutputSuspect, Reason
from stanchion.gateway.detok import TextFold
from stanchion.gateway.stops import StopFold, StopSet


@dataclass(frozen=True)
class Style:
    """How a choice is to be read: the same for all choices of a request."""

    pieces: Sequence[bytes]
    skipped: frozenset[int] = frozenset()
    stops: StopSet = field(default_factory=lambda: StopSet(()))
    include_stop: bool = False
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # stops are not looked for in the text of these, as in vLLM


@dataclass(frozen=True)
class Scored:
    """One token that usage counts. `offset`: characters decoded before it."""

    token: int
    logprob: float | None
    top: Sequence[TopToken]
    offset: int


@dataclass(frozen=True)
class Piece:
    text: str = ""
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class End:
    """How a choice ended well. `matched`: the stop string or stop id, if one did it."""

    reason: Reason
    matched: str | int | None = None


class ChoiceFold:
    def __init__(self, style: Style) -> None:
        self._style = style
        self._text = TextFold(style.pieces, style.skipped)
        self._stops = StopFold(style.stops, style.include_stop)
        self._characters = 0
        self._waiting: int | None = None  # an end token: the last one, or an ordinary one?
        self.tokens = 0
        self.cached_tokens = 0
        self.spec: Spec | None = None
        self.draft_record: list[tuple[list[int], int]] | None = None  # where a lab asked for it
        self.end: End | None = None
        self.failed: Outcome | None = None

    def over(self) -> bool:
        return self.end is not None or self.failed is not None

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[TopToken]]
    ) -> Piece:
        text: list[str] = []
        scored: list[Scored] = []
        for place, token in enumerate(tokens):
            text.append(self._decide(follows=True))
            if self.over():
                break
            logprob = logprobs[place] if place < len(logprobs) else None
            if logprob is not None and isnan(logprob):
                self.failed = OutputSuspect("a token's log-probability is not a number")
                break
            tops = top[place] if place < len(top) else ()
            scored.append(Scored(token, logprob, tops, self._characters))
            text.append(self._take(token))
        return Piece("".join(text), tuple(scored))

    def finish(self, outcome: Outcome) -> Piece:
        """The worker's last word. Does nothing once the choice is over."""
        if self.over():
            return Piece()
        if not isinstance(outcome, Completed):
            self.failed = outcome
            return Piece()
        stopped = self._waiting if outcome.reason == "stop" else None
        text = self._decide(follows=stopped is None or self._style.include_stop)
        text += self._read(self._text.finish())
        if not self.over():
            text += self._stops.finish()
            self.end = End(outcome.reason, stopped)
        return Piece(text)

    def _take(self, token: int) -> str:
        self.tokens += 1
        if token in self._style.end_ids:
            self._waiting = token
            return ""
        return self._read(self._text.push(token))

    def _decide(self, follows: bool) -> str:
        """An end token that others follow was an ordinary one: its text counts."""
        token, self._waiting = self._waiting, None
        if token is None or not follows:
            return ""
        return self._read(self._text.push(token))

    def _read(self, text: str) -> str:
        self._characters += len(text)
        if not text or not self._style.stops or self.tokens <= self._style.min_tokens:
            return text
        shown = self._stops.push(text)
        if self._stops.matched is not None:
            self.end = End("stop", self._stops.matched)
        return shown
