"""Prefill's side: computes prompts that decode workers offer, and writes their KV as it appears.

No I/O and no clock here: words and times come in, words go out, and the lane carries bytes. The
engine computes each prompt like any request without an answer; as soon as a layer's rows are in,
`rows_ready` gives its further whole pages to the lane, under pins of the handoff's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stanchion.core.messages import Abort, Ended, FromWorker, PromptScores, Start, differences
from stanchion.core.outcome import Completed, Outcome, Overloaded, PeerLost, Rejected
from stanchion.core.request import Sampling
from stanchion.device.stream import Pages
from stanchion.disagg import handoff as h
from stanchion.disagg.check import Check, Digests, rows_of
from stanchion.disagg.words import (
    HANDOFFS_MAX,
    Alive,
    Beat,
    Cancel,
    Drained,
    FromDecode,
    FromPrefill,
    Lost,
    Meet,
    Met,
    Offer,
    PromptLogprobs,
    Stranger,
    Unfit,
    Written,
)
from stanchion.engine.loop import Engine
from stanchion.engine.request import NO_PAGES, Request
from stanchion.kv.pages import Pin
from stanchion.kv.transfer.words import Invitation, TransferError, Write, WriteEnded

SESSIONS_MAX = 1024
WRITE_FAILED = PeerLost("the KV could not be written")
Address = bytes  # how the link reaches a decode worker
Out = tuple[Address, FromPrefill]


class Lane(Protocol):
    """Carries bytes to the pools of peers, each known by its session's number: a `Transfer`, with
    the doors of our own pages in front of it."""

    def connect(self, peer: int, invitation: Invitation) -> None: ...
    def disconnect(self, peer: int) -> None: ...
    def send(self, write: Write) -> None: ...
    def cut(self, numbers: Sequence[int]) -> None: ...
    def poll(self) -> list[WriteEnded]: ...
    @property
    def bytes_sent(self) -> int: ...


@dataclass(eq=False)
class Sending:
    """One handoff, prefill's end. Once closed it is kept only to answer."""

    number: int
    name: str  # in the engine
    state: h.Prefill = field(default_factory=h.Prefill)
    first_page: int = 0
    prompt_tokens: int = 0
    destination: Pages = field(default_factory=lambda: NO_PAGES)  # from first_page on
    source: Pages = field(default_factory=lambda: NO_PAGES)  # from page 0 on
    generations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pins: list[Pin] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # a layer: pages given to the lane, from page 0
    digests: list[Digests] = field(default_factory=list)  # a layer
    writes: dict[int, int] = field(default_factory=dict)  # of this handoff -> of the lane
    cached_tokens: int = 0
    scores: PromptLogprobs | None = None
    outcome: Outcome = WRITE_FAILED

    @property
    def closed(self) -> bool:
        return self.state.phase in ("written", "drained", "lost")


@dataclass(eq=False)
class Session:
    number: int
    decode: str
    incarnation: int
    attempt: int
    address: Address
    heard_at: float
    invitation: Invitation
    settled: int = 0
    gone: bool = False  # its decode ended, or was silent: only what is in flight is waited for
    fenced: bool = False  # by its decode, which has invited us anew since
    handoffs: dict[int, Sending] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        return any(one.state.phase == "lost" for one in self.handoffs.values())


@dataclass
class PrefillSide:
    """`draw` gives session numbers that no other life of any worker gives."""

    engine: Engine
    identity: dict[str, str]
    incarnation: int
    pids: list[int]  # all processes that may write
    host: str  # the machine and its space of process ids
    lane: Lane
    check: Check
    silence_s: float
    draw: Callable[[], int]
    draining: bool = False
    out: list[Out] = field(default_factory=list)
    sessions: dict[int, Session] = field(default_factory=dict)
    _names: dict[str, tuple[Session, Sending]] = field(default_factory=dict)  # in the engine
    _writes: dict[int, tuple[Session, Sending, int]] = field(default_factory=dict)  # in the lane
    _checked: dict[int, tuple[int, NDArray[np.int64]]] = field(default_factory=dict)  # what of them
    _heard: list[Start | Abort] = field(default_factory=list)
    _begun: int = 0
    _reaped_at: float | None = None

    # ---- what the worker's loop asks --------------------------------------------------------

    @property
    def open(self) -> int:
        """Handoffs that are not closed."""
        return sum(not one.closed for _, one in self._all())

    @property
    def bytes_sent(self) -> int:
        return self.lane.bytes_sent

    @property
    def pages_held(self) -> int:
        """Pages held by handoffs whose prompt the engine is done with."""
        held = (one for _, one in self._all() if one.name not in self._names)
        return sum(len(pin.pages) for one in held for pin in one.pins)

    def step(self, heard: list[Start | Abort], now: float) -> list[FromWorker]:
        """One step of the engine. What a prompt came to is told to its decode, not to a gateway;
        whoever asks a prefill worker for an answer without a pair gets it from here."""
        self._landed()
        self._reap(now)
        heard, self._heard = [*heard, *self._heard], []
        back: list[FromWorker] = []
        for message in self.engine.step(heard):
            match message:
                case PromptScores(request=request) if request in self._names:
                    _add_scores(self._names[request][1], message)
                case Ended(request=request) if request in self._names:
                    self._computed(*self._names.pop(request), message)
                case _:
                    back.append(message)
        return back

    # ---- what decode says -------------------------------------------------------------------

    def hear(self, word: FromDecode, address: Address, now: float) -> None:
        if isinstance(word, Meet):
            reply = self._meet(word, address, now)
            if reply is not None:
                self.out.append((address, reply))
            return
        session = self.sessions.get(word.session)
        if session is None or session.gone:
            self.out.append((address, Stranger(word.session, self.incarnation)))
            return
        session.address, session.heard_at = address, now
        session.settled = max(session.settled, word.settled)
        # Whatever decode says: what is not closed is not forgotten.
        over = [one for one in session.handoffs if one < session.settled]
        for number in over:
            if session.handoffs[number].closed:
                del session.handoffs[number]
        match word:
            case Beat():
                self._beat(session, word)
            case Offer() | Cancel() if word.number < session.settled:
                pass  # it comes late: all was said about that handoff
            case Offer():
                self._offer(session, word)
            case Cancel():
                known = session.handoffs.get(word.number)
                sending = known or self._remember(session, word.number)
                self._feed(session, sending, h.Cancel())

    def _meet(self, word: Meet, address: Address, now: float) -> FromPrefill | None:
        if said := differences(self.identity, word.identity):
            return Unfit(word.attempt, self.incarnation, said)
        for session in list(self.sessions.values()):
            if session.incarnation == word.incarnation:
                if word.attempt < session.attempt:
                    return None  # it comes late
                if word.invitation.token != session.invitation.token:
                    session.fenced = True
                    if not session.gone:
                        self._leave(session, "it has fenced us")
                if session.lost and not session.fenced:
                    session.gone = False  # it must hear of that, and cut us off
                if session.gone:
                    return None  # it is asked again, and by then all of this one may be closed
                session.attempt, session.address, session.heard_at = word.attempt, address, now
                return self._met(session, word.attempt)
            if session.decode == word.name:
                self._leave(session, "it came back as a new process")
        if len(self.sessions) >= SESSIONS_MAX:
            return Unfit(
                word.attempt, self.incarnation, [f"{SESSIONS_MAX} sessions are open already"]
            )
        number = self.draw()
        try:
            self.lane.connect(number, word.invitation)
        except TransferError as error:
            return Unfit(word.attempt, self.incarnation, [str(error)])
        session = Session(
            number, word.name, word.incarnation, word.attempt, address, now, word.invitation
        )
        self.sessions[number] = session
        return self._met(session, word.attempt)

    def _met(self, session: Session, attempt: int) -> Met:
        return Met(
            attempt=attempt,
            session=session.number,
            incarnation=self.incarnation,
            pids=self.pids,
            host=self.host,
        )

    def _beat(self, session: Session, word: Beat) -> None:
        unknown = []
        for number in word.asked:
            known = session.handoffs.get(number)
            if known is not None:
                self._feed(session, known, h.Offer())
            elif number >= session.settled:
                unknown.append(number)
        self.out.append((session.address, Alive(session=session.number, unknown=unknown)))

    def _offer(self, session: Session, word: Offer) -> None:
        known = session.handoffs.get(word.number)
        if known is not None:
            self._feed(session, known, h.Offer())
            return
        if len(session.handoffs) >= HANDOFFS_MAX:
            return  # like a lost one: it is offered again
        sending = self._remember(session, word.number)
        self._feed(session, sending, h.Offer())
        total = -(-len(word.tokens) // self.engine.ready.page_tokens)
        refused = self._refused(session, word, total)
        if refused is not None:
            sending.outcome = refused
            self._feed(session, sending, h.Abort())
            return
        sending.first_page, sending.prompt_tokens = word.first_page, len(word.tokens)
        sending.destination = np.array(word.pages, np.int32)
        sending.sent = [word.first_page] * self.check.schema.layers
        sending.digests = self.check.nothing(total - word.first_page)
        self._names[sending.name] = session, sending
        sampling = Sampling(max_tokens=0, prompt_logprobs=word.prompt_logprobs)
        self._heard.append(
            Start(
                request=sending.name, tokens=word.tokens, sampling=sampling, tenant=word.tenant,
                salt=word.salt, priority=word.priority,
            )
        )  # fmt: skip

    def _refused(self, session: Session, word: Offer, total: int) -> Outcome | None:
        if self.draining:
            return Overloaded("this prefill worker is draining", 1.0)
        if word.first_page + len(word.pages) != total:
            said = f"{len(word.pages)} pages from page {word.first_page} on are not all of {total}"
            return Rejected("pages", said)
        if max(word.pages, default=0) >= session.invitation.pages:
            return Rejected("pages", f"decode has {session.invitation.pages} pages")
        if len(np.unique(word.pages)) != len(word.pages):
            return Rejected("pages", "a page is named twice")
        return None

    def _remember(self, session: Session, number: int) -> Sending:
        sending = Sending(number, f"{session.number:x}.{number}")
        session.handoffs[number] = sending
        return sending

    # ---- what the engine and the lane say ---------------------------------------------------

    def rows_ready(self, layer: int, ends: Sequence[tuple[Request, int]]) -> None:
        """A flight has the rows of this layer in place, up to `end` for each of its requests."""
        for request, end in ends:
            known = self._names.get(request.name)
            if known is None or known[1].state.phase != "open":
                continue
            session, sending = known
            if not sending.pins:
                holder = f"handoff of {request.name}"
                sending.pins = [pin.share(holder) for pin in request.pins]
                sending.source = request.pages
                sending.generations = request.generations
            elif sending.generations is not request.generations:  # it was set back, and begins anew
                why = "the prompt's KV had to be computed again"
                sending.outcome = PeerLost(why, owner="capacity")
                self._feed(session, sending, h.Abort())
                continue
            whole = end // self.engine.ready.page_tokens
            total = len(sending.destination) + sending.first_page
            self._send(session, sending, layer, total if end >= sending.prompt_tokens else whole)

    def _send(self, session: Session, sending: Sending, layer: int, upto: int) -> None:
        """Write this layer's pages, from where the last write of it ended up to page `upto`."""
        first = sending.sent[layer]
        if upto <= first or sending.state.phase != "open":
            return
        rows = rows_of(sending.prompt_tokens, first, self.engine.ready.page_tokens)
        begin, past = first - sending.first_page, upto - sending.first_page
        places = self.check.chosen(sending.number, sending.first_page, past)
        places = places[places >= begin]
        sending.sent[layer] = upto
        self._checked[self._begun] = layer, places
        write = Write(
            self._begun, session.number, layer, sending.source[first:upto],
            sending.destination[begin:past], int(rows[upto - first - 1]), places - begin,
        )  # fmt: skip
        self._feed(session, sending, h.Computed(sending.state.begun), write)

    def _computed(self, session: Session, sending: Sending, ended: Ended) -> None:
        """The engine is done with the prompt: send what is left of it, and seal."""
        sending.cached_tokens = ended.cached_tokens
        if not isinstance(ended.outcome, Completed):
            if sending.state.phase == "open":  # else we had it aborted, and know better why
                sending.outcome = ended.outcome
            self._feed(session, sending, h.Abort())
        elif sending.state.phase == "open":
            tokens = sending.prompt_tokens
            self.engine.ready.prove(
                sending.name, sending.source, tokens, tokens, sending.generations,
                self.engine.pool.generations,
            )  # fmt: skip
            total = len(sending.destination) + sending.first_page
            for layer in range(self.check.schema.layers):
                self._send(session, sending, layer, total)
            self._feed(session, sending, h.Sealed())

    def _landed(self) -> None:
        for ended in self.lane.poll():
            session, sending, write = self._writes.pop(ended.number)
            del sending.writes[write]
            layer, places = self._checked.pop(ended.number)
            if ended.digests:
                digests = np.frombuffer(ended.digests, "<u8").reshape(-1, len(places))
                sending.digests[layer][:, places] = digests
            if ended.why:
                sending.outcome = PeerLost(f"the KV could not be written: {ended.why}")
            self._feed(session, sending, h.WriteEnded(write, ended.whole, ended.stray))

    # ---- effects ----------------------------------------------------------------------------

    def _feed(
        self, session: Session, sending: Sending, event: h.PrefillEvent, write: Write | None = None
    ) -> None:
        sending.state, effects = h.prefill(sending.state, event)
        for effect in effects:
            match effect:
                case h.Send(h.Written()):
                    self.out.append((session.address, _written(session, sending, self.check)))
                case h.Send(h.Drained()):
                    said = Drained(
                        session=session.number, number=sending.number, outcome=sending.outcome
                    )
                    self.out.append((session.address, said))
                case h.Send(h.Lost()):
                    lost = Lost(session=session.number, number=sending.number)
                    self.out.append((session.address, lost))
                case h.StartWrite(number):
                    assert write is not None
                    self._writes[write.number] = session, sending, number
                    sending.writes[number] = write.number
                    self._begun += 1
                    self.lane.send(write)
                case h.CutWrites():
                    self.lane.cut(list(sending.writes.values()))
                    if sending.name in self._names:  # its compute stops at the next chunk
                        self._heard.append(Abort(sending.name, "client"))
                case h.Unpin():
                    for pin in sending.pins:
                        pin.drop()
                    sending.pins, sending.source, sending.sent = [], NO_PAGES, []

    def _reap(self, now: float) -> None:
        away = 0.0 if self._reaped_at is None else now - self._reaped_at
        self._reaped_at = now
        for session in list(self.sessions.values()):
            if away > self.silence_s / 2:  # it was we who were not there to hear
                session.heard_at += away
            if now - session.heard_at > self.silence_s and not session.gone:
                self._leave(session, f"it was silent for {self.silence_s:g} s")
            if session.gone and all(one.closed for one in session.handoffs.values()):
                if session.lost and not session.fenced:
                    continue  # its decode may come back, and must not take it for drained
                self.lane.disconnect(session.number)
                del self.sessions[session.number]

    def _leave(self, session: Session, why: str) -> None:
        session.gone = True
        for sending in session.handoffs.values():
            if not sending.closed:
                sending.outcome = PeerLost(f"prefill left decode worker {session.decode}: {why}")
                self._feed(session, sending, h.Abort())

    def _all(self) -> Iterator[tuple[Session, Sending]]:
        for session in self.sessions.values():
            for sending in session.handoffs.values():
                yield session, sending

    def audit(self) -> list[str]:
        """With nothing offered: nothing in flight, no pin held, nobody waited for."""
        said = self.engine.audit()
        said += [f"handoff {one.name} is open" for _, one in self._all() if not one.closed]
        said += [f"handoff {one.name} holds pages" for _, one in self._all() if one.pins]
        said += [f"write {number} has not ended" for number in self._writes]
        return said


def _written(session: Session, sending: Sending, check: Check) -> Written:
    pages = sending.digests[0].shape[1] if sending.digests else 0
    places = check.chosen(sending.number, sending.first_page, pages)
    digests = np.concatenate([one[:, places] for one in sending.digests]).astype("<u8")
    return Written(
        session=session.number,
        number=sending.number,
        cached_tokens=sending.cached_tokens,
        digests=digests.tobytes(),
        scores=sending.scores,
    )


def _add_scores(sending: Sending, said: PromptScores) -> None:
    before = sending.scores or PromptLogprobs([], [])
    sending.scores = PromptLogprobs([*before.logprobs, *said.logprobs], [*before.top, *said.top])
