"""The integrity of answers: `Guard` decides about each, this does what it says.

Promises: in mode `off` a reader has its worker's ticket and nothing else happens; in all others it
has an `Answer`, which is read alike and may have several attempts behind it, one at a time. What is
asked of other workers, and what is made again, stays within the budgets of all answers together.
No clock and no randomness of its own: the time and fresh names come in.

A confirmed answer puts all KV that its workers have cached out of use: their requests get another
salt from then on, so no page of theirs is found again, on any tier, whatever made it wrong. It
costs them their cache. They are told to drop what the answer read, and to put it into quarantine.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib import resources
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Start
from stanchion.core.outcome import Leaver
from stanchion.core.request import Sampling
from stanchion.gateway import journal
from stanchion.gateway.answer import Answer, Mint, Ring, Workers
from stanchion.gateway.choice import Style
from stanchion.gateway.ledger import Ticket
from stanchion.gateway.monitor import baseline
from stanchion.gateway.monitor.budget import Allowance, DraftFaults, RetryBudget, finding
from stanchion.gateway.monitor.fold import Monitor, Reading, Rules
from stanchion.gateway.monitor.guard import Contract, Guard, Mode, Noticed
from stanchion.gateway.monitor.witness import Clean, Confirmed, Scale, Verdict
from stanchion.gateway.monitor.words import Kind
from stanchion.gateway.router import Life
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.splice import resumable, seeded, stopper

Reader = Ticket | Answer


class Integrity:
    """One a gateway. Raise ConfigError if the file of baselines is none."""

    def __init__(
        self,
        settings: GatewaySettings,
        workers: Workers,
        retries: RetryBudget,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self.workers = workers
        self.now = now
        self.mode = cast(Mode, settings.integrity)
        self.allowance = Allowance(settings.witness_tokens_max)
        self.retries = retries
        self.draft_faults = DraftFaults()
        self._baselines = (
            baseline.NO_BASELINES if self.mode == "off" else _baselines(settings.baselines)
        )
        self._epochs: Counter[Life] = Counter()  # confirmed answers
        self.monitored: Counter[str] = Counter()  # answers, by the rule for their acceptance
        self.anomalies: Counter[tuple[str, str]] = Counter()  # by kind and action
        self.verdicts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()  # of quality retries
        self.draft_faults_found = 0
        self.witness_tokens = 0
        self.overruled_witnesses = 0

    def start(
        self, starts: Sequence[Start], ring: Ring, style: Style, streams: bool, mint: Mint
    ) -> list[Reader]:
        """All of them, or none: as `Fleet.start`."""
        if self.mode == "off":
            return [*self.workers.start(starts, ring)]
        starts = [seeded(one) for one in starts]
        tickets = self.workers.start(starts, ring)
        answers: list[Reader] = []
        for start, ticket in zip(starts, tickets, strict=True):
            rules = self._rules(start.sampling, ticket.lives)
            guard = self._guard(rules, start, style, streams)
            rule = "report" if rules.baseline is None else rules.acceptance
            answers.append(Answer(self, start, ticket, guard, style, ring, mint, rule))
        return answers

    def leave(self, reader: Reader, by: Leaver) -> None:
        if isinstance(reader, Answer):
            reader.leave(by)
        else:
            self.workers.leave(reader, by)

    def apart(self, start: Start, lives: Sequence[Life]) -> tuple[str, Sampling]:
        """The salt and the sampling with which these workers get a request."""
        epochs = [self._epochs[life] for life in lives]
        salt, sampling = start.salt, start.sampling
        if any(epochs):
            salt = blake2b(msgspec.json.encode([salt, lives, epochs]), digest_size=16).hexdigest()
        if lives[0] in self.draft_faults:
            sampling = replace(sampling, draft_tokens=0)
        return salt, sampling

    # ---- of one answer ----------------------------------------------------------------------

    def _guard(self, rules: Rules, start: Start, style: Style, streams: bool) -> Guard:
        reading = Reading(start.tokens, style.pieces, style.skipped, style.end_ids)
        contract = Contract(
            self.mode,
            streams,
            resumable(start),
            self._settings.hold_tokens,
            self.mode != "report" and drawn(start.request, self._settings.witness_share),
        )
        stops = (lambda: stopper(style)) if style.stops else None
        return Guard(contract, lambda: Monitor(rules, reading), stops)

    def _rules(self, sampling: Sampling, lives: Sequence[Life]) -> Rules:
        """`lives`: of the workers that have it, the one first that makes its tokens."""
        if self.mode == "report":
            return Rules("report", text=False)
        hello = self.workers.hello_of(lives[0])
        if hello is None:
            return Rules()
        drafts = hello.draft_tokens
        if sampling.draft_tokens is not None:
            drafts = min(drafts, sampling.draft_tokens)
        return Rules(baseline=self._baselines.of(hello.model, hello.revision, drafts))

    def scale(self) -> Scale:
        """How far apart clean runs of what is served are."""
        hello = self.workers.hello
        return Scale() if hello is None else self._baselines.scale(hello.model, hello.revision)

    # ---- books ------------------------------------------------------------------------------

    def noticed(self, answer: Answer, effect: Noticed) -> None:
        one = effect.suspicion
        self.anomalies[one.kind, effect.action] += 1
        line = journal.Line(
            event="anomaly",
            request=answer.request,
            tenant=answer.tenant,
            kind=one.kind,
            action=effect.action,
            token=one.at,
            worker=_names(answer.lives),
        )
        journal.write(line, logging.WARNING)
        if effect.action != "pass":
            self.workers.doubted(answer.lives)

    def overruled(self, answer: Answer, lives: Sequence[Life]) -> None:
        """A witness said that the answer is wrong, and another one that it is not."""
        self.overruled_witnesses += 1
        line = journal.Line(
            event="overruled", request=answer.request, tenant=answer.tenant, worker=_names(lives)
        )
        journal.write(line, logging.WARNING)
        self.workers.overruled(lives)

    def judged(
        self,
        answer: Answer,
        kind: Kind | None,
        said: Verdict,
        lives: Sequence[Life],
        first: bool,
    ) -> None:
        """`first`: of this answer, about its acceptance."""
        found = finding(said)
        self.verdicts[found] += 1
        line = journal.Line(
            event="verdict",
            request=answer.request,
            tenant=answer.tenant,
            kind=kind or "",
            verdict=found,
            token=said.onset if isinstance(said, Confirmed) else 0,
            worker=_names(lives),
        )
        journal.write(line, logging.INFO if isinstance(said, Clean) else logging.WARNING)
        if isinstance(said, Confirmed):
            for life in lives:
                self._epochs[life] += 1
            self.workers.confirmed(answer.request, lives, answer.read())
        elif isinstance(said, Clean):
            self.workers.cleared(lives)
        if kind is None or not lives or not (first or found == "confirmed"):
            return
        if self.draft_faults.found(lives[0], kind, found):
            self.draft_faults_found += 1
            alert = journal.Line(event="draft_fault", worker=lives[0][0], kind=kind)
            journal.write(alert, logging.ERROR)


# ---- words ----------------------------------------------------------------------------------


def drawn(request: str, share: float) -> bool:
    """True for that share of requests, by their names alone."""
    digest = blake2b(request.encode(), digest_size=6, person=b"witness").digest()
    return int.from_bytes(digest, "little") < share * 2**48


def _names(lives: Sequence[Life]) -> str:
    return ",".join(name for name, _ in lives)


def _baselines(path: str) -> baseline.Baselines:
    if not path:
        ours = resources.files("stanchion.gateway.monitor") / "baselines.json"
        return baseline.read(ours.read_bytes(), "baselines.json")
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"baselines: {error}") from None
    return baseline.read(raw, path)
