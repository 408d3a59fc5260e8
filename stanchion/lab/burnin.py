"""Burn-in of any deployment: what is asked of it, and what its answers are worth. Pure.

The storm is what coding agents do to a KV cache: conversations that extend a shared prefix, bursts
of requests that begin alike, prefixes that come back after long fillers have driven them out, and
clients that leave at any moment of a request. Nothing is known of the server's tokens beforehand,
so lengths are in characters.

An answer is judged by its own log-probabilities: as they were when it was generated, beside those
of the same tokens when the server computes them again, cold. How far two right runs of this server
are apart is calibrated first, on a quiet run. Greedy texts are held against their solo run as well;
two texts that part where both tokens are about as likely are told apart by the server's noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from stanchion.core.errors import ConfigError
from stanchion.core.recording import ClientAbort, Content, Recorded, Times
from stanchion.gateway.monitor.witness import Clean, Confirmed, Scale, Unwitnessed, Verdict, judge
from stanchion.lab.results import Result

FILLER = "filler"  # the session of those that only press
CHARACTERS_A_TOKEN = 2  # at least so many, of source text; only bounds the longest prompt
TURN_CHARACTERS_MIN = 16
Part = Literal["same", "noise", "parted"]


@dataclass(frozen=True)
class Storm:
    """`conversations` begin with each of `prefixes`; one in `burst_every` visits is a burst."""

    requests: int = 5000
    seed: int = 7
    concurrency: int = 16
    prefixes: int = 30
    conversations: int = 4
    turns: int = 4
    prefix_characters: int = 2000
    turn_characters: int = 240
    filler_characters: int = 6000
    filler_every: int = 25
    burst: int = 8
    burst_every: int = 6
    output_tokens: int = 48
    leaving: float = 0.25  # share of clients that do
    sampled: float = 0.25  # share of requests that are not greedy

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prefixes", "conversations", "turns", "burst",
                     "burst_every", "filler_every", "output_tokens", "turn_characters",
                     "prefix_characters", "filler_characters"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("leaving", "sampled"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")

    def fitted(self, context_max: int | None) -> Storm:
        """With prompts that a context of so many tokens has room for. Raise ConfigError where it
        has none for any."""
        if context_max is None:
            return self
        room = (context_max - self.output_tokens) * CHARACTERS_A_TOKEN
        longest = self.prefix_characters + self.turns * self.turn_characters
        smaller = min(1.0, room / max(longest, self.filler_characters))
        if smaller * self.turn_characters < TURN_CHARACTERS_MIN:
            raise ConfigError(f"the server's context of {context_max} tokens is too short")
        return replace(
            self,
            prefix_characters=int(smaller * self.prefix_characters),
            turn_characters=int(smaller * self.turn_characters),
            filler_characters=int(smaller * self.filler_characters),
        )


def requests(storm: Storm, text: str, patience_s: float) -> list[Recorded]:
    """The storm, in order. Those who leave do so after up to twice `patience_s` (what an answer
    takes when nothing else is to do), or after so many tokens."""
    if len(text) < 2 * storm.filler_characters:
        raise ConfigError(f"the text to ask with has {len(text)} characters: too few")
    rng = Random(storm.seed)
    made: list[Recorded] = []
    while len(made) < storm.requests:
        prefix = rng.randrange(storm.prefixes)
        crowd = storm.burst if rng.randrange(storm.burst_every) == 0 else 1
        for _ in range(min(crowd, storm.requests - len(made))):
            number = len(made)
            if number % storm.filler_every == storm.filler_every - 1:
                asked = _stretch(text, storm.filler_characters, rng)
                made.append(_request(storm, number, FILLER, 0, asked, rng, None))
                continue
            talk, turn = rng.randrange(storm.conversations), rng.randrange(storm.turns)
            asked = _prompt(storm, text, prefix, talk, turn)
            leaves = _leaves(storm, rng, patience_s) if rng.random() < storm.leaving else None
            made.append(_request(storm, number, f"{prefix}-{talk}", turn, asked, rng, leaves))
    return made


def quiet(storm: Storm, text: str, count: int) -> list[Recorded]:
    """Requests of the same kind for a run in which nobody leaves and nothing presses."""
    rng = Random(f"{storm.seed} quiet")
    made = []
    for number in range(count):
        asked = _prompt(storm, text, storm.prefixes + number, 0, rng.randrange(storm.turns))
        made.append(_request(storm, number, f"quiet-{number}", 0, asked, rng, None))
    return made


def _prompt(storm: Storm, text: str, prefix: int, talk: int, turn: int) -> str:
    """The same words for the same numbers; a turn extends the one before."""
    said = [_stretch(text, storm.prefix_characters, Random(f"{storm.seed} {prefix}"))]
    for at in range(turn + 1):
        rng = Random(f"{storm.seed} {prefix} {talk} {at}")
        said.append(_stretch(text, storm.turn_characters, rng))
    return "\n".join(said)


def _stretch(text: str, characters: int, rng: Random) -> str:
    first = rng.randrange(len(text) - characters)
    return text[first : first + characters]


def _leaves(storm: Storm, rng: Random, patience_s: float) -> ClientAbort:
    if rng.random() < 0.5:
        return ClientAbort(at_s=rng.uniform(0.0, 2 * patience_s), after_tokens=0)
    return ClientAbort(at_s=0.0, after_tokens=rng.randint(1, storm.output_tokens))


def _request(
    storm: Storm,
    number: int,
    session: str,
    turn: int,
    prompt: str,
    rng: Random,
    leaves: ClientAbort | None,
) -> Recorded:
    greedy = rng.random() >= storm.sampled
    body = {
        "prompt": prompt,
        "max_tokens": 1 if session == FILLER else storm.output_tokens,
        "temperature": 0.0 if greedy else 0.8,
        "seed": number,
    }
    return Recorded(
        request=f"{number:07}",
        session=session,
        turn=turn,
        api="completions",
        times=Times(arrival=0.0),
        input_tokens=0,
        stream=True,
        aborted=leaves,
        content=Content(body=body),
    )


# ---- what the answers are worth -------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """`solo`: how its text compares with the solo run's, where there was one."""

    result: Result
    verdict: Verdict
    solo: Part | None = None
    parted_at: int | None = None  # the first token that is another one

    @property
    def suspect(self) -> bool:
        return isinstance(self.verdict, Confirmed) or self.solo == "parted"


def judged(result: Result, cold: Sequence[float] | None, scale: Scale) -> Verdict:
    """`cold`: scores of the answer's tokens, computed again; None: the server gave none."""
    logged = [one for one in result.logprobs if one is not None]
    if cold is None or len(logged) != len(result.logprobs) or not logged:
        return Unwitnessed("the server gives no log-probabilities to compare")
    return judge(logged, cold, scale)


def unstable(first: Sequence[float], second: Sequence[float], scale: Scale) -> bool:
    """Do two cold runs of the same tokens differ by more than this server's noise? Then no gap to
    either of them says anything."""
    return not isinstance(judge(first, second, scale), Clean)


def compare(storm: Result, solo: Result, scale: Scale) -> tuple[Part, int | None]:
    """Two greedy answers to one prompt. Where they part, each scored the token that it chose: if
    the two scores differ by no more than two right runs may, the choice was a near tie."""
    if storm.tokens and solo.tokens:
        ours, theirs = storm.tokens, solo.tokens
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
        if at is None:
            return (
                ("same", None)
                if len(ours) == len(theirs)
                else ("parted", min(map(len, (ours, theirs))))
            )
        scores = [one.logprobs[at] if at < len(one.logprobs) else None for one in (storm, solo)]
        first, second = scores
        near = scale.drift + scale.threshold
        if first is not None and second is not None and abs(first - second) <= near:
            return "noise", at
        return "parted", at
    return ("same", None) if storm.said == solo.said else ("parted", None)


@dataclass
class Acceptance:
    """Drafts accepted a verify step: of the same greedy answers, in the storm and alone."""

    storm: list[float] = field(default_factory=list)
    solo: list[float] = field(default_factory=list)

    def add(self, storm: Result, solo: Result) -> None:
        first, second = storm.spec, solo.spec
        if storm.tokens != solo.tokens or first is None or second is None:
            return
        if first.verify_steps and second.verify_steps:
            self.storm.append(first.accepted / first.verify_steps)
            self.solo.append(second.accepted / second.verify_steps)

    def differences(self) -> list[float]:
        return [first - second for first, second in zip(self.storm, self.solo)]


def worst(every: Sequence[Judged], count: int) -> Iterator[Judged]:
    """Confirmed ones first, by how early they part; then those whose text is another one."""

    def order(one: Judged) -> tuple[int, int]:
        if isinstance(one.verdict, Confirmed):
            return 0, one.verdict.onset
        return 1, one.parted_at or 0

    yield from sorted((one for one in every if one.suspect), key=order)[:count]
