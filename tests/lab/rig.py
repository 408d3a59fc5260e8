"""A loop whose time jumps, and servers that are functions of it."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stanchion.core.recording import ClientAbort, Content, Recorded, Times
from stanchion.lab.replay_body import Bodies
from stanchion.lab.replay_plan import Plan
from stanchion.lab.replay_run import Limits, Replay, Unreachable
from stanchion.lab.results import Result

Answer = TypeVar("Answer")
Pieces = Sequence[tuple[float, bytes]]  # (seconds after the one before, what comes)


class _Jumping(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Nothing is waited for: what the loop would have slept is added to its time."""

    slept = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for ever"
            self.slept += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.slept


def run(work: Coroutine[Any, Any, Answer]) -> Answer:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Scripted:
    """A client of a server that needs no network. `script(path, body)` says what comes when."""

    script: Callable[[str, dict[str, Any]], Pieces]
    status: int = 200
    breaks: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    asked: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    left: int = 0  # connections that were closed before their end
    yielded: int = 0  # pieces that were sent

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[_Reply]:
        said = json.loads(body)
        self.asked.append((asyncio.get_running_loop().time(), path, said))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        reply = _Reply(self, self.script(path, said), self.status, self.headers)
        try:
            yield reply
        finally:
            self.open -= 1
            self.left += not reply.over


@dataclass
class _Reply:
    server: Scripted
    pieces: Pieces
    status: int
    headers: Mapping[str, str]
    over: bool = False

    async def chunks(self) -> AsyncIterator[bytes]:
        for pause, data in self.pieces:
            await asyncio.sleep(pause)
            self.server.yielded += 1
            yield data
        self.over = True
        if self.server.breaks:
            raise Unreachable("the connection broke")


def chunk(**more: Any) -> bytes:
    return b"data: " + json.dumps(more).encode() + b"\n\n"


def delta(content: str = "", finish: str | None = None, **more: Any) -> bytes:
    said = ({"content": content} if content else {}) | more
    return chunk(choices=[{"index": 0, "delta": said, "finish_reason": finish}])


def usage(prompt: int, completion: int) -> bytes:
    return chunk(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


def plain(text: str = "yes", after_s: float = 0.0) -> Pieces:
    """One piece of an answer, and its end, at once."""
    return [(after_s, delta(text)), (0.0, delta(finish="stop") + usage(5, 1) + DONE)]


def recorded(name: str, at: float, **more: Any) -> Recorded:
    """A request with content, of a session of its own unless told."""
    times = Times(arrival=at, end=more.pop("end", None))
    content = Content(body={"messages": [{"role": "user", "content": name}], "temperature": 0})
    given = {"session": name, "api": "chat", "input_tokens": 10, "content": content} | more
    return Recorded(request=name, times=times, **given)


def left(at_s: float, after_tokens: int = 0) -> ClientAbort:
    return ClientAbort(at_s=at_s, after_tokens=after_tokens)


def replay(
    plan: Plan,
    client: Any,
    limits: Limits | None = None,
    bodies: Bodies | None = None,
    ended: dict[int, float] | None = None,
) -> list[Result]:
    """All results, in virtual time. The run begins at 1 s on the loop's clock."""
    told: list[Result] = []
    one = Replay(
        plan, bodies or Bodies(model="m"), client, limits or Limits(), told.append,
        ended=dict(ended or {}),
    )  # fmt: skip

    async def whole() -> None:
        one.prepare()
        await one.run(origin=1.0)

    run(whole())
    return told
