"""One answer of a request: the worker's messages in, what the client may see out. Pure.

Promises, for every way the worker batches its tokens (speculation gives several at once):
* text, token records, usage and finish reason are the same;
* a stop string ends the choice at the token that completes it, however many more had arrived;
* a stop string is looked for in all text, reasoning and calls and their markers too;
* only a `Completed` outcome, our own stop string, or the last call that the client wants, ends it
  as a success;
* the end token's own text is not part of the answer (as in vLLM) unless stops are included.

Text follows characters and stops, so it may lag behind the tokens; token records (ids,
log-probabilities) do not lag, and cover every token that usage counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan

from stanchion.core.messages import Counted, Spec, TopToken
from stanchion.core.outcome import Completed, Outcome, OutputSuspect, Reason
from stanchion.gateway.detok import TextFold
from stanchion.gateway.markup import Content, Markup, MarkupFold, Part, merged
from stanchion.gateway.stops import StopFold, StopSet


@dataclass(frozen=True)
class Style:
    """How a choice is to be read: the same for all choices of a request."""

    pieces: Sequence[bytes]
    skipped: frozenset[int] = frozenset()
    stops: StopSet = field(default_factory=lambda: StopSet(()))
    include_stop: bool = False
    end_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()  # those of `end_ids` that are no stop to be named
    min_tokens: int = 0  # stops are not looked for in the text of these, as in vLLM
    markup: Markup | None = None  # None: all text is content


@dataclass(frozen=True)
class Scored:
    """One token that usage counts. `offset`: characters decoded before it."""

    token: int
    logprob: float | None
    top: Sequence[TopToken]
    offset: int


@dataclass(frozen=True)
class Piece:
    parts: tuple[Part, ...] = ()
    scored: tuple[Scored, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Content))


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
        self._markup = MarkupFold(style.markup) if style.markup else None
        self._parts: list[Part] = []
        self._characters = 0
        self._waiting: int | None = None  # an end token: the last one, or an ordinary one?
        self.tokens = 0
        self.cached_tokens = 0
        self.spec: Spec | None = None
        self.draft_record: list[tuple[list[int], int]] | None = None  # where a lab asked for it
        self.counted: Counted | None = None  # where a server's tokens are not ours
        self.end: End | None = None
        self.failed: Outcome | None = None

    def over(self) -> bool:
        return self.end is not None or self.failed is not None

    @property
    def completion_tokens(self) -> int:
        """What the client is told, and pays for."""
        return self.tokens if self.counted is None else self.counted.completion

    @property
    def called(self) -> bool:
        """It ended by itself, with calls that are whole: now it is the client's turn to make them.
        Never where something cut it short (`length`, a stop string)."""
        if self.end is None or self.end.reason != "stop" or isinstance(self.end.matched, str):
            return False
        return self._markup is not None and self._markup.complete

    @property
    def calls(self) -> tuple[int, int]:
        """How many were whole, and how many were not."""
        if self._markup is None:
            return 0, 0
        return self._markup.closed, self._markup.opened - self._markup.closed

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[TopToken]]
    ) -> Piece:
        scored: list[Scored] = []
        for place, token in enumerate(tokens):
            self._decide(follows=True)
            if self.over():
                break
            logprob = logprobs[place] if place < len(logprobs) else None
            if logprob is not None and isnan(logprob):
                self.failed = OutputSuspect("a token's log-probability is not a number")
                break
            tops = top[place] if place < len(top) else ()
            scored.append(Scored(token, logprob, tops, self._characters))
            self._take(token)
        return Piece(self._taken(), tuple(scored))

    def finish(self, outcome: Outcome) -> Piece:
        """The worker's last word. Does nothing once the choice is over."""
        if self.over():
            return Piece()
        if not isinstance(outcome, Completed):
            self.failed = outcome
            return Piece()
        stopped = self._waiting if outcome.reason == "stop" else None
        self._decide(follows=stopped is None or self._style.include_stop)
        self._read(self._text.finish())
        if not self.over():
            self._say(self._stops.finish())
            if not self.over():
                named = None if stopped in self._style.eos_ids else stopped
                self._end(End(outcome.reason, named))
        return Piece(self._taken())

    def _take(self, token: int) -> None:
        self.tokens += 1
        if token in self._style.end_ids:
            self._waiting = token
        else:
            self._read(self._text.push(token))

    def _decide(self, follows: bool) -> None:
        """An end token that others follow was an ordinary one: its text counts."""
        token, self._waiting = self._waiting, None
        if token is not None and follows:
            self._read(self._text.push(token))

    def _read(self, text: str) -> None:
        self._characters += len(text)
        if not text or not self._style.stops or self.tokens <= self._style.min_tokens:
            self._say(text)
            return
        self._say(self._stops.push(text))
        if self._stops.matched is not None and not self.over():
            self._end(End("stop", self._stops.matched))

    def _say(self, text: str) -> None:
        if self._markup is None:
            if text:
                self._parts.append(Content(text))
            return
        self._parts += self._markup.push(text)
        if self._markup.over and not self.over():
            self._end(End("stop"))

    def _end(self, end: End) -> None:
        if self._markup is not None:
            self._parts += self._markup.finish()
        self.end = end

    def _taken(self) -> tuple[Part, ...]:
        parts, self._parts = self._parts, []
        return merged(parts)
