"""What is in flight at one worker, and what that worker last said of itself. Pure.

Promises: every accepted request ends exactly once, for its reader and in this table; a message for
a request that is not in the table changes nothing and is counted; a reader that is slow finds its
messages merged, never dropped, and holds up nobody.

A request whose reader left stays in the table until the worker says `Ended` (or is lost): it still
holds pages there, and counts against the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from stanchion.core.errors import Bug
from stanchion.core.messages import (
    Counted,
    Drained,
    Ended,
    FromWorker,
    Hello,
    Progress,
    PromptScores,
    Spec,
    Suspected,
    Tokens,
    TopToken,
)
from stanchion.core.outcome import Cancelled, Leaver, Outcome, PeerLost

Freed = Callable[[str, Outcome | None], None]  # None: it never reached the worker
DraftRecord = list[tuple[list[int], int]]
TELL_AGAIN_S = 5.0  # an Abort is said again until its request has ended
READ_MAX = 512  # tokens a reader is given at once: others want their turn


def joined(first: PromptScores | None, then: PromptScores | None) -> PromptScores | None:
    """A long prompt's scores come a chunk at a time, in order."""
    if first is None or then is None:
        return first or then
    logprobs, top = [*first.logprobs, *then.logprobs], [*first.top, *then.top]
    return PromptScores(request=first.request, logprobs=logprobs, top=top)


@dataclass
class Mail:
    """All that came for one request since its reader last looked."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[TopToken]] = field(default_factory=list)
    cached_tokens: int = 0
    spec: Spec | None = None
    scores: PromptScores | None = None
    ended: Outcome | None = None
    draft_record: DraftRecord | None = None
    counted: Counted | None = None
    came: int | None = None  # tokens that have arrived since, where `tokens` are those released
    readings: list[tuple[int, Spec]] = field(default_factory=list)  # after so many of the tokens

    def split(self, tokens: int) -> Mail:
        """Keeps so many tokens; returns the rest, with all that comes after tokens."""
        rest = Mail(
            self.tokens[tokens:],
            self.logprobs[tokens:],
            self.top[tokens:],
            self.cached_tokens,
            self.spec,
            self.scores,
            self.ended,
            self.draft_record,
            self.counted,
            readings=[(at - tokens, spec) for at, spec in self.readings if at > tokens],
        )
        self.readings = [one for one in self.readings if one[0] <= tokens]
        del self.tokens[tokens:], self.logprobs[tokens:], self.top[tokens:]
        self.scores, self.ended = None, None
        return rest


def _never(ended: Outcome) -> bool:
    return False


def _nobody(request: str, ended: Outcome | None = None) -> None:
    pass


class Ticket:
    """One accepted request, for its reader.

    `request` is its name at the worker that has it now. `again` is asked when an attempt ended of
    which nothing was said: if it answers True, another attempt was begun and the reader is told
    nothing. `begun` is told when the first word of an attempt comes, whoever reads it.
    """

    def __init__(
        self,
        request: str,
        ring: Callable[[], None],
        again: Callable[[Outcome], bool] = _never,
        tenant: str = "",
        begun: Callable[[str], None] = _nobody,
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.said = False  # something came for the reader
        self.lives: tuple[tuple[str, int], ...] = ()  # those of the workers that have it now
        self.why = ""  # they and no others
        self.salt = ""  # with which they have it
        self.begun = begun
        self.used: tuple[tuple[str, int], ...] = ()  # another one than these was asked for
        self._ring = ring
        self._again = again
        self._mail: Mail | None = None
        self._closed = False  # the reader has been, or need not be, told an ending
        self._cached_tokens = 0

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self) -> Mail | None:
        """What came, at most `READ_MAX` tokens of it at once; the bell rings again for the rest."""
        mail, self._mail = self._mail, None
        if mail is not None and len(mail.tokens) > READ_MAX:
            self._mail = mail.split(READ_MAX)
            self._ring()
        return mail

    def put(self, message: Tokens | PromptScores | Ended) -> None:
        if self._closed:
            return
        if isinstance(message, Ended):
            if self._begun_again(message.outcome):
                return
        else:
            self.said = True
        mail = self._open()
        if isinstance(message, PromptScores):
            mail.scores = joined(mail.scores, message)
        else:
            self._cached_tokens = max(self._cached_tokens, message.cached_tokens)
            mail.cached_tokens = self._cached_tokens
            mail.spec = message.spec or mail.spec
            if isinstance(message, Tokens):
                mail.tokens.extend(message.tokens)
                mail.logprobs.extend(message.logprobs)
                mail.top.extend(message.top or ())
                if message.spec is not None:
                    mail.readings.append((len(mail.tokens), message.spec))
            else:
                mail.draft_record = message.draft_record
                mail.counted = message.counted
                self._close(mail, message.outcome)
        self._ring()

    def end(self, outcome: Outcome) -> None:
        """The attempt ended without a word from its worker."""
        if not self._closed and not self._begun_again(outcome):
            self.close(outcome)

    def close(self, outcome: Outcome) -> None:
        """Ends it for the reader now, whatever the worker says later."""
        if not self._closed:
            self._close(self._open(), outcome)
            self._ring()

    def _begun_again(self, outcome: Outcome) -> bool:
        return not self.said and self._again(outcome)

    def _open(self) -> Mail:
        if self._mail is None:
            self._mail = Mail(cached_tokens=self._cached_tokens)
        return self._mail

    def _close(self, mail: Mail, outcome: Outcome) -> None:
        mail.ended = outcome
        self._closed = True
        self._again = _never  # and so lets go of what was asked


class Ledger:
    """`freed` is called with the name of each request that leaves the table, as it does, and with
    how it ended. `computed` are the tokens that the worker said, of every attempt, by tenant."""

    def __init__(
        self,
        silence_s: float,
        stall_s: float,
        freed: Freed = _nobody,
    ) -> None:
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._freed = freed
        self._tickets: dict[str, Ticket] = {}
        # Whom its worker was told to end, by whom, and when last.
        self._told: dict[str, tuple[Leaver, float]] = {}
        self.hello: Hello | None = None
        self.progress: Progress | None = None
        self.drained = False
        self.computed: Counter[str] = Counter()
        self._heard: Counter[str] = Counter()  # tokens of each request in the table
        self.unknown = 0  # messages for requests that are not in the table
        self.miscounted = 0  # attempts of which the worker says another number than came
        self.lost = 0  # times the worker was lost
        self._came = 0
        self.heard_at = 0.0  # Hello or Progress
        self.progress_at = -inf
        self._moved_at = 0.0  # the engine's counters changed, or nothing was asked of it
        self._held_at = 0.0  # the worker said it holds something, or was just given something

    def __len__(self) -> int:
        return len(self._tickets)

    def open(self, ticket: Ticket, now: float) -> None:
        if ticket.request in self._tickets:
            raise Bug(f"request {ticket.request} was minted twice")
        if not self._tickets:
            self._moved_at = now
        self._held_at = now
        self._tickets[ticket.request] = ticket

    def forget(self, ticket: Ticket) -> None:
        """It never reached the worker."""
        self._tickets.pop(ticket.request)
        self._told.pop(ticket.request, None)
        self._freed(ticket.request, None)

    def detach(self, request: str) -> None:
        """Its reader is served by another attempt: what still comes of this one is for nobody."""
        before = self._tickets[request]
        husk = Ticket(request, lambda: None, tenant=before.tenant, begun=before.begun)
        husk.close(Cancelled("deadline"))
        self._tickets[request] = husk

    def leave(self, ticket: Ticket, by: Leaver) -> bool:
        """The reader wants no more. True if the worker must be told."""
        if ticket.closed:
            return False
        ticket.close(Cancelled(by))
        return ticket.request in self._tickets

    def leave_all(self, by: Leaver) -> list[str]:
        return [ticket.request for ticket in self._tickets.values() if self.leave(ticket, by)]

    def hear(self, message: FromWorker, now: float) -> None:
        match message:
            case Hello():
                self.hello, self.drained = message, False
                self.heard_at = self._moved_at = self._held_at = now
            case Progress():
                self._progress(message, now)
            case Drained():
                self.drained = True
            case Ended():
                self._held_at = now
                self._told.pop(message.request, None)
                heard = self._heard.pop(message.request, 0)
                if ticket := self._tickets.pop(message.request, None):
                    self.miscounted += message.generated not in (None, heard)
                    self._freed(message.request, message.outcome)
                    ticket.put(message)
                else:
                    self.unknown += 1
            case Tokens() | PromptScores():
                self._held_at = now
                known = self._tickets.get(message.request)
                if isinstance(message, Tokens):
                    self.computed[known.tenant if known else ""] += len(message.tokens)
                if known is not None:
                    if isinstance(message, Tokens):
                        self._heard[message.request] += len(message.tokens)
                    known.begun(message.request)
                    known.put(message)
                else:
                    self.unknown += 1
            case Suspected():
                pass  # of another worker: not what this table is about

    @property
    def leaving(self) -> int:
        """Requests that their worker was told to end, and has not said that it did."""
        return len(self._told)

    def told(self, requests: Sequence[str], by: Leaver, now: float) -> None:
        self._told |= {name: (by, now) for name in requests if name in self._tickets}

    def unheard(self, now: float) -> list[tuple[str, Leaver]]:
        """Of those, whom it should be told of once more."""
        return [(name, by) for name, (by, at) in self._told.items() if now - at >= TELL_AGAIN_S]

    def lose(self, why: str) -> list[str]:
        """The worker is gone: everything in flight ends, and is returned by name."""
        tickets, self._tickets, self._told = self._tickets, {}, {}
        self._heard.clear()
        self.hello, self.progress_at = None, -inf
        self.lost += 1
        lost = PeerLost(why)
        for name in tickets:
            self._freed(name, lost)
        for ticket in tickets.values():
            ticket.end(lost)
        return list(tickets)

    def overdue(self, now: float) -> str | None:
        """Why the worker must be taken for lost, if it must."""
        if self.hello is None:
            return None
        if now - self.heard_at > self._silence_s:
            return f"the worker was silent for {self._silence_s:g} s"
        if self._tickets and now - self._held_at > self._silence_s:
            return f"for {self._silence_s:g} s the worker knew of no request that it was given"
        return None

    def why_not_ready(self, now: float) -> list[str]:
        if self.hello is None:
            return ["the worker has not said hello"]
        reasons = []
        if self.progress is None:
            reasons.append("the worker has not reported progress")
        elif now - self.heard_at > self._silence_s / 2:
            reasons.append(f"no report from the worker for {now - self.heard_at:.1f} s")
        if stalled := self.stalled_s(now):
            reasons.append(f"{len(self._tickets)} in flight, no step for {stalled:.1f} s")
        return reasons

    def stalled_s(self, now: float) -> float:
        """Since its counters last moved, where that is too long ago for one that has work."""
        stalled = now - self._moved_at
        return stalled if self._works and stalled > self._stall_s else 0.0

    def moving(self, now: float, within_s: float) -> bool:
        """It has work, and its counters moved so lately: whoever waits for it waits in a queue."""
        return self._works and now - self._moved_at <= within_s

    @property
    def _works(self) -> bool:
        """It has something to do, whoever told it: prefill workers hear of it from decode."""
        said = self.progress
        return bool(self._tickets) or (said is not None and said.running + said.waiting > 0)

    @property
    def _waits_for_peers(self) -> bool:
        """All that decode runs waits for KV that others compute: it has nothing to step for."""
        hello, said = self.hello, self.progress
        if hello is None or said is None or hello.role != "decode":
            return False
        return 0 < said.running <= said.handoffs

    def came(self) -> int:
        """Tokens that were said since this was last asked."""
        before, self._came = self._came, self.computed.total()
        return self._came - before

    def _progress(self, said: Progress, now: float) -> None:
        before, self.progress = self.progress, said
        self.heard_at = self.progress_at = now
        moved = before is None or (before.steps, before.prefill_tokens) != (
            said.steps,
            said.prefill_tokens,
        )
        if moved or not self._works or self._waits_for_peers:
            self._moved_at = now
        if said.running + said.waiting > 0 or not self._tickets:
            self._held_at = now
