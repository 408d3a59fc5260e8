"""The rig of the engine's tests: a hash-model engine, its oracle, and a storm of requests.

The oracle of a request is the same request alone, cold, computed in one chunk, with a pool that is
never short. Text, log-probabilities, outcome and draft record must all be equal, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stanchion.core.matching import Grammars
from stanchion.core.messages import Abort, Ended, PromptScores, Start, Tokens
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.flight import Landed
from stanchion.engine.loop import Engine, Landing
from stanchion.engine.scheduler import Limits, Piece
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.pages import Pin
from stanchion.model.hashed import END_TOKEN, HashModel
from stanchion.sim.choices import Choices

TURN_TOKENS_MAX = 200


@dataclass
class Heard:
    """All that was said about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)

    def take(self, message: object) -> None:
        match message:
            case Tokens():
                assert not self.ends, "tokens after the end"
                self.tokens += message.tokens
                self.logprobs += message.logprobs
            case PromptScores():
                self.prompt_logprobs += message.logprobs
            case Ended():
                assert message.generated in (None, len(self.tokens)), "its own count differs"
                self.ends.append(message)

    @property
    def answer(self) -> tuple[object, ...]:
        (end,) = self.ends
        record = end.draft_record
        return self.tokens, self.logprobs, self.prompt_logprobs, end.outcome, record, end.spec


def hashed_engine(
    limits: Limits | None = None,
    pages: int = 4096,
    page_tokens: int = 16,
    top_k: int | None = None,
    failpoints: tuple[str, ...] = (),
    tiers: TierPlan | None = None,
    poisoned: bool = False,
    grammars: Grammars | None = None,
) -> Engine:
    limits = limits or Limits()
    return assemble(
        HashModel(page_tokens, limits.draft_tokens > 0, top_k),
        limits,
        pages,
        eos_ids=(END_TOKEN,),
        failpoints=frozenset(failpoints),
        record_drafts=True,
        poisoned=poisoned,
        tiers=tiers,
        grammars=grammars,
    ).engine


def finish(engine: Engine, starts: list[Start]) -> dict[str, Heard]:
    heard = {start.request: Heard() for start in starts}
    said = engine.step(starts)
    while said or engine.busy:
        for message in said:
            heard[message.request].take(message)
        said = engine.step([]) if engine.busy else []
    return heard


def solo(
    start: Start, draft_tokens: int, top_k: int | None = None, grammars: Grammars | None = None
) -> Heard:
    limits = Limits(chunk_tokens=1 << 16, draft_tokens=draft_tokens)
    pages = (len(start.tokens) + start.sampling.max_tokens) // 16 + 8
    engine = hashed_engine(limits, pages, top_k=top_k, grammars=grammars)
    heard = finish(engine, [start])[start.request]
    assert engine.audit() == []
    return heard


def random_start(
    choices: Choices, name: str, prefixes: list[list[int]], turns: list[Start]
) -> Start:
    """Prompts share prefixes of every length, or go on from an earlier answer as an agent does;
    sampling varies in all that the engine handles."""
    prefix = prefixes[choices.pick(len(prefixes))]
    shared = prefix[: choices.pick(len(prefix) + 1)]
    tenant = f"tenant {choices.pick(4) // 3}"
    if turns and choices.pick(4):
        turn = turns[choices.pick(len(turns))]
        shared, tenant = turn.tokens, turn.tenant
    tail = [32 + choices.pick(95) for _ in range(1 + choices.pick(24))]
    greedy = choices.pick(2) == 0
    penalised = choices.pick(8) == 0
    sampling = Sampling(
        max_tokens=choices.pick(100 if choices.pick(4) == 0 else 30) if choices.pick(16) else 0,
        min_tokens=choices.pick(3),
        temperature=0.0 if greedy else 0.5 + choices.pick(3) / 2,
        top_p=1.0 if choices.pick(2) else 0.9,
        top_k=None if choices.pick(2) else 8,
        min_p=0.0 if choices.pick(4) else 0.05,
        presence_penalty=0.5 if penalised else 0.0,
        repetition_penalty=1.2 if penalised else 1.0,
        seed=choices.pick(1 << 30),
        ignore_eos=choices.pick(2) == 0,
        stop_ids=() if choices.pick(2) else tuple(32 + choices.pick(95) for _ in range(4)),
        prompt_logprobs=None if choices.pick(16) else 0,
        draft_tokens=None if choices.pick(4) else choices.pick(6),
    )
    return Start(
        request=name,
        tokens=shared + tail,
        sampling=sampling,
        tenant=tenant,
    )


@dataclass
class Late:
    """A flight whose work is done when somebody waits for it: clients leave before it begins."""

    launch: Callable[[Sequence[Piece], list[Pin]], Landing]
    pieces: Sequence[Piece]
    pins: list[Pin]

    def wait(self) -> list[Landed]:
        return self.launch(self.pieces, self.pins).wait()


def late(engine: Engine) -> Engine:
    """The same engine over a device that is as late as it may be."""
    launch = engine.launch
    engine.launch = lambda pieces, pins: Late(launch, pieces, pins)
    return engine


@dataclass
class Storm:
    """What a storm did: the answers, and who was aborted in which state."""

    starts: dict[str, Start] = field(default_factory=dict)
    heard: dict[str, Heard] = field(default_factory=dict)
    aborted_in: dict[str, int] = field(default_factory=dict)
    steps: int = 0


Draw = Callable[[Choices, str, list[list[int]], list[Start]], Start]


def storm(
    engine: Engine,
    choices: Choices,
    requests: int,
    abort_one_in: int = 5,
    draw: Draw = random_start,
) -> Storm:
    """Requests arrive in bursts; some are aborted at a moment that the choices pick."""
    result = Storm()
    rng = np.random.default_rng(choices.pick(1 << 30))
    prefixes = [rng.integers(32, 127, 120).tolist() for _ in range(6)]
    turns: list[Start] = []
    while len(result.starts) < requests or engine.busy:
        messages: list[Start | Abort] = []
        for _ in range(choices.pick(4) if len(result.starts) < requests else 0):
            if len(result.starts) < requests:
                start = draw(choices, f"request {len(result.starts)}", prefixes, turns)
                result.starts[start.request] = start
                result.heard[start.request] = Heard()
                messages.append(start)
        if victim := _victim(engine, choices, abort_one_in):
            name, state = victim
            result.aborted_in[state] = result.aborted_in.get(state, 0) + 1
            messages.append(Abort(name, "client"))
        for message in engine.step(messages):
            heard = result.heard[message.request]
            heard.take(message)
            start = result.starts[message.request]
            turn = start.tokens + heard.tokens
            if heard.ends and heard.tokens and len(turn) < TURN_TOKENS_MAX:
                turns = [*turns[-3:], msgspec.structs.replace(start, tokens=turn)]
        result.steps += 1
    return result


def _victim(engine: Engine, choices: Choices, one_in: int) -> tuple[str, str] | None:
    alive = [*engine.running.values(), *engine.waiting]
    preempted = [one for one in engine.waiting if one.generated]  # rare, and so met on purpose
    if preempted and one_in < 100 and choices.pick(2):
        alive = preempted
    elif not alive or choices.pick(one_in):
        return None
    request = alive[choices.pick(len(alive))]
    flying = engine.flight is not None and any(
        pin.holder == f"flight of {request.name}" for pin in engine.flight.pins
    )
    again = "preempted" if request.phase == "waiting" and request.generated else request.phase
    return request.name, again + (" in flight" if flying else "")


def wrong(
    result: Storm,
    draft_tokens: int,
    top_k: int | None = None,
    grammars: Grammars | None = None,
) -> list[str]:
    """Compare every answer with its oracle; an aborted one must be a prefix of it."""
    said = []
    for name, start in result.starts.items():
        heard = result.heard[name]
        if len(heard.ends) != 1:
            said.append(f"{name} ended {len(heard.ends)} times")
            continue
        expected = solo(start, draft_tokens, top_k, grammars)
        if type(heard.ends[0].outcome).__name__ == "Cancelled":
            count = len(heard.tokens)
            record = heard.ends[0].draft_record or []
            same = (
                expected.tokens[:count] == heard.tokens
                and expected.logprobs[:count] == heard.logprobs
                and (expected.ends[0].draft_record or [])[: len(record)] == record
            )
        else:
            same = heard.answer == expected.answer
        if not same:
            said.append(f"{name} differs from its oracle")
    return said
