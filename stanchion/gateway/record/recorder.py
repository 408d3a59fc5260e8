"""Records requests to a folder (`--record DIR`), on a thread of its own.

Promises: a request never waits for its record. What the bounded queue cannot take, and what the
disk does not, is dropped and counted. What came within EVERY_S is worked through together, and not
with a thread woken for each request; a crash loses so much besides. The key of all hashes and
pseudonyms is drawn at the start, kept in memory and never written, so a recording's hashes mean
nothing beyond it. Content is written only where that was asked for.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from stanchion.core.recording import ClientAbort, Content, Header, Recorded, Times
from stanchion.gateway import journal
from stanchion.gateway.choice import Piece
from stanchion.gateway.markup import CallArguments, CallCut, CallOpened, Reasoning
from stanchion.gateway.record.blocks import Chain, chain, pseudonym, raw_tokens, root
from stanchion.gateway.record.course import Arrived, Course, Over
from stanchion.gateway.record.files import Files
from stanchion.gateway.record.segments import Marked, Marks, segments, stem
from stanchion.gateway.record.sessions import Place, Sessions

QUEUE_MAX = 8192
EVERY_S = 0.1
QUEUE_BYTES_MAX = 256 * 2**20  # of bodies that are kept until their request has ended
CLOSE_S = 10.0
Lost = Literal["queue_full", "disk", "unreadable", "oldest_segment"]
LOST: tuple[Lost, ...] = ("queue_full", "disk", "unreadable", "oldest_segment")


@dataclass
class Entry:
    """One request, from arrival to end. What the thread found out about it is `known`."""

    arrived: Arrived
    course: Course
    known: _Known | None = None


@dataclass(frozen=True)
class _Known:
    place: Place
    prompt: Chain
    head: Recorded = field(repr=False)


class Recorder:
    def __init__(
        self,
        folder: Path,
        content: bool,
        bytes_max: int,
        marks: Marks,
        header: Callable[[], Header | None],
    ) -> None:
        """`header` is asked on the caller's thread, until it knows. Raise ConfigError."""
        self.content = content
        self.written = 0
        self.written_bytes = 0
        self.lost: Counter[Lost] = Counter()
        self.origin = time.monotonic()
        self._origin_unix_s = time.time()
        self._files = Files(folder, bytes_max)
        self._marks = marks
        self._ask_header = header
        self._header: Header | None = None
        self._key = secrets.token_bytes(32)
        self._sessions = Sessions()
        self._queue: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._taken = 0  # bytes of bodies, counted by the gateway's thread
        self._released = 0  # counted by this one's
        self._headed = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    # ---- the gateway's thread ---------------------------------------------------------------

    def arrived(self, arrived: Arrived, course: Course) -> Entry | None:
        """What to give to `ended`; None if it is not recorded."""
        if self._header is None:
            self._header = self._ask_header()
        header, size = self._header, len(arrived.raw or b"")
        if header is None:
            return None
        if self._taken - self._released + size > QUEUE_BYTES_MAX:
            self.lost["queue_full"] += 1
            return None
        entry = Entry(arrived, course)
        if not self._put(lambda: self._hear(entry, header)):
            return None
        self._taken += size
        return entry

    def ended(self, entry: Entry, over: Over) -> None:
        if not self._put(lambda: self._write(entry, over)):
            self._taken -= len(entry.arrived.raw or b"")

    def close(self) -> None:
        """Writes what is queued."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _put(self, work: Callable[[], None]) -> bool:
        if len(self._queue) >= QUEUE_MAX:
            self.lost["queue_full"] += 1
            return False
        self._queue.append(work)
        return True

    # ---- its own ----------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S)
            while self._queue:
                self._queue.popleft()()
        self._files.close()

    def _hear(self, entry: Entry, header: Header) -> None:
        arrived, at = entry.arrived, entry.course.arrival - self.origin
        assert header.block_tokens is not None
        first = root(self._key, arrived.tenant, arrived.salt)
        raw = raw_tokens(arrived.tokens)
        prompt, marked = chain(first, raw, header.block_tokens), Marked.of(raw, self._marks)
        if arrived.session:
            name = pseudonym(self._key, f"{arrived.tenant}\0{arrived.session}")
            place = self._sessions.named(name, at)
        else:
            stem_tokens = stem(marked, self._marks)
            place = self._sessions.derived(
                arrived.request, first, prompt, arrived.tokens, stem_tokens, header.block_tokens, at
            )
        entry.known = _Known(place, prompt, self._head(arrived, place, prompt, marked, at))

    def _head(
        self, arrived: Arrived, place: Place, prompt: Chain, marked: Marked, at: float
    ) -> Recorded:
        return Recorded(
            request=arrived.request,
            session=place.session.name,
            turn=place.turn,
            tenant=pseudonym(self._key, arrived.tenant),
            api=arrived.api,
            model=arrived.model,
            times=Times(arrival=at),
            input_tokens=len(arrived.tokens),
            max_tokens=arrived.sampling.max_tokens,
            choices=arrived.choices,
            stream=arrived.stream,
            sampling=arrived.sampling,
            blocks=prompt.blocks,
            tail_tokens=prompt.tail_tokens,
            tail=prompt.shown_tail,
            segments=segments(marked, self._marks, arrived.tools),
        )

    def _write(self, entry: Entry, over: Over) -> None:
        known, course = entry.known, entry.course
        assert known is not None, "what arrived was heard before its end"
        assert course.end is not None, "it was noted before this was told"
        waited = self._sessions.ended(known.place, course.end - self.origin)
        try:
            line = msgspec.json.encode(self._whole(entry, known, over, waited)) + b"\n"
        except (msgspec.DecodeError, RecursionError):  # a body that only a typed reader can read
            self.lost["unreadable"] += 1
        else:
            self._append(line)
        self._released += len(entry.arrived.raw or b"")

    def _whole(self, entry: Entry, known: _Known, over: Over, waited: float | None) -> Recorded:
        course = entry.course
        return msgspec.structs.replace(
            known.head,
            think_s=waited,
            times=self._times(course),
            output_tokens=over.output_tokens,
            cached_tokens=over.cached_tokens,
            aborted=_aborted(course) if over.outcome == "cancelled" else None,
            attempts=over.attempts,
            spec=over.spec,
            accepts=over.accepts,
            outcome=over.outcome,
            finish=over.finish,
            content=_content(entry) if self.content else None,
        )

    def _append(self, line: bytes) -> None:
        try:
            if not self._headed:
                assert self._header is not None
                header = msgspec.structs.replace(self._header, origin_unix_s=self._origin_unix_s)
                self._files.header(header)
                self._headed = True
            self.lost["oldest_segment"] += self._files.append(line)
        except OSError as error:
            self.lost["disk"] += 1
            if not self._warned:
                self._warned = True
                kind = journal.Line(event="record_failed", error=type(error).__name__)
                journal.write(kind, logging.ERROR)
            return
        self.written += 1
        self.written_bytes += len(line)

    def _times(self, course: Course) -> Times:
        def since(value: float | None) -> float | None:
            return None if value is None else value - self.origin

        return Times(
            arrival=course.arrival - self.origin,
            send=since(course.send),
            first_byte=since(course.first_byte),
            first_token=since(course.first_token),
            first_content=since(course.first_content),
            end=since(course.end),
        )


def _aborted(course: Course) -> ClientAbort | None:
    if course.left is None:
        return None
    at, tokens = course.left
    return ClientAbort(at_s=at - course.arrival, after_tokens=tokens)


def _content(entry: Entry) -> Content:
    pieces = entry.course.pieces
    scored = [one for piece in pieces for one in piece.scored]
    logprobs = [one.logprob for one in scored if one.logprob is not None]
    return Content(
        body=msgspec.json.decode(entry.arrived.raw or b"{}"),
        text="".join(piece.text for piece in pieces),
        reasoning="".join(
            part.text for piece in pieces for part in piece.parts if isinstance(part, Reasoning)
        ),
        calls=_calls(pieces),
        tokens=tuple(one.token for one in scored),
        logprobs=tuple(logprobs) if len(logprobs) == len(scored) else (),
    )


def _calls(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Each as `name(arguments)`; one that was cut, as its markup."""
    calls: dict[int, list[str]] = {}
    cut: list[str] = []
    for piece in pieces:
        for part in piece.parts:
            match part:
                case CallOpened():
                    calls[part.index] = [part.name]
                case CallArguments():
                    calls[part.index].append(part.text)
                case CallCut():
                    calls.pop(part.index, None)
                    cut.append(part.raw)
                case _:
                    pass
    whole = [f"{name}({''.join(arguments)})" for name, *arguments in calls.values()]
    return (*whole, *cut)
