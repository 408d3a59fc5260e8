"""Decode's side: has prompts computed elsewhere, and admits their KV once it is whole and proven.

No I/O and no clock here: words, evidence and times come in, words go out. The engine gives a
request its pages; from then on a handoff of it holds pins of its own, and drops them only on the
word of the writer or on evidence that the writer has ended. The request itself may end at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from stanchion.core.messages import (
    Abort,
    Ended,
    FromWorker,
    Partner,
    PromptScores,
    Start,
    Suspected,
)
from stanchion.core.outcome import Cancelled, Outcome, OutputSuspect, PeerLost, Rejected
from stanchion.disagg import handoff as h
from stanchion.disagg.check import Check, rows_of
from stanchion.disagg.peer import Peer, Receiving, Target, Times
from stanchion.disagg.proofs import Proofs
from stanchion.disagg.words import (
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
    Stranger,
    Unfit,
    Written,
)
from stanchion.engine.loop import Engine
from stanchion.engine.request import Request

FAILPOINTS = {
    "release_before_drained": "an aborted handoff gives its pages back while writes may follow",
}


@dataclass
class DecodeSide:
    engine: Engine
    name: str
    identity: dict[str, str]
    incarnation: int
    host: str
    target: Target
    check: Check
    times: Times
    # (incarnation, pids): tell `peer_ended` when all of them have ended.
    watch: Callable[[int, Sequence[int]], None]
    failpoints: frozenset[str] = frozenset()
    out: list[tuple[Partner, FromDecode]] = field(default_factory=list)
    peers: dict[int, Peer] = field(default_factory=dict)  # by incarnation
    deadlines: int = 0
    _said: list[FromWorker] = field(default_factory=list)
    _due: dict[str, float] = field(default_factory=dict)  # request -> its deadline
    _offered: dict[str, Receiving] = field(default_factory=dict)  # by request
    _numbers: int = 0
    _attempts: int = 0
    _beat_at: float | None = None
    _proofs: Proofs = field(init=False)

    def __post_init__(self) -> None:
        self._proofs = Proofs(self.engine, self.check)
        if self.check.mode == "full":
            self.engine.inspect = self._proofs.inspect

    # ---- what the worker's loop asks --------------------------------------------------------

    @property
    def open(self) -> int:
        return sum(len(peer.handoffs) for peer in self.peers.values())

    @property
    def pages_held(self) -> int:
        """Pages held by handoffs of requests that have ended: they wait for evidence."""
        over = (one for one in self._all() if one.state.phase == "cancelling")
        return sum(len(pin.pages) for one in over for pin in one.pins)

    def step(self, heard: list[Start | Abort], now: float) -> list[FromWorker]:
        for told in heard:
            if isinstance(told, Start) and told.prefill is not None:
                self._due[told.request] = now + self.times.deadline_s
        said = [*self._said, *self._overdue(now)]
        self._said = []
        said += self.engine.step(heard)
        wanting, self.engine.wanting = self.engine.wanting, []
        for request in wanting:
            self._begin(request, now)
        for message in said:
            if isinstance(message, Ended):
                self._ended(message.request, now)
        if self._beat_at is None or now - self._beat_at >= self.times.beat_s:
            away = 0.0 if self._beat_at is None else now - self._beat_at
            self._beat_at = now
            self._tick(now, away if away > self.times.silence_s / 2 else 0.0)
        said += self._said  # what ended because its peer is not there at all
        self._said = []
        return said

    # ---- from the engine --------------------------------------------------------------------

    def _begin(self, request: Request, now: float) -> None:
        partner = request.start.prefill
        assert partner is not None
        peer = self.peers.get(partner.incarnation)
        if peer is None:
            peer = Peer(partner, now, self._next_attempt())
            self.peers[partner.incarnation] = peer
            self._meet(peer)
        if peer.ended or peer.cut:
            self._fail(
                request.name, PeerLost(f"prefill worker {partner.name} is gone", partner.name)
            )
            return
        self._numbers += 1
        first_page = request.computed // self.engine.ready.page_tokens
        own = request.pins[-1].share(f"handoff {self._numbers} of {request.name}")
        receiving = Receiving(self._numbers, request, peer, [own], first_page)
        peer.handoffs[receiving.number] = self._offered[request.name] = receiving
        if peer.session is not None:
            self._offer(receiving)

    def _ended(self, name: str, now: float) -> None:
        """The request ended, for whatever reason: its handoff, if one is open, is cancelled."""
        self._due.pop(name, None)
        self._proofs.forget(name)
        receiving = self._offered.get(name)
        if receiving is not None:
            receiving.cancelled_at = now
            self._feed(receiving, h.Abort())

    # ---- from prefill -----------------------------------------------------------------------

    def hear(self, peer: Peer, word: FromPrefill, now: float) -> None:
        if not isinstance(word, Unfit | Stranger | Met) and word.session != peer.session:
            return  # of an earlier session: it was settled when that ended
        match word:
            case Met() if word.incarnation != peer.partner.incarnation:
                self._unreachable(peer, "is another process by now")
                return
            case Met() if word.host != self.host and self.target.local:
                self._unreachable(peer, "is on another machine, or cannot see our processes")
                return
            case Met():
                self._met(peer, word)
            case Unfit() if word.incarnation != peer.partner.incarnation:
                self._unreachable(peer, "is another process by now")
                return
            case Unfit() if word.attempt != peer.attempt or peer.session is not None:
                return  # it comes late
            case Unfit():
                self._unreachable(peer, "does not fit: " + "; ".join(word.differences))
            case Stranger() if word.incarnation == peer.partner.incarnation:
                if word.session == peer.session:
                    peer.session = None
                    peer.attempt = self._next_attempt()
                    self._meet(peer)
            case Stranger():
                return  # another life answers at that address: no word of this one
            case Alive():
                for number in word.unknown:
                    if (known := peer.handoffs.get(number)) and known.state.phase == "offered":
                        self._offer(known)
            case Written():
                if (known := peer.handoffs.get(word.number)) is not None:
                    self._written(known, word)
            case Drained():
                if (known := peer.handoffs.get(word.number)) is not None:
                    self._drained(known, word.outcome)
            case Lost():
                if (known := peer.handoffs.get(word.number)) is not None:
                    self._lost(known, now)
        peer.heard_at = now

    def peer_ended(self, incarnation: int) -> None:
        """There is evidence: that life of a prefill worker writes no more, and cannot begin to."""
        peer = self.peers.get(incarnation)
        if peer is not None and not peer.ended:
            peer.ended = self._fenced(peer, "ended", ended=True)
            peer.cut = not peer.ended

    def _met(self, peer: Peer, word: Met) -> None:
        if peer.session is not None or word.attempt != peer.attempt:
            return  # it comes late
        # If it is a new session of the same life, then all handoffs of those before are closed. If
        # it is the one that we had, prefill has something to say of it: it is asked again.
        for receiving in list(peer.handoffs.values()):
            if receiving.session not in (None, word.session):
                name = peer.partner.name
                self._drained(receiving, PeerLost(f"{name} ended an earlier session", name))
        peer.session = word.session
        if word.host == self.host:  # a pid means nothing elsewhere
            self.watch(word.incarnation, word.pids)
        for receiving in list(peer.handoffs.values()):
            if receiving.session is None:
                self._offer(receiving)

    def _next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def _fenced(self, peer: Peer, why: str, ended: bool) -> bool:
        """Try to cut it off; with the evidence, everything that was offered to it is settled."""
        if peer.invitation is not None and not self.target.fence(peer.partner.incarnation, ended):
            return False
        peer.session, peer.invitation = None, None
        peer.attempt = self._next_attempt()
        lost = PeerLost(f"prefill worker {peer.partner.name} {why}", peer.partner.name)
        for receiving in list(peer.handoffs.values()):
            if ended or receiving.session is not None:
                self._release(receiving, lost)
        return True

    def _unreachable(self, peer: Peer, why: str) -> None:
        """What was never offered to it can be given up; what was offered waits for evidence."""
        lost = PeerLost(f"prefill worker {peer.partner.name} {why}", peer.partner.name)
        for receiving in list(peer.handoffs.values()):
            if receiving.session is None:
                self._release(receiving, lost)
        if not peer.handoffs:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer.partner.incarnation]
        if peer.invitation is not None:
            self.target.fence(peer.partner.incarnation, peer.ended)

    def _written(self, receiving: Receiving, word: Written) -> None:
        if receiving.state.phase == "offered":
            writer = receiving.peer.partner.name
            differs = self._proofs.verify(
                receiving.request, receiving.number, writer, receiving.first_page, word.digests
            )
            if differs is not None:
                self.engine.counters.suspect += 1
                self._fail(receiving.request.name, OutputSuspect(differs))
            else:
                self._admit(receiving, word)
        self._feed(receiving, h.Written())

    def _admit(self, receiving: Receiving, word: Written) -> None:
        request, engine = receiving.request, self.engine
        pages = request.pages[receiving.first_page :]
        rows = rows_of(request.length, receiving.first_page, engine.ready.page_tokens)
        for layer in range(self.check.schema.layers):
            engine.ready.raise_to(layer, pages[: len(rows)], rows)
        self._due.pop(request.name, None)
        if word.scores is not None:
            scores, name = word.scores, request.name
            request.scored = len(scores.logprobs)
            self._said.append(PromptScores(request=name, logprobs=scores.logprobs, top=scores.top))
        engine.arrived(request, word.cached_tokens)

    def _drained(self, receiving: Receiving, outcome: Outcome) -> None:
        if receiving.state.phase == "offered":
            if isinstance(outcome, Rejected):  # there, not here: another one may take it
                name = receiving.peer.partner.name
                said = f"prefill worker {name} cannot take it: {outcome.message}"
                outcome = PeerLost(said, name, "client")
            elif isinstance(outcome, PeerLost) and not outcome.peer:
                outcome = replace(outcome, peer=receiving.peer.partner.name)
            self._fail(receiving.request.name, outcome)
        self._feed(receiving, h.Drained())

    def _lost(self, receiving: Receiving, now: float) -> None:
        if receiving.state.phase == "offered":
            writer = receiving.peer.partner.name
            self._fail(receiving.request.name, PeerLost(f"a write of {writer} failed", writer))
            receiving.cancelled_at = now
            self._feed(receiving, h.Abort())
        if receiving.number in receiving.peer.handoffs and self._may_suspect(receiving.peer, now):
            receiving.peer.suspected_at = now
            self._feed(receiving, h.Lost())

    def _release(self, receiving: Receiving, outcome: Outcome) -> None:
        """Nothing of this handoff can be in flight: it never left, or its peer has ended."""
        if receiving.state.phase == "offered":
            self._fail(receiving.request.name, outcome)
        self._feed(receiving, h.PeerFenced())

    def _fail(self, name: str, outcome: Outcome) -> None:
        self._said += self.engine.fail(name, outcome)
        self._due.pop(name, None)

    # ---- effects ----------------------------------------------------------------------------

    def _feed(self, receiving: Receiving, event: h.DecodeEvent) -> None:
        receiving.state, effects = h.decode(receiving.state, event)
        if receiving.state.phase != "offered":
            self._offered.pop(receiving.request.name, None)
        for effect in effects:
            match effect:
                case h.Send(h.Cancel()) if receiving.session is None:
                    # No offer of it ever left this process: nothing can be in flight.
                    self._feed(receiving, h.PeerFenced())
                    return
                case h.Send(h.Cancel()):
                    self._cancel(receiving)
                case h.Admit() | h.Unpin():
                    self._let_go(receiving)
                case h.Fence():
                    self._suspect(receiving.peer)

    def _let_go(self, receiving: Receiving) -> None:
        for pin in receiving.pins:
            pin.drop()
        receiving.pins = []
        del receiving.peer.handoffs[receiving.number]

    def _cancel(self, receiving: Receiving) -> None:
        if "release_before_drained" in self.failpoints:  # the fault, as it was
            for pin in receiving.pins:
                pin.drop()
            receiving.pins = []
        assert receiving.session is not None
        settled = self._settled(receiving.peer)
        word = Cancel(session=receiving.session, settled=settled, number=receiving.number)
        self.out.append((receiving.peer.partner, word))

    def _suspect(self, peer: Peer) -> None:
        """Cut it off here, if the transport can; else ask whoever can to end its process."""
        open_, partner = len(peer.handoffs), peer.partner
        if self._fenced(peer, "was cut off", ended=False):
            self._meet(peer)
            return
        peer.cut = not self.target.local  # and nothing shows that it worked
        why = f"{open_} handoffs of it are open, and it does not answer"
        self._said.append(Suspected(partner.name, partner.incarnation, why))

    def _offer(self, receiving: Receiving) -> None:
        peer, request = receiving.peer, receiving.request
        if receiving.state.phase != "offered":
            return
        assert peer.session is not None
        receiving.session = peer.session
        start, page_tokens = request.start, self.engine.ready.page_tokens
        total = -(-request.length // page_tokens)
        word = Offer(
            session=peer.session,
            settled=self._settled(peer),
            number=receiving.number,
            tokens=start.tokens,
            tenant=start.tenant,
            salt=start.salt,
            prompt_logprobs=start.sampling.prompt_logprobs if request.wants_scores else None,
            first_page=receiving.first_page,
            pages=request.pages[receiving.first_page : total].tolist(),
            priority=start.priority,
        )
        self.out.append((peer.partner, word))

    def _meet(self, peer: Peer) -> None:
        if peer.invitation is None:
            peer.invitation = self.target.invitation(peer.partner.incarnation)
        word = Meet(
            attempt=peer.attempt,
            name=self.name,
            incarnation=self.incarnation,
            identity=self.identity,
            invitation=peer.invitation,
        )
        self.out.append((peer.partner, word))

    # ---- time -------------------------------------------------------------------------------

    def _overdue(self, now: float) -> list[FromWorker]:
        """End what missed its deadline. Its pages stay pinned until its writes have ended."""
        said: list[FromWorker] = []
        for name in [name for name, due in self._due.items() if now >= due]:
            del self._due[name]
            if not self.engine.waits_for_kv(name):
                continue  # all of its prompt was found here
            ended = self.engine.fail(name, Cancelled("deadline"))
            self.deadlines += len(ended)
            said += ended
        return said

    def _tick(self, now: float, away: float) -> None:
        for peer in list(self.peers.values()):
            peer.heard_at += away  # it was we who were not there to hear
            if peer.ended or peer.cut:
                if not peer.handoffs:
                    self._forget(peer)
                continue
            silent = now - peer.heard_at > self.times.silence_s
            if silent and not peer.handoffs:
                self._forget(peer)
                continue
            if peer.session is None:
                self._meet(peer)
                if silent:
                    self._unreachable(peer, "does not answer")
            else:
                self._beat(peer)
            for receiving in list(peer.handoffs.values()):
                self._hurry(receiving, silent, now)

    def _beat(self, peer: Peer) -> None:
        assert peer.session is not None
        asked = [one.number for one in peer.handoffs.values() if one.state.phase == "offered"]
        word = Beat(session=peer.session, settled=self._settled(peer), asked=asked)
        self.out.append((peer.partner, word))

    def _hurry(self, receiving: Receiving, silent: bool, now: float) -> None:
        cancelled_at = receiving.cancelled_at
        if cancelled_at is not None:
            self._feed(receiving, h.Tick())
        stuck = cancelled_at is not None and now - cancelled_at > self.times.drain_s
        if silent and receiving.state.phase == "offered":
            name = receiving.peer.partner.name
            self._fail(receiving.request.name, PeerLost(f"{name} is silent", name))
            receiving.cancelled_at = now
            self._feed(receiving, h.Abort())
        if (silent or stuck) and receiving.pins and self._may_suspect(receiving.peer, now):
            receiving.peer.suspected_at = now
            self._feed(receiving, h.Overdue())

    def _may_suspect(self, peer: Peer, now: float) -> bool:
        asked_at = peer.suspected_at
        return asked_at is None or now - asked_at > self.times.silence_s

    def _settled(self, peer: Peer) -> int:
        return min(peer.handoffs, default=self._numbers + 1)

    def _all(self) -> Iterator[Receiving]:
        for peer in self.peers.values():
            yield from peer.handoffs.values()

    def audit(self) -> list[str]:
        said = self.engine.audit()
        said += [f"handoff {one.number} is {one.state.phase}" for one in self._all()]
        said += [f"{name} has a deadline and is gone" for name in self._due]
        said += self._proofs.audit()
        return said
