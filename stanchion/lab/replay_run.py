"""Carries out a plan of replay: sends each step at its time, reads the replies, tells the results.

The clock is the event loop's own; under a loop whose time jumps, a replay of hours takes none. A
step's time comes from the plan and the ends of what it waits for, never from when there was room
for it, so waiting under a cap counts from the schedule (no coordinated omission).

Bodies are made ahead of their time, while nothing else is to do.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stanchion.lab.replay_body import Bodies
from stanchion.lab.replay_plan import Plan, Step
from stanchion.lab.replay_stream import Heard, How, StreamFold, refusal
from stanchion.lab.results import Ending, Result

AHEAD = 256  # bodies that are made before they are due
AHEAD_BYTES = 1 << 26
SLACK_S = 0.005  # nothing is made when less than this is left to the next step
TICK_S = 1e-6  # a timer of the loop may be so much early
FAILPOINTS = "x-stanchion-failpoints"


class Reply(Protocol):
    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raise Unreachable where the connection breaks."""


class Client(Protocol):
    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]:
        """Leaving early closes the connection. Raise Unreachable where there is none."""


class Unreachable(Exception):
    """The connection could not be made, or broke."""


@dataclass(frozen=True)
class Limits:
    """`concurrency`: at most so many at once; others wait, and their wait counts."""

    concurrency: int | None = None
    timeout_s: float = 600.0


@dataclass
class Replay:
    """One process's part of a run. `ended` has what earlier sittings did."""

    plan: Plan
    bodies: Bodies
    client: Client
    limits: Limits
    tell: Callable[[Result], None]
    arm: str = ""
    ended: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_flight = 0
        self._waits: dict[int, int] = {}
        self._after: dict[int, list[Step]] = {}
        self._due: list[tuple[float, int, Step]] = []
        self._made: dict[int, tuple[str, bytes]] = {}
        self._made_bytes = 0
        self._to_make: deque[Step] = deque()
        self._waiting: deque[tuple[float, Step]] = deque()
        for step in self.plan.steps:
            open_ = [one for one in step.after if one not in self.ended]
            for one in open_:
                self._after.setdefault(one, []).append(step)
            self._waits[step.number] = len(open_)
            if not open_:
                self._add(step)
        # A sorted list is a heap.
        self._due.sort(key=lambda one: one[:2])
        self._to_make.extend(step for _, _, step in self._due)

    async def run(self, origin: float) -> None:
        """Until all is sent and ended. `origin`: the run's time 0, on the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._origin = origin
        self._changed = asyncio.Event()
        left = len(self.plan.steps)
        async with asyncio.TaskGroup() as group:
            while left:
                left -= self._send_all(group)
                if left:
                    await self._until_due()

    # ---- when -------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._loop.time() - self._origin

    def _add(self, step: Step) -> None:
        heapq.heappush(self._due, (self.plan.due(step, self.ended), step.number, step))

    def _send_all(self, group: asyncio.TaskGroup) -> int:
        """Everything that is due, or as much as the cap lets through."""
        sent = 0
        while self._due and self._due[0][0] <= self._now() + TICK_S:
            due, _, step = heapq.heappop(self._due)
            self._waiting.append((due, step))
        while self._waiting and self._room():
            due, step = self._waiting.popleft()
            self.in_flight += 1
            group.create_task(self._one(step, due))
            sent += 1
        return sent

    def _room(self) -> bool:
        cap = self.limits.concurrency
        return cap is None or self.in_flight < cap

    async def _until_due(self) -> None:
        """Until the next step's time, or until something ended."""
        self._changed.clear()
        if not self._due:
            await self._changed.wait()
            return
        at = self._origin + self._due[0][0]
        while self._wants_more() and self._loop.time() < at - SLACK_S:
            self._make_one()
            await asyncio.sleep(0)  # replies are read in between
            if self._changed.is_set():
                return
        timer = self._loop.call_at(at, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    def _over(self, step: Step, at: float) -> None:
        self.in_flight -= 1
        self.ended[step.number] = at
        for one in self._after.pop(step.number, ()):
            self._waits[one.number] -= 1
            if not self._waits[one.number]:
                self._add(one)
        self._changed.set()

    # ---- what -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the first bodies, before the run begins."""
        while self._wants_more():
            self._make_one()

    def _wants_more(self) -> bool:
        some = len(self._made) < AHEAD and self._made_bytes < AHEAD_BYTES
        return bool(self._to_make) and some

    def _make_one(self) -> None:
        step = self._to_make.popleft()
        if step.number in self._waits and step.number not in self._made:
            self._made[step.number] = self._make(step)
            self._made_bytes += len(self._made[step.number][1])

    def _make(self, step: Step) -> tuple[str, bytes]:
        path, body = self.bodies.of(step)
        return path, msgspec.json.encode(body)

    def _take(self, step: Step) -> tuple[str, bytes]:
        made = self._made.pop(step.number, None)
        del self._waits[step.number]  # nobody need make it any more
        if made is None:
            return self._make(step)
        self._made_bytes -= len(made[1])
        return made

    # ---- one request ------------------------------------------------------------------------

    async def _one(self, step: Step, due: float) -> None:
        path, body = self._take(step)
        self._to_make.extend(self._after.get(step.number, ()))
        asked = Asked(self.client, self._now, self.limits.timeout_s)
        others = self.in_flight - 1
        ending = await asked.ask(path, body, step)
        end = self._now()
        self.tell(_result(step, due, asked, ending, end, self, others, path, body))
        self._over(step, end)


@dataclass
class Asked:
    """One request on its way, and what came of it."""

    client: Client
    now: Callable[[], float]
    timeout_s: float
    send: float | None = None
    status: int | None = None
    failpoints: str = ""
    fold: StreamFold = field(default_factory=StreamFold)

    async def ask(self, path: str, body: bytes, step: Step) -> Ending:
        why = ""
        how: How
        try:
            async with asyncio.timeout(self.timeout_s):
                how = await self._read(path, body, step)
        except Unreachable as error:
            how, why = "broken", str(error)
        except TimeoutError:
            how, why = "broken", f"it took over {self.timeout_s:g} s"
        return self.fold.ending(how, why)

    async def _read(self, path: str, body: bytes, step: Step) -> How:
        self.send = self.now()
        leaves = step.abort
        try:
            # Without a token the client's patience is what is known of it.
            patience = leaves.at_s if leaves is not None and not leaves.after_tokens else None
            async with asyncio.timeout(patience):
                return await self._stream(path, body, leaves.after_tokens if leaves else 0)
        except TimeoutError:
            if patience is None:
                raise  # it is the other one's, around this
            return "left"

    async def _stream(self, path: str, body: bytes, tokens_max: int) -> How:
        async with self.client.post(path, body) as reply:
            self.status = reply.status
            self.failpoints = reply.headers.get(FAILPOINTS, "")
            if reply.status >= 400:
                raw = b"".join([chunk async for chunk in reply.chunks()])
                raise Unreachable(refusal(reply.status, raw))
            async for chunk in reply.chunks():
                self.fold.push(self.now(), chunk)
                if tokens_max and self.fold.heard.so_far >= tokens_max:
                    return "left"
        return "closed"


def _result(
    step: Step,
    due: float,
    asked: Asked,
    ending: Ending,
    end: float,
    run: Replay,
    others: int,
    path: str,
    body: bytes,
) -> Result:
    heard: Heard = asked.fold.heard
    return Result(
        request=step.recorded.request,
        session=step.recorded.session,
        turn=step.recorded.turn,
        copy=step.copy,
        arm=run.arm,
        due=due,
        send=asked.send,
        first_byte=heard.first_byte,
        first_token=heard.first_token,
        first_content=heard.first_content,
        last_token=heard.last_token,
        end=end,
        gap_s_max=heard.gap_s_max,
        speed=run.plan.pace.speed_at(due),
        in_flight=others,
        status=asked.status,
        ending=ending,
        finish=heard.finish,
        error=heard.error,
        input_tokens=heard.input_tokens,
        output_tokens=heard.counted,
        cached_tokens=heard.cached_tokens,
        text="".join(heard.texts),
        reasoning="".join(heard.reasonings),
        calls=heard.calls_in_order(),
        tokens=tuple(heard.tokens),
        logprobs=tuple(heard.logprobs),
        points=tuple(heard.points),
        accepts=tuple(heard.accepts),
        failpoints=asked.failpoints,
        path=path,
        body=msgspec.Raw(body),
    )
