"""An engine with tiers whose copies are as late as they may be, under clients that share prefixes.

Copies run on simulated queues: a job is done when the seed says, or when a door waits for it. So
whoever reads too early finds what the page held before, every time and not now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from stanchion.core.messages import Abort, Ended, Start
from stanchion.core.request import Sampling
from stanchion.device.stream import JobQueue, Queue
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.tiers import Tiers
from stanchion.sim.choices import Choices, seeded
from stanchion.sim.late import LateQueue
from tests.engine.rig import Heard, hashed_engine, solo

PAGE = 16


@dataclass
class Queues:
    """The queues of one engine's tiers. `turn` lets each of them get on, or not."""

    choices: Choices
    made: dict[str, LateQueue] = field(default_factory=dict)
    every: list[LateQueue] = field(default_factory=list)  # of all engines that were given these

    def __call__(self, name: str) -> JobQueue:
        self.made[name] = LateQueue(self.choices)
        self.every.append(self.made[name])
        return self.made[name]

    def turn(self) -> None:
        for queue in self.every:
            queue.turn()


@dataclass
class Clients:
    """`count` clients, each with one request open; prompts begin with one of the `prefixes`."""

    count: int = 8
    prefixes: int = 30
    prefix_tokens: int = 96
    abort_one_in: int = 0
    greedy: bool = False


@dataclass
class Run:
    starts: dict[str, Start] = field(default_factory=dict)
    heard: dict[str, Heard] = field(default_factory=dict)
    steps: int = 0


def drive(
    engine: Engine, clients: Clients, choices: Choices, requests: int, queues: Queues | None
) -> Run:
    run = Run()
    rng = np.random.default_rng(choices.pick(1 << 30))
    prefixes = [
        rng.integers(32, 127, clients.prefix_tokens).tolist() for _ in range(clients.prefixes)
    ]
    alive: list[str] = []
    idle = 0
    while len(run.starts) < requests or engine.busy:
        messages: list[Start | Abort] = []
        while len(alive) < clients.count and len(run.starts) < requests:
            name = f"request {len(run.starts)}"
            start = _start(clients, choices, name, prefixes)
            run.starts[name], run.heard[name] = start, Heard()
            messages.append(start)
            alive.append(name)
        if clients.abort_one_in and alive and not choices.pick(clients.abort_one_in):
            messages.append(Abort(alive[choices.pick(len(alive))], "client"))
        said = engine.step(messages)
        for message in said:
            run.heard[message.request].take(message)
            if isinstance(message, Ended):
                alive.remove(message.request)
        if queues is not None:
            queues.turn()
        run.steps += 1
        idle = 0 if said or engine.flight or queues is None else idle + 1
        assert idle < 100_000, "the engine makes no progress"
    return run


def _start(clients: Clients, choices: Choices, name: str, prefixes: list[list[int]]) -> Start:
    prefix = prefixes[choices.pick(len(prefixes))]
    tail = [32 + choices.pick(95) for _ in range(1 + choices.pick(20))]
    sampling = Sampling(
        max_tokens=1 + choices.pick(6),
        temperature=0.0 if clients.greedy or choices.pick(2) else 0.8,
        seed=choices.pick(1 << 30),
        ignore_eos=True,
    )
    return Start(request=name, tokens=prefix + tail, sampling=sampling)


class Oracle:
    """The same request alone, cold, in one engine that has no tiers and keeps nothing."""

    def __init__(self, top_k: int | None) -> None:
        self._top_k = top_k

    def wrong(self, run: Run) -> list[str]:
        said = []
        for name, start in run.starts.items():
            heard = run.heard[name]
            if len(heard.ends) != 1:
                said.append(f"{name} ended {len(heard.ends)} times")
                continue
            expected = solo(start, 3, self._top_k)
            (end,) = heard.ends
            if type(end.outcome).__name__ == "Cancelled":
                same = expected.tokens[: len(heard.tokens)] == heard.tokens
            else:
                same = heard.answer == expected.answer
            if not same:
                said.append(f"{name} differs from its oracle")
        return said


@dataclass(frozen=True)
class Sizes:
    """In pages: a device so small that prefixes leave it, a host so small that each load evicts."""

    device: int = 40
    host: int = 60
    chunk_tokens: int = 64


def tiered(
    seed: int, plan: TierPlan | None = None, sizes: Sizes | None = None, top_k: int | None = None
) -> tuple[Engine, Queues]:
    sizes = sizes or Sizes()
    queues = Queues(seeded(seed))
    plan = replace(plan or TierPlan(sizes.host), queue=queues, slots=sizes.host)
    limits = Limits(chunk_tokens=sizes.chunk_tokens, running_max=8)
    return hashed_engine(limits, sizes.device, PAGE, top_k, tiers=plan), queues


# ---- one prefix, pushed out to a tier and asked for again ------------------------------------


@dataclass
class Stalling:
    """A queue that does each job at once, until one stalls: then what follows is done when somebody
    stands still for it. `stall` is the load's delay."""

    jobs: deque[Callable[[], None]] = field(default_factory=deque)
    done: int = 0
    stalled: bool = False
    stalls: int = 0

    def stall(self, seconds: float) -> None:
        self.stalled, self.stalls = True, self.stalls + 1

    def submit(self, job: Callable[[], None]) -> int:
        self.jobs.append(job)
        mark = self.mark()
        self._go()
        return mark

    def mark(self) -> int:
        return self.done + len(self.jobs)

    def wait(self, other: Queue, mark: int) -> None:
        self.submit(lambda: other.finish(mark))

    def passed(self, mark: int) -> bool:
        return self.done >= mark

    def finish(self, mark: int) -> None:
        while self.done < mark:
            self.stalled = False
            self._go()

    def turn(self) -> None:
        self.stalled = False
        self._go()

    def close(self) -> None:
        self.jobs.clear()

    def _go(self) -> None:
        while self.jobs and not self.stalled:
            self.jobs.popleft()()
            self.done += 1


@dataclass
class Still:
    """Tiers whose queues do everything at once, but for what is said to stall."""

    made: dict[str, Stalling] = field(default_factory=dict)

    def __call__(self, name: str) -> JobQueue:
        self.made[name] = Stalling()
        return self.made[name]

    def turn(self) -> None:
        for queue in self.made.values():
            queue.turn()

    def stall(self, seconds: float) -> None:
        self.made["load"].stall(seconds)


def still_engine(
    plan: TierPlan, device: int = 48, top_k: int | None = None, drafts: int = 3
) -> tuple[Engine, Still]:
    still = Still()
    plan = replace(plan, queue=still, sleep=still.stall)
    limits = Limits(chunk_tokens=256, running_max=8, draft_tokens=drafts)
    return hashed_engine(limits, device, PAGE, top_k, tiers=plan, poisoned=True), still


def run_all(engine: Engine, queues: Still | Queues, starts: list[Start]) -> dict[str, Heard]:
    """All at once, to their ends, and until no copy is left."""
    heard = {start.request: Heard() for start in starts}
    messages: list[Start | Abort] = list(starts)
    for _ in range(100_000):
        for message in engine.step(messages):
            heard[message.request].take(message)
        messages = []
        queues.turn()
        if not engine.busy:
            return heard
    raise AssertionError("the engine makes no progress")


def prompt(seed: int, tokens: int) -> list[int]:
    return list(np.random.default_rng(seed).integers(32, 127, tokens).tolist())


def asks(name: str, tokens: list[int], output: int = 12, tenant: str = "") -> Start:
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    return Start(request=name, tokens=tokens, sampling=sampling, tenant=tenant)


def push_out(
    engine: Engine, queues: Still | Queues, fillers: int, tokens: int = 400, first: int = 900
) -> None:
    """Fill the device, and the host where it is small, with other people's prompts."""
    for at in range(fillers):
        run_all(engine, queues, [asks(f"filler {first + at}", prompt(first + at, tokens), 1)])


def cached(heard: Heard) -> int:
    (end,) = heard.ends
    return end.cached_tokens


def close(engine: Engine) -> None:
    assert engine.tiered is not None
    engine.tiered.tiers.close()


def tiers_of(engine: Engine) -> Tiers:
    assert engine.tiered is not None
    return engine.tiered.tiers
