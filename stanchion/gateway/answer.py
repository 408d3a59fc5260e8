"""One choice, read like a `Ticket` however many attempts are made at it. `Guard` decides.

Promises: one attempt at a time, and what still comes of one that was dropped is for nobody; what
the reader gets is released by the guard, once and in order; whatever is asked of other workers for
it is told to stop when the reader leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

from stanchion.core.errors import Overloaded, PeerLost
from stanchion.core.messages import Counted, Hello, PromptScores, Quarantine, Spec, Start
from stanchion.core.outcome import Completed, Leaver, Outcome
from stanchion.core.request import Sampling
from stanchion.gateway.choice import Style
from stanchion.gateway.ledger import READ_MAX, DraftRecord, Mail, Ticket, joined
from stanchion.gateway.monitor.budget import finding
from stanchion.gateway.monitor.guard import Drop, Effect, Guard, Noticed, Restart, Witness
from stanchion.gateway.monitor.witness import Clean, Confirmed, Unwitnessed, Verdict, judge
from stanchion.gateway.monitor.words import ACCEPTANCE
from stanchion.gateway.record.attempts import Attempts
from stanchion.gateway.router import Life
from stanchion.gateway.splice import finished, resumed

if TYPE_CHECKING:
    from stanchion.gateway.integrity import Integrity

Ring = Callable[[], None]
Mint = Callable[[], str]


class Workers(Protocol):
    """What is needed of a fleet: see there."""

    @property
    def hello(self) -> Hello | None: ...
    def hello_of(self, life: Life) -> Hello | None: ...
    def start(self, starts: Sequence[Start], ring: Ring) -> list[Ticket]: ...
    def elsewhere(
        self, start: Start, ring: Ring, used: Collection[Life], wholly: bool = False
    ) -> Ticket: ...
    def leave(self, ticket: Ticket, by: Leaver) -> None: ...
    def doubted(self, lives: Sequence[Life]) -> None: ...
    def cleared(self, lives: Sequence[Life]) -> None: ...
    def confirmed(self, request: str, lives: Sequence[Life], read: Quarantine) -> None: ...
    def overruled(self, lives: Sequence[Life]) -> None: ...


class Answer:
    """One choice: read like a `Ticket`, whatever number of attempts is made at it."""

    def __init__(
        self,
        books: Integrity,
        start: Start,
        ticket: Ticket,
        guard: Guard,
        style: Style,
        ring: Ring,
        mint: Mint,
        rule: str = "report",
    ) -> None:
        """`rule`: by which its acceptance is judged, where there are counters."""
        self._books = books
        self._rule = rule
        self._start = start
        self._ticket = ticket
        self._guard = guard
        self._style = style
        self._ring = ring
        self._mint = mint
        self._dropped = False  # the attempt: what still comes of it is for nobody
        self._used: list[Life] = []  # by attempts that are over
        self._witness: _Asked | None = None
        self._scores: PromptScores | None = None
        self._cached_tokens = 0
        self._spec: Spec | None = None
        self._draft_record: DraftRecord | None = None
        self.attempts = Attempts()
        self._counted: Counted | None = None
        self._told = False
        self._blamed = False  # the drafts, by this answer: one answer counts once

    @property
    def request(self) -> str:
        return self._start.request

    @property
    def tenant(self) -> str:
        return self._start.tenant

    @property
    def lives(self) -> tuple[Life, ...]:
        return self._ticket.lives

    @property
    def why(self) -> str:
        return self._ticket.why

    def read(self) -> Quarantine:
        """What the attempt that counts has read and written, as its workers know it."""
        tokens = [*self._start.tokens, *self._guard.tokens]
        return Quarantine(tokens=tokens, tenant=self.tenant, salt=self._ticket.salt)

    def prepare(self) -> None:
        """As `Guard.prepare`."""
        self._guard.prepare()

    def take(self) -> Mail | None:
        came = 0
        if (mail := self._ticket.take()) is not None and not self._dropped:
            came = len(mail.tokens)
            self.attempts.came(mail, self.lives)
            self._note(mail)
            deaf = ACCEPTANCE if self._undrafted() else ()
            self._do(
                self._guard.came(
                    mail.tokens, mail.logprobs, mail.top, mail.readings, mail.ended, deaf
                )
            )
        if self._witness is not None and (mail := self._witness.at.take()) is not None:
            self._do(self._hear(self._witness, mail))
        return self._release(came)

    def leave(self, by: Leaver) -> None:
        if self._told:
            return
        self._guard.close(by)
        self._books.workers.leave(self._ticket, by)
        self._dismiss(by)
        self._ring()

    # ---- what came --------------------------------------------------------------------------

    def _note(self, mail: Mail) -> None:
        self._cached_tokens = mail.cached_tokens
        self._spec = mail.spec or self._spec
        self._scores = joined(self._scores, mail.scores)
        self._draft_record = mail.draft_record
        self._counted = mail.counted

    def _undrafted(self) -> bool:
        return bool(self.lives) and self.lives[0] in self._books.draft_faults

    def _release(self, came: int) -> Mail | None:
        guard = self._guard
        first, limit = guard.released, guard.limit
        last = min(limit, first + READ_MAX)
        if last < limit:
            self._ring()
        ended = guard.outcome if last == limit else None
        if first == last and not came and ended is None:
            return None
        guard.released = last
        if ended is not None and not self._told:
            self._told = True
            self._books.monitored["none" if self._spec is None else self._rule] += 1
            self._count(isinstance(ended, Completed))
        return Mail(
            guard.tokens[first:last],
            guard.logprobs[first:last],
            [list(one) for one in guard.top[first:last]],
            self._cached_tokens,
            self._spec,
            self._scores if ended is not None else None,
            ended,
            self._draft_record,
            self._counted,
            came,
        )

    def _count(self, completed: bool) -> None:
        if self._guard.retries:
            self._books.outcomes["completed" if completed else "failed"] += 1

    # ---- what is to be done -----------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            match effect:
                case Noticed():
                    self.attempts.suspected(effect.suspicion.kind)
                    self._books.noticed(self, effect)
                case Drop():
                    self._dropped = True
                    self._books.workers.leave(self._ticket, effect.by)
                case Witness():
                    waiting.extend(self._ask(effect))
                case Restart():
                    self._restart(effect)
                case _:
                    assert_never(effect)

    def _ask(self, wanted: Witness) -> list[Effect]:
        if not wanted.tokens:
            return self._guard.verdict(Clean())
        why = self._send(_Asked(wanted, self.lives), self.lives)
        return [] if why is None else self._say(wanted, Unwitnessed(why))

    def _send(self, asked: _Asked, used: Sequence[Life], wholly: bool = False) -> str | None:
        """Has the scores computed elsewhere, from cold KV; why not, if they are not."""
        tokens = [*self._start.tokens, *self._guard.tokens[: asked.wanted.tokens]]
        if not self._books.allowance.take(len(tokens), self._books.now()):
            return "the budget of prefill tokens is spent"
        start = Start(
            request=self._mint(),
            tokens=tokens,
            sampling=Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=0),
            tenant=self.tenant,
            salt=self._mint(),
        )
        try:
            asked.ticket = self._books.workers.elsewhere(start, self._ring, used, wholly)
        except (PeerLost, Overloaded) as error:
            return f"there is no other worker: {error}"
        self._books.witness_tokens += len(tokens)
        self._witness = asked
        return None

    def _hear(self, asked: _Asked, mail: Mail) -> list[Effect]:
        asked.scores = joined(asked.scores, mail.scores)
        if mail.ended is None:
            return []
        self._witness = None
        said = self._heard(asked, mail.ended)
        if asked.before is None and isinstance(said, Confirmed) and self._another(asked, said):
            return []
        return self._say(asked.wanted, self._settled(asked, said), asked.lives)

    def _heard(self, asked: _Asked, ended: Outcome) -> Verdict:
        if not isinstance(ended, Completed):
            return Unwitnessed(f"the witness ended: {ended.__struct_config__.tag}")
        cold = asked.scores.logprobs[len(self._start.tokens) - 1 :] if asked.scores else []
        return judge(self._guard.logprobs[: asked.wanted.tokens], cold, self._books.scale())

    def _another(self, asked: _Asked, said: Confirmed) -> bool:
        """A witness may be the sick one: where a third worker has no part in this, it is asked."""
        first = asked.at.lives
        second = _Asked(asked.wanted, asked.lives, before=(said, first))
        return self._send(second, [*asked.lives, *first], wholly=True) is None

    def _settled(self, asked: _Asked, said: Verdict) -> Verdict:
        """Of two witnesses: what both say, or what one of them and the answer's own worker do."""
        if asked.before is None:
            return said
        before, lives = asked.before
        if {*asked.at.lives} & {*asked.lives, *lives}:
            return before  # it was lost and made again, by one that has a part in this
        match said:
            case Clean():
                self._books.overruled(self, lives)
                return said
            case Confirmed():
                return Confirmed(min(before.onset, said.onset), before.evidence)
            case Unwitnessed():
                return before

    def _say(self, wanted: Witness, said: Verdict, lives: Sequence[Life] = ()) -> list[Effect]:
        kind = wanted.kind
        self.attempts.judged(finding(said))
        self._books.judged(self, kind, said, lives or self.lives, not self._blamed)
        self._blamed = self._blamed or kind in ACCEPTANCE
        return self._guard.verdict(said)

    def _restart(self, wanted: Restart) -> None:
        self._dismiss("monitor")
        kept = self._guard.tokens[: wanted.keep]
        if (whole := finished(self._start.sampling, self._style, kept)) is not None:
            self._guard.completed(whole)
            return
        if not self._books.retries.retry(self.tenant, self._books.now()):
            self._books.outcomes["over_budget"] += 1
            self._guard.refused(f"{wanted.why}; the retry budget is spent")
            return
        before, used = self.lives, [*self._used, *self.lives]
        start = resumed(self._start, kept, self._mint(), self._mint())
        try:
            self._ticket = self._books.workers.elsewhere(start, self._ring, used)
        except (PeerLost, Overloaded) as error:
            self._books.outcomes["no_worker"] += 1
            self._guard.refused(f"{wanted.why}; no other attempt: {error}")
            return
        self.attempts.again(before)
        self._used, self._dropped, self._scores = used, False, None
        self._guard.restarted(wanted.keep)

    def _dismiss(self, by: Leaver) -> None:
        if self._witness is not None:
            self._books.workers.leave(self._witness.at, by)
            self._witness = None


@dataclass
class _Asked:
    """A witness at work. `lives`: of the workers whose attempt it is about. `before`: what another
    witness said, and who that was."""

    wanted: Witness
    lives: tuple[Life, ...]
    before: tuple[Confirmed, tuple[Life, ...]] | None = None
    ticket: Ticket | None = None
    scores: PromptScores | None = None

    @property
    def at(self) -> Ticket:
        assert self.ticket is not None, "it was sent"
        return self.ticket
