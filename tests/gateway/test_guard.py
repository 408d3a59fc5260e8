"""The machine of one answer: over all splits, onsets, suspicions and witnesses, what is released is
one right text, or a prefix of one and a failure (D22). Wrong machines are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from stanchion.core.outcome import Cancelled, Completed, Outcome, OutputSuspect, PeerLost
from stanchion.gateway.monitor.guard import (
    RETRIES_MAX,
    Contract,
    Drop,
    Effect,
    Guard,
    Mode,
    Noticed,
    Restart,
    Witness,
)
from stanchion.gateway.monitor.witness import (
    Clean,
    Confirmed,
    Scale,
    Unwitnessed,
    Verdict,
    judge,
)
from stanchion.gateway.monitor.words import Kind, Suspicion
from stanchion.sim.choices import Choices, seeded

ORACLE = list(range(1000, 1060))
LENGTH = Completed("length")
HOLD = 8
SEEDS = 400
MODES: tuple[Mode, ...] = ("report", "balanced", "guarded", "strict")


@dataclass
class Attempt:
    """Tokens from `onset` on are wrong, and logged with other scores than a cold run gives them."""

    onset: int | None = None
    suspected: tuple[int, ...] = ()  # at so many tokens of the answer
    kind: Kind = "loop"
    broken_at: int | None = None  # the engine gives up there

    def token(self, at: int) -> int:
        return ORACLE[at] if self.onset is None or at < self.onset else -at

    def logprob(self, at: int) -> float:
        return -1.0 if self.onset is None or at < self.onset else -9.0


@dataclass
class Scripted:
    """Suspects an attempt where it is told to."""

    attempt: Attempt
    tokens: int = 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[float], spec: Any) -> list[Suspicion]:
        first, self.tokens = self.tokens, self.tokens + len(tokens)
        one = self.attempt
        return [Suspicion(one.kind, "", at) for at in one.suspected if first < at <= self.tokens]

    def replay(self, tokens: Sequence[int]) -> None:
        self.tokens += len(tokens)


@dataclass
class World:
    """Attempts in turn, a witness that may be late or absent, a reader that takes what it may."""

    choices: Choices
    mode: Mode
    streams: bool
    attempts: list[Attempt]
    witnesses: bool = True
    resumable: bool = True
    checked: bool = False
    machine: type[Guard] = Guard
    sent: list[int] = field(default_factory=list)
    made: int = 0
    asked: list[Witness] = field(default_factory=list)
    dropped: bool = False
    at: int = 0
    outcome: Outcome | None = None

    def run(self) -> World:
        contract = Contract(self.mode, self.streams, self.resumable, HOLD, self.checked)
        self.guard = self.machine(contract, lambda: Scripted(self.attempts[self.made]))  # type: ignore[arg-type, return-value]
        for _ in range(1000):
            if self.outcome is not None:
                return self
            self._turn()
        raise AssertionError("it neither goes on nor ends")

    def _turn(self) -> None:
        if self.asked and (self._attempt_over or self.choices.pick(3) == 0):
            self._do(self.guard.verdict(self._verdict(self.asked.pop())))
        elif not self._attempt_over:
            self._do(self._batch())
        self._take()

    @property
    def _attempt_over(self) -> bool:
        return self.dropped or self.at == len(ORACLE)

    def _batch(self) -> list[Effect]:
        attempt, first = self.attempts[self.made], self.at
        self.at = min(len(ORACLE), first + 1 + self.choices.pick(6))
        places, ended = range(first, self.at), LENGTH if self.at == len(ORACLE) else None
        if attempt.broken_at is not None and self.at >= attempt.broken_at:
            self.at = len(ORACLE)
            places, ended = range(first, attempt.broken_at), OutputSuspect("a page differs")  # type: ignore[assignment]
        tokens = [attempt.token(at) for at in places]
        return self.guard.came(tokens, [attempt.logprob(at) for at in places], (), (), ended)

    def _verdict(self, asked: Witness) -> Verdict:
        if not self.witnesses:
            return Unwitnessed("nobody is there")
        logged = self.guard.logprobs[: asked.tokens]
        assert len(logged) == asked.tokens
        return judge(logged, [-1.0] * asked.tokens, Scale())

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Drop():
                    self.dropped = True
                case Witness():
                    assert not self.asked, "one witness at a time"
                    self.asked.append(effect)
                case Restart():
                    assert self.dropped or self.at == len(ORACLE), "two attempts at a time"
                    self.asked.clear()
                    self.made += 1
                    if self.made == len(self.attempts):
                        self.guard.refused("nobody could make it again")
                        return
                    self.dropped, self.at = False, effect.keep
                    self.guard.restarted(effect.keep)

    def _take(self) -> None:
        limit = self.guard.limit
        assert limit >= self.guard.released
        self.sent += self.guard.tokens[self.guard.released : limit]
        self.guard.released = limit
        self.outcome = self.guard.outcome

    def check(self) -> None:
        """What was sent is one right text, or a failure; where it can be known, a right prefix."""
        if isinstance(self.outcome, Completed):
            assert self.sent == ORACLE, "a wrong text was completed"
        elif self.mode == "strict" or not self.streams:
            assert self.sent == [], "something was sent before it was cleared"
        else:
            assert len(self.sent) <= len(ORACLE), "something was sent twice"
            # A failure: a right prefix, or one that a single attempt spoilt to its end.
            right = [one == ORACLE[at] for at, one in enumerate(self.sent)]
            assert right == sorted(right, reverse=True), "two attempts were mixed"


def drawn(seed: int, mode: Mode, streams: bool, **more: Any) -> World:
    choices = seeded(seed)
    attempts = []
    for _ in range(RETRIES_MAX + 1):
        onset = choices.pick(len(ORACLE)) if choices.pick(2) else None
        marks = {1 + choices.pick(len(ORACLE)) for _ in range(choices.pick(3))}
        if onset is not None:
            # It is suspected sooner or later, wherever it is taken up.
            marks |= {onset + 1 + choices.pick(len(ORACLE) - onset), len(ORACLE)}
        broken = choices.pick(len(ORACLE)) if choices.pick(4) == 0 else None
        attempts.append(Attempt(onset, tuple(sorted(marks)), broken_at=broken))
    return World(choices, mode, streams, attempts, **more)


def explore(mode: Mode, streams: bool, **more: Any) -> dict[str, int]:
    ends: dict[str, int] = {}
    for seed in range(SEEDS):
        world = drawn(seed, mode, streams, **more).run()
        try:
            world.check()
        except AssertionError as error:
            raise AssertionError(f"{error}: seed {seed}, {world.attempts}") from None
        name = type(world.outcome).__name__
        ends[name] = ends.get(name, 0) + 1
    return ends


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("resumable", [False, True])
def test_one_right_text_or_a_failure(mode: Mode, streams: bool, resumable: bool) -> None:
    ends = explore(mode, streams, resumable=resumable)
    assert ends.keys() == {"Completed", "OutputSuspect"}, "both ends must be met"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", ["guarded", "strict"])
def test_without_a_witness_nothing_suspected_is_completed(mode: Mode, streams: bool) -> None:
    ends = explore(mode, streams, witnesses=False)
    assert ends["OutputSuspect"] > 0 and (mode == "strict") is ("Completed" not in ends)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", ["balanced", "guarded"])
def test_an_answer_that_is_checked_needs_no_suspicion(mode: Mode, streams: bool) -> None:
    """Damage that nobody suspects: made again where nothing was sent, an error where it was."""
    for seed in range(SEEDS):
        choices = seeded(seed)
        attempts = [Attempt(choices.pick(len(ORACLE))), Attempt(choices.pick(59) + 1), Attempt()]
        world = World(choices, mode, streams, attempts, checked=True).run()
        world.check()
        assert isinstance(world.outcome, OutputSuspect if streams else Completed) or (
            attempts[0].onset is not None and attempts[0].onset >= len(ORACLE) - 2 * HOLD
        )
    alone = World(seeded(1), mode, streams, [Attempt()], witnesses=False, checked=True).run()
    assert isinstance(alone.outcome, Completed), "it is no suspicion if nobody could look"


def test_balanced_gives_out_what_nobody_could_look_at() -> None:
    """Which is why `unwitnessed` is counted, and is not `clean`."""
    sick = Attempt(10, (20,))
    world = World(seeded(1), "balanced", True, [sick], witnesses=False).run()
    assert isinstance(world.outcome, Completed) and world.sent != ORACLE


# ---- wrong machines -------------------------------------------------------------------------


class NoOnset(Guard):
    """Goes on behind all that there is, wherever the damage began."""

    def _reject(self, said: Confirmed) -> list[Effect]:
        return super()._reject(Confirmed(len(self.tokens), said.evidence))


class Impatient(Guard):
    """Gives out what a witness is still busy with."""

    @property
    def limit(self) -> int:
        return len(self.tokens) if self.failed is None else self.released


class FromTheTop(Guard):
    """Begins again from nothing though something was sent."""

    def _again(self, keep: int, why: Suspicion | str) -> list[Effect]:
        made = super()._again(keep, why)
        return [Restart(0, one.why) if isinstance(one, Restart) else one for one in made]

    def restarted(self, keep: int) -> None:
        super().restarted(keep)
        self.released = 0


@pytest.mark.parametrize(
    ("mode", "machine"),
    [
        ("balanced", NoOnset),
        ("guarded", NoOnset),
        ("strict", NoOnset),
        ("strict", Impatient),
        ("guarded", FromTheTop),
        ("balanced", FromTheTop),
    ],
)
def test_a_wrong_machine_is_caught(mode: Mode, machine: type[Guard]) -> None:
    with pytest.raises(AssertionError):
        explore(mode, True, machine=machine)


# ---- one by one -----------------------------------------------------------------------------


def _guard(mode: Mode, streams: bool = True, *attempts: Attempt, **more: Any) -> Guard:
    made = iter(attempts or (Attempt(),) * 9)
    contract = Contract(mode, streams, hold_tokens=HOLD, **more)
    return Guard(contract, lambda: Scripted(next(made)))  # type: ignore[arg-type, return-value]


def _came(guard: Guard, count: int, ended: Outcome | None = None) -> list[Effect]:
    first = len(guard.tokens)
    tokens = ORACLE[first : first + count]
    return guard.came(tokens, [-1.0] * count, (), (), ended)


@pytest.mark.parametrize(
    ("mode", "streams", "limit"),
    [
        ("report", True, 20),
        ("balanced", True, 20),
        ("guarded", True, 20 - HOLD),
        ("strict", True, 0),
        ("balanced", False, 0),
        ("report", False, 0),
    ],
)
def test_what_each_mode_releases_before_the_end(mode: Mode, streams: bool, limit: int) -> None:
    guard = _guard(mode, streams)
    assert _came(guard, 20) == [] and guard.limit == limit
    effects = _came(guard, 0, LENGTH)
    if mode == "strict":
        assert effects == [Witness(20, None)] and guard.limit == 0 and guard.outcome is None
        assert guard.verdict(Clean()) == []
    assert guard.limit == 20 and guard.outcome == LENGTH


def test_an_answer_without_tokens_needs_no_witness() -> None:
    guard = _guard("strict")
    assert _came(guard, 0, LENGTH) == [] and guard.outcome == LENGTH


def test_a_worker_that_is_lost_or_a_reader_that_leaves_is_no_question_of_quality() -> None:
    for ended in (PeerLost("gone"), Cancelled("client")):
        guard = _guard("guarded")
        _came(guard, 20)
        assert _came(guard, 3, ended) == []
        assert guard.limit == guard.released == 0 and guard.outcome == ended


def test_in_report_mode_a_suspicion_is_a_verdict() -> None:
    sick = Attempt(suspected=(10,), kind="low_acceptance")
    guard = _guard("report", True, sick, Attempt())
    suspicion = Suspicion("low_acceptance", "", 10)
    assert _came(guard, 10) == [
        Noticed(suspicion, "retry"), Drop(), Restart(0, "low_acceptance: ")
    ]  # fmt: skip
    guard = _guard("report", True, sick, Attempt())
    _came(guard, 5)
    guard.released = 5
    assert _came(guard, 5) == [Noticed(suspicion, "fail"), Drop()]
    assert isinstance(guard.outcome, OutputSuspect)


def test_known_draft_faults_are_passed_over() -> None:
    guard = _guard("balanced", True, Attempt(suspected=(10,), kind="low_acceptance"))
    suspicion = Suspicion("low_acceptance", "", 10)
    said = guard.came(ORACLE[:12], [-1.0] * 12, (), (), None, ("low_acceptance",))
    assert said == [Noticed(suspicion, "pass")] and guard.limit == 12


def test_a_cleared_answer_is_looked_at_again_when_it_is_twice_as_long_and_at_its_end() -> None:
    guard = _guard("balanced", True, Attempt(suspected=(10, 15, 21, 30)))
    assert Witness(10, "loop") in _came(guard, 10)
    assert guard.limit == 0, "it waits"
    assert guard.verdict(Clean()) == [] and guard.limit == 10
    assert [type(one) for one in _came(guard, 5)] == [Noticed] and guard.limit == 15
    assert Witness(21, "loop") in _came(guard, 6)
    assert guard.verdict(Clean()) == []
    assert [type(one) for one in _came(guard, 9)] == [Noticed]
    assert Witness(40, "loop") in _came(guard, 10, LENGTH) and guard.outcome is None
    assert guard.verdict(Clean()) == [] and guard.outcome == LENGTH


def test_a_stop_string_ends_an_attempt_whose_tokens_still_wait() -> None:
    def stops() -> Any:
        return lambda token: token == ORACLE[4]

    contract = Contract("guarded", True, hold_tokens=HOLD)
    guard = Guard(contract, lambda: Scripted(Attempt()), stops)  # type: ignore[arg-type, return-value]
    assert guard.came(ORACLE[:9], [-1.0] * 9, ()) == [Drop("stop_string")]
    assert guard.tokens == ORACLE[:5] and guard.limit == 5
    assert guard.outcome == Completed("stop")


def test_its_monitor_is_made_once_an_attempt_when_it_is_asked_for_or_needed() -> None:
    made: list[Scripted] = []

    def monitor() -> Any:
        made.append(Scripted(Attempt()))
        return made[-1]

    for asked in (False, True):
        made.clear()
        guard = Guard(Contract("balanced", True), monitor)
        assert not made, "nothing is read before the request has left"
        if asked:
            guard.prepare()
            guard.prepare()
            assert len(made) == 1
        _came(guard, 3)
        _came(guard, 3)
        assert len(made) == 1
        guard.restarted(2)
        _came(guard, 3)
        assert len(made) == 2


def test_after_all_retries_it_fails() -> None:
    guard = _guard("strict", True, *(Attempt(),) * 5)
    for _ in range(RETRIES_MAX):
        _came(guard, 60 - len(guard.tokens), LENGTH)
        assert guard.verdict(Confirmed(7, "apart"))[-1] == Restart(7, "apart")
        guard.restarted(7)
    _came(guard, 53, LENGTH)
    guard.verdict(Confirmed(7, "apart"))
    assert isinstance(guard.outcome, OutputSuspect) and guard.limit == 0
