"""One generation request, from its `Ask` to the last byte: starts, follows, answers, lets go.

It is the same for every API; what the bytes look like is its `Dialect`'s business.

Promises: the response starts with a worker's first message, so an error before any token has
its HTTP status; a client that leaves is noticed while waiting, streaming and blocked on a write,
and what it had running is aborted at once; nothing but the end of every choice writes a success.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from uuid import uuid4

from stanchion.core.errors import ServeError
from stanchion.core.messages import PromptScores
from stanchion.core.outcome import Cancelled, Leaver, Outcome, worse
from stanchion.gateway.answer import Answer
from stanchion.gateway.choice import ChoiceFold, Piece
from stanchion.gateway.dialect import Dialect
from stanchion.gateway.failures import failure
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.integrity import Reader
from stanchion.gateway.ledger import Mail, joined
from stanchion.gateway.markup import merged
from stanchion.gateway.metrics import Metrics, tag
from stanchion.gateway.openai import Ask
from stanchion.gateway.record.attempts import Attempts
from stanchion.gateway.record.course import Course, Over
from stanchion.gateway.replies import Json, prompt_tokens
from stanchion.gateway.state import acceptance
from stanchion.gateway.web import JSON, Call

STREAM = b"text/event-stream; charset=utf-8"
LARGE_REPLY_TOKENS = 2000
SESSION = b"x-session-id"
PREPARE_S = 0.002  # by then the request has left, and its first token has hardly come
IDLE_S = 10.0  # a stream says at least so often that it lives
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def mint() -> str:
    return uuid4().hex


def session_of(tenant: str, headers: Mapping[bytes, bytes]) -> str:
    """A name of our own for the conversation that a client says this belongs to."""
    said = headers.get(SESSION, b"")
    if not said:
        return ""
    return blake2b(said, digest_size=16, key=tenant.encode()[:64], person=b"session").hexdigest()


@dataclass
class _Choice:
    ticket: Reader
    fold: ChoiceFold
    attempts: Attempts
    pieces: list[Piece] = field(default_factory=list)
    scores: PromptScores | None = None
    told: bool = False  # its finish chunk was written
    last_at: float | None = None

    def whole(self) -> Piece:
        parts = merged(part for piece in self.pieces for part in piece.parts)
        return Piece(parts, tuple(one for piece in self.pieces for one in piece.scored))


def _choice(ticket: Reader, fold: ChoiceFold) -> _Choice:
    attempts = ticket.attempts if isinstance(ticket, Answer) else Attempts()
    return _Choice(ticket, fold, attempts)


_LEFT: Outcome = Cancelled("client")


class _Silence:
    """Rings when a stream that has begun has said nothing for IDLE_S, whatever its worker does.
    One timer a stream, and none a chunk."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._said_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.due = False

    def said(self) -> None:
        self.due, self._said_at = False, asyncio.get_running_loop().time()
        if self._timer is None:
            self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._said_at + IDLE_S - loop.time()
        if left <= 0:
            self.due, left = True, IDLE_S
            self._ring()
        self._timer = loop.call_later(left, self._look)


class Generation:
    def __init__(
        self,
        call: Call,
        ask: Ask,
        tenant: str,
        dialect: Dialect,
        fleet: Fleet,
        metrics: Metrics,
        course: Course,
        priority: int = 0,
    ) -> None:
        self._call = call
        self._ask = ask
        self._dialect = dialect
        self._fleet = fleet
        self._tenant = tenant
        self._metrics = metrics
        self._bell = asyncio.Event()
        self._silence = _Silence(self._bell.set)
        self._began = time.monotonic()
        self._course = course
        starts = ask.starts(tenant, mint, session_of(tenant, call.headers), priority)
        tickets = fleet.integrity.start(starts, self._bell.set, ask.style, ask.stream, mint)
        course.send = time.monotonic()
        self.choices = [_choice(ticket, ChoiceFold(ask.style)) for ticket in tickets]
        self.folds = [choice.fold for choice in self.choices]
        self._writer = dialect.writer(ask, call.name, int(time.time()), self.folds)
        metrics.accepted(sum(map(len, ask.prompts)))

    async def run(self) -> ServeError | None:
        """The error to answer with, if the response has not started; None if all is said."""
        preparing = asyncio.get_running_loop().call_later(PREPARE_S, self._prepare)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                try:
                    return await (self._stream() if self._ask.stream else self._whole())
                finally:
                    watch.cancel()
        finally:
            preparing.cancel()
            self._silence.stop()
            self._leave()
            self._account()
            self._course.ends(time.monotonic())

    def _prepare(self) -> None:
        for choice in self.choices:
            if isinstance(choice.ticket, Answer):
                choice.ticket.prepare()

    def over(self) -> Over:
        """How the first choice ended."""
        first = self.choices[0]
        fold = first.fold
        reason = fold.end.reason if fold.end else None
        return Over(
            outcome="completed" if fold.end else tag(fold.failed or _LEFT),
            finish="tool_calls" if fold.called else reason,
            output_tokens=fold.tokens,
            cached_tokens=fold.cached_tokens,
            spec=fold.spec,
            accepts=first.attempts.accepts(),
            attempts=first.attempts.all(),
        )

    def outcome(self) -> str:
        """The worst of the choices, in a word, for the log."""
        if all(fold.end is not None for fold in self.folds):
            return "completed"
        return tag(self._worst() or _LEFT)

    def routed(self) -> tuple[str, str]:
        """The workers that the first choice was given last, and why these."""
        reader = self.choices[0].ticket
        return ",".join(name for name, _ in reader.lives), reader.why

    def states(self) -> list[Json]:
        """Of each choice that goes on, without a word of it."""
        return [
            {
                "id": self._call.name,
                "tenant": self._tenant,
                "workers": [name for name, _ in choice.ticket.lives],
                "routed": choice.ticket.why,
                "prompt_tokens": len(self._ask.prompt_of(at)),
                "tokens": choice.fold.tokens,
                "seconds": round(time.monotonic() - self._began, 3),
                **acceptance(choice.fold.spec),
            }
            for at, choice in enumerate(self.choices)
            if not choice.fold.over()
        ]

    @property
    def prompt_tokens(self) -> int:
        return prompt_tokens(self._ask, self.folds)

    @property
    def generated_tokens(self) -> int:
        return sum(fold.completion_tokens for fold in self.folds)

    def abort(self, by: Leaver) -> None:
        """End it now; its client is told."""
        for choice in self.choices:
            self._fleet.integrity.leave(choice.ticket, by)

    # ---- the two ways -----------------------------------------------------------------------

    async def _whole(self) -> ServeError | None:
        while not all(fold.over() for fold in self.folds):
            await self._news()
            if (error := self._failed()) is not None:
                return error
            if self._client_left():
                return None
        pieces = [choice.whole() for choice in self.choices]
        scores = [choice.scores for choice in self.choices[:: self._ask.n]]
        size = sum(len(piece.scored) for piece in pieces)
        size += sum(len(one.logprobs) for one in scores if one is not None)
        if self._ask.with_scores and size > LARGE_REPLY_TOKENS:
            # Log-probabilities of a long prompt take seconds to write: others stream meanwhile.
            written = await asyncio.to_thread(self._writer.whole, pieces, scores)
        else:
            written = self._writer.whole(pieces, scores)
        self._course.byte(time.monotonic())
        self._course.ends(time.monotonic())
        await self._call.whole(200, JSON, written)
        return None

    async def _stream(self) -> ServeError | None:
        while not all(fold.over() for fold in self.folds):
            await self._news()
            if self._silence.due:
                await self._write(self._writer.idle())
            if self._client_left():
                return None
            error = self._failed()
            if error is not None and not self._call.started:
                return error
            if not self._call.started and self._held_back():
                continue
            if not self._call.started:
                await self._call.start(200, STREAM, _STREAM_HEADERS)
                self._course.byte(time.monotonic())
                await self._write(self._writer.opening())
            if written := self._chunks():
                await self._write(written)
            if error is not None:
                # The body ends here without its end mark, and the connection with it: a client
                # that does not know `error` events still cannot take this for a whole answer.
                await self._write(self._dialect.failed(error, self._call.name))
                return None
        self._course.ends(time.monotonic())
        await self._call.send({"type": "http.response.body", "body": self._writer.done()})
        return None

    async def _write(self, part: bytes) -> None:
        await self._call.write(part)
        self._silence.said()

    def _held_back(self) -> bool:
        """Nothing may be given out yet, so an error would still have its HTTP status."""
        return not any(fold.tokens or fold.over() for fold in self.folds)

    def _chunks(self) -> bytes:
        """What the client has not seen of each choice, and its finish where it ended well."""
        said: list[bytes] = []
        for index, choice in enumerate(self.choices):
            piece = choice.whole()
            choice.pieces.clear()
            if piece.parts or piece.scored:
                said.append(self._writer.delta(index, piece))
            if choice.fold.end is not None and not choice.told:
                choice.told = True
                said.append(self._writer.final(index))
        return b"".join(said)

    # ---- what came --------------------------------------------------------------------------

    async def _news(self) -> None:
        if self._bell.is_set():
            await asyncio.sleep(0)  # more had come already: let the others have their turn first
        await self._bell.wait()
        self._bell.clear()
        for choice in self.choices:
            if (mail := choice.ticket.take()) is not None and not choice.fold.over():
                self._read(choice, mail)

    def _read(self, choice: _Choice, mail: Mail) -> None:
        fold = choice.fold
        fold.cached_tokens = mail.cached_tokens
        fold.spec = mail.spec or fold.spec
        fold.draft_record = mail.draft_record
        fold.counted = mail.counted or fold.counted
        choice.scores = joined(choice.scores, mail.scores)
        if not isinstance(choice.ticket, Answer):
            choice.attempts.came(mail, choice.ticket.lives)
        before = fold.tokens
        piece = fold.push(mail.tokens, mail.logprobs, mail.top)
        new = fold.tokens - before
        if mail.came is not None and not self._ask.stream:
            new = mail.came  # all of it is held back to its end, and timed as it comes
        self._time(choice, new)
        self._keep(choice, piece)
        if mail.ended is not None:
            self._keep(choice, fold.finish(mail.ended))
        if fold.over():
            self._fleet.integrity.leave(choice.ticket, "stop_string" if fold.end else "monitor")

    def _keep(self, choice: _Choice, piece: Piece) -> None:
        choice.pieces.append(piece)
        if choice is self.choices[0]:
            self._course.piece(piece, time.monotonic())

    def _time(self, choice: _Choice, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        self._course.token(now)
        if choice.last_at is None:
            self._metrics.first_token(now - self._began)
        else:
            self._metrics.next_tokens(now - choice.last_at, tokens)
        choice.last_at = now
        self._metrics.generated(tokens)

    def _worst(self) -> Outcome | None:
        failed = [fold.failed for fold in self.folds if fold.failed is not None]
        return reduce(worse, failed) if failed else None

    def _failed(self) -> ServeError | None:
        worst = self._worst()
        return None if worst is None or worst == _LEFT else failure(worst)

    def _client_left(self) -> bool:
        return any(fold.failed == _LEFT for fold in self.folds)

    # ---- letting go -------------------------------------------------------------------------

    async def _watch(self) -> None:
        await self._call.gone()
        self._course.left = time.monotonic(), self.folds[0].tokens
        self._leave()

    def _leave(self) -> None:
        """Whatever is still running has no reader any more."""
        for choice in self.choices:
            self._fleet.integrity.leave(choice.ticket, "client")

    def _account(self) -> None:
        seconds = time.monotonic() - self._began
        for index, fold in enumerate(self.folds):
            reason = fold.end.reason if fold.end else None
            prompt = len(self._ask.prompt_of(index))
            self._metrics.called(*fold.calls)
            self._metrics.ended(fold.failed or _LEFT, reason, prompt, fold.cached_tokens, seconds)
