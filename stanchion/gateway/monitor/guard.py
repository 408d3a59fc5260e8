"""How far an answer may be given out, and what is done about a suspicion. Pure: the machine of one
answer over all attempts at it; whoever drives it does what it says and tells it what came of it.

One promise in every mode: what is released is one sequence of tokens, each once, in order. It is a
whole answer of which nothing is known to be wrong, or a prefix of one and a failure.

* `report`: a suspicion is a verdict. The attempt ends; it is made again if nothing was released.
* `balanced`: tokens are released at once. From a suspicion on they wait for the witness: if it says
  clean, or if there is none, they go on; if it names an onset that was not released yet, another
  attempt goes on from there; if it does, the answer fails.
* `guarded`: the last `hold_tokens` wait until the monitor has seen so many more. As balanced, but
  without a witness a suspected answer is made again if nothing was released, and fails otherwise.
* `strict`: nothing is released before a witness has cleared the whole answer; without one it fails.

An answer that is not streamed is released at its end in every mode, so all of it can be made again.
An attempt that cannot go on (a score that is no number, an engine that gives up) is taken up behind
the tokens that a witness clears, from the start if none was released. One that never said a token
is none of ours: the fleet has made it again. A witness is asked again only when the answer has
become twice as long, and at its end if something rose since: so an answer of n tokens is looked at
no more than log2(n) + 2 times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stanchion.core.messages import Spec, TopToken
from stanchion.core.outcome import Cancelled, Completed, Leaver, Outcome, OutputSuspect
from stanchion.gateway.monitor.fold import Monitor
from stanchion.gateway.monitor.witness import Clean, Confirmed, Unwitnessed, Verdict
from stanchion.gateway.monitor.words import BROKEN, Kind, Suspicion

Mode = Literal["off", "report", "balanced", "guarded", "strict"]
Action = Literal["retry", "witness", "wait", "pass", "fail"]
RETRIES_MAX = 2  # of one answer


@dataclass(frozen=True)
class Contract:
    """`streams`: what is released is sent. `resumable`: it can go on in the middle of an answer.
    `checked`: a witness looks at it before it ends, whether or not anything is suspected."""

    mode: Mode
    streams: bool
    resumable: bool = True
    hold_tokens: int = 128
    checked: bool = False


# ---- what is to be done ---------------------------------------------------------------------


@dataclass(frozen=True)
class Drop:
    """The present attempt is to end; nothing more of it is wanted."""

    by: Leaver = "monitor"


@dataclass(frozen=True)
class Witness:
    """Ask for cold scores of the first so many tokens; answer with `verdict`."""

    tokens: int
    kind: Kind | None  # what it is for; None: nothing is suspected


@dataclass(frozen=True)
class Restart:
    """Make it again elsewhere, after so many tokens; answer with `restarted` or `refused`."""

    keep: int
    why: str


@dataclass(frozen=True)
class Noticed:
    suspicion: Suspicion
    action: Action


Effect = Drop | Witness | Restart | Noticed


@dataclass(frozen=True)
class _Watch:
    """Who looks at the tokens of one attempt."""

    monitor: Monitor
    stopped: Callable[[int], bool] | None

    def look(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        readings: Sequence[tuple[int, Spec]],
    ) -> list[Suspicion]:
        found: list[Suspicion] = []
        first = 0
        for past, spec in readings:
            if past <= len(tokens):
                found += self.monitor.push(tokens[first:past], logprobs[first:past], spec)
                first = past
        return found + self.monitor.push(tokens[first:], logprobs[first:], None)

    def until_stop(self, tokens: Sequence[int]) -> tuple[int, bool]:
        if self.stopped is not None:
            for place, token in enumerate(tokens):
                if self.stopped(token):
                    return place + 1, True
        return len(tokens), False

    def replay(self, tokens: Sequence[int]) -> None:
        """Those of an attempt before, which were judged."""
        self.monitor.replay(tokens)
        self.until_stop(tokens)


class Guard:
    """`monitor` makes the monitor of an attempt, `stops` a function that takes its tokens one by
    one and says whether a stop string is complete."""

    def __init__(
        self,
        contract: Contract,
        monitor: Callable[[], Monitor],
        stops: Callable[[], Callable[[int], bool]] | None = None,
    ) -> None:
        self._contract = contract
        self._make = monitor
        self._make_stops = stops
        self._watch: _Watch | None = None  # of the present attempt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Sequence[TopToken]] = []
        self.released = 0
        self.retries = 0
        self._begun = 0  # tokens that the present attempt found there
        self.failed: Outcome | None = None
        self.ended: Outcome | None = None  # how the attempt did, if it may be told
        self._broken: Suspicion | None = None
        self._asked: Witness | None = None
        self._looked = 0  # tokens that a witness was asked about, or could not be
        self._cleared = 0  # tokens that a witness cleared
        self._open: Suspicion | None = None  # it rose while a witness was busy, or was not due
        self._dropped = False

    def prepare(self) -> _Watch:
        """Reads the prompt. Whoever has time for that before the first token comes asks for it."""
        if self._watch is None:
            self._watch = _Watch(self._make(), self._make_stops and self._make_stops())
        return self._watch

    # ---- what came ----------------------------------------------------------------------

    def came(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[TopToken]],
        readings: Sequence[tuple[int, Spec]] = (),
        ended: Outcome | None = None,
        deaf: Sequence[Kind] = (),
    ) -> list[Effect]:
        """What came of the attempt. `readings`: counters after so many of the tokens. Suspicions of
        the kinds `deaf` are known to mean nothing."""
        if self._over or self._dropped:
            return []
        watch = self.prepare()
        count, stopped = watch.until_stop(tokens)
        found = watch.look(tokens[:count], logprobs[:count], readings)
        before = len(self.tokens)
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.top += top[:count]
        effects: list[Effect] = []
        if stopped:
            self.ended, self._dropped = Completed("stop"), True
            effects.append(Drop("stop_string"))
        elif isinstance(ended, OutputSuspect) and len(self.tokens) > self._begun:
            found.append(Suspicion("engine", ended.evidence, len(self.tokens)))
        else:
            self.ended = ended
        self._break(before, found)
        effects += [Noticed(one, "pass") for one in found if one.kind in deaf]
        return effects + self._consider([one for one in found if one.kind not in deaf])

    def _break(self, before: int, found: Sequence[Suspicion]) -> None:
        """The token whose score is no number, and what follows it, are no part of the answer."""
        for one in found:
            if one.kind in BROKEN and self._broken is None:
                self._broken, self.ended = one, None
                keep = one.at - 1 if one.kind == "nan" else one.at
                self._keep(max(keep, before))

    def _consider(self, found: Sequence[Suspicion]) -> list[Effect]:
        if self.ended is not None and not isinstance(self.ended, Completed):
            return [Noticed(one, "fail") for one in found]
        effects: list[Effect] = []
        for one in found:
            effects += self._suspect(one)
        if self.ended is not None and self._asked is None and not self._over and not self._restarts:
            effects += self._at_end()
        return effects

    @property
    def _restarts(self) -> bool:
        return self._dropped and self.ended is None

    def _suspect(self, one: Suspicion) -> list[Effect]:
        if self._over or self._restarts:
            return []
        if one.kind in BROKEN or self._contract.mode == "report":
            return self._stop(one)
        if self._asked is not None or len(self.tokens) < 2 * self._looked:
            self._open = one
            return [Noticed(one, "wait")]
        return [Noticed(one, "witness"), self._ask(one.kind)]

    def _stop(self, one: Suspicion) -> list[Effect]:
        """The attempt ends here, whatever a witness may say."""
        effects: list[Effect] = [] if self._dropped else [Drop()]
        self._dropped, self.ended = True, None
        if self.released and self._contract.mode != "report" and self.tokens:
            self._broken = one
            if self._asked is not None:
                return [Noticed(one, "wait"), *effects]
            return [Noticed(one, "witness"), *effects, self._ask(one.kind)]
        self._asked = None  # what it would say is of an attempt that is over
        return [Noticed(one, "fail" if self.released else "retry"), *effects, *self._again(0, one)]

    def _ask(self, kind: Kind | None) -> Witness:
        self._open = None
        self._looked = len(self.tokens)
        self._asked = Witness(len(self.tokens), kind)
        return self._asked

    def _at_end(self) -> list[Effect]:
        """The attempt is whole: is there anything that nobody has looked at?"""
        unseen = len(self.tokens) > self._cleared
        if self._contract.mode == "strict":
            return [self._ask(self._open.kind if self._open else None)] if unseen else []
        if len(self.tokens) == self._looked or not self.tokens:
            return []
        if self._open is not None:
            return [self._ask(self._open.kind)]
        return [self._ask(None)] if self._contract.checked and unseen else []

    # ---- what the witness says ----------------------------------------------------------

    def verdict(self, said: Verdict) -> list[Effect]:
        asked, self._asked = self._asked, None
        if asked is None or self._over:
            return []
        match said:
            case Confirmed():
                return self._reject(said)
            case Clean():
                self._cleared = asked.tokens
            case Unwitnessed() if self._needed(asked):
                return self._unwitnessed(said)
        return self._go_on()

    def _needed(self, asked: Witness) -> bool:
        """May it not go on without that witness?"""
        guarded = self._contract.mode == "guarded" and asked.kind is not None
        return guarded or self._contract.mode == "strict" or self._broken is not None

    def _reject(self, said: Confirmed) -> list[Effect]:
        effects: list[Effect] = [] if self._dropped else [Drop()]
        self._dropped, self.ended = True, None
        if said.onset < self.released:
            return effects + self._fail(f"it was confirmed after it was sent ({said.evidence})")
        self._cleared = said.onset
        return effects + self._again(said.onset, said.evidence)

    def _unwitnessed(self, said: Unwitnessed) -> list[Effect]:
        if self._contract.mode == "strict" or self.released or self._broken:
            effects: list[Effect] = [] if self._dropped else [Drop()]
            self._dropped = True
            return effects + self._fail(f"it could not be witnessed: {said.why}")
        effects = [] if self._dropped else [Drop()]
        self._dropped, self.ended = True, None
        return effects + self._again(0, said.why)

    def _go_on(self) -> list[Effect]:
        if self._broken is not None:
            if self._cleared < len(self.tokens):
                return [self._ask(self._broken.kind)]
            return self._again(len(self.tokens), self._broken)
        if self._open is not None and len(self.tokens) >= 2 * self._looked:
            return [self._ask(self._open.kind)]
        return self._at_end() if self.ended is not None else []

    # ---- another attempt ----------------------------------------------------------------

    def _again(self, keep: int, why: Suspicion | str) -> list[Effect]:
        said = why if isinstance(why, str) else f"{why.kind}: {why.evidence}"
        if keep and not self._contract.resumable:
            keep = 0
        if keep < self.released:
            return self._fail(said)
        if self.retries == RETRIES_MAX:
            return self._fail(f"{said}; {RETRIES_MAX + 1} attempts were made")
        return [Restart(keep, said)]

    def restarted(self, keep: int) -> None:
        self._keep(keep)
        self.retries, self._begun = self.retries + 1, keep
        self._broken = self._open = self._asked = self.ended = None
        self._dropped = False
        self._cleared, self._looked = min(self._cleared, keep), 0
        self._watch = None
        self.prepare().replay(self.tokens)

    def refused(self, why: str) -> None:
        """There is no other attempt."""
        self._fail(why)

    def completed(self, as_it: Completed) -> None:
        """There is nothing to go on with: the tokens kept are a whole answer."""
        self._broken = self._open = self._asked = None
        self._cleared, self.ended = len(self.tokens), as_it

    def close(self, by: Leaver) -> None:
        """Nobody waits for it any more."""
        if self.failed is None:
            self.failed = Cancelled(by)

    def _fail(self, why: str) -> list[Effect]:
        self.failed, self.ended = OutputSuspect(why), None
        return []

    def _keep(self, tokens: int) -> None:
        del self.tokens[tokens:], self.logprobs[tokens:], self.top[tokens:]

    # ---- how far ------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self.failed is not None

    @property
    def outcome(self) -> Outcome | None:
        """How the answer ends, once all that may be released has been."""
        if self.failed is not None:
            return self.failed
        if self.ended is None or self._asked is not None:
            return None
        return self.ended if self.limit == len(self.tokens) or not self._whole else None

    @property
    def _whole(self) -> bool:
        return isinstance(self.ended, Completed)

    @property
    def limit(self) -> int:
        """So many tokens may be released, never fewer than were."""
        if self._over or self._asked is not None or self._broken is not None or self._restarts:
            return self.released
        total = len(self.tokens)
        if self._whole:
            cleared = self._contract.mode != "strict" or self._cleared >= total
            return total if cleared else self.released
        if self.ended is not None or not self._contract.streams or self._contract.mode == "strict":
            return self.released
        held = self._contract.hold_tokens if self._contract.mode == "guarded" else 0
        return max(self.released, total - held)
