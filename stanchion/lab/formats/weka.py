"""Weka's traces of Claude Code (kv-cache-tester): one session a line, sub-agents inside.

Times are seconds from the session's start; those of a sub-agent's requests count from the
sub-agent's start, or from the session's in files that were converted: both are told apart, and a
session that mixes them is refused. Blocks are of 64 tokens, and a partial one is not there. `t`
holds the old server's latency; what the client waited is `think_time`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from stanchion.core.errors import TraceError
from stanchion.core.recording import Finish, Header, Recorded, Times
from stanchion.lab.formats.coarse import Coarsened, coarsened
from stanchion.lab.formats.lines import decoded, lines, written
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.trace import Trace, checked

BLOCK_TOKENS = 64
FINISH: dict[str, Finish] = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}
STOPS: dict[Finish, str] = {value: key for key, value in FINISH.items()}


class Request(Struct, frozen=True, kw_only=True, rename={"tokens_in": "in", "tokens_out": "out"}):
    t: float
    type: Literal["n", "s", "subagent"]
    model: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    hash_ids: list[int] = []
    stop: str | None = None
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None
    agent_id: str | None = None
    duration_ms: float | None = None
    requests: list[Request] = []


class Session(Struct, frozen=True, kw_only=True):
    id: str
    block_size: int
    requests: list[Request]
    hash_id_scope: str = "local"


def read(path: Path, options: Options) -> Trace:
    number, raw = next(lines(path), (None, b""))
    if number is None:
        raise TraceError(path, None, "holds nothing")
    size = decoded(path, number, raw, Session).block_size
    if size < 1:
        raise TraceError(path, number, f"block_size is {size}; at least 1")
    header = Header(source="weka", model="", block_tokens=size, level="hashes")
    return Trace(header, lambda left_out: _sessions(path, size))


def _sessions(path: Path, block_tokens: int) -> Iterator[Recorded]:
    for number, raw in lines(path):
        said = decoded(path, number, raw, Session)
        if said.block_size != block_tokens:
            words = f"block_size is {said.block_size}, and {block_tokens} in the first line"
            raise TraceError(path, number, words)
        if said.hash_id_scope not in ("local", "global"):
            words = f"hash_id_scope is {said.hash_id_scope!r}; it must be local or global"
            raise TraceError(path, number, words)
        found = sorted(_Reader(path, number, said).requests(), key=lambda one: one.times.arrival)
        for one in found:
            yield checked(path, number, one, block_tokens)


class _Reader:
    def __init__(self, path: Path, number: int, said: Session) -> None:
        self._path, self._number, self._said = path, number, said
        self._scope = said.id if said.hash_id_scope == "local" else ""

    def requests(self) -> Iterator[Recorded]:
        agents = [one for one in self._said.requests if one.type == "subagent"]
        relative = self._relative(agents)
        own = [one for one in self._said.requests if one.type != "subagent"]
        yield from self._turns(own, self._said.id, None, 0.0)
        for count, agent in enumerate(agents):
            name = agent.agent_id or f"agent-{count}"
            yield from self._turns(agent.requests, self._said.id, name, agent.t * relative)

    def _relative(self, agents: Sequence[Request]) -> bool:
        """Do the times of sub-agents count from the sub-agent's own start?"""
        before = {one.agent_id for one in agents if one.requests and one.requests[0].t < one.t}
        after = {
            one.agent_id
            for one in agents
            if one.requests
            and one.duration_ms is not None
            and one.requests[-1].t >= one.t
            and one.requests[-1].t > one.duration_ms / 1000 + 1
        }
        if before and after:
            raise self._wrong(
                f"requests: times of sub-agents {sorted(map(str, before))} count from their own "
                f"start, those of {sorted(map(str, after))} from the session's"
            )
        return bool(before)

    def _turns(
        self, requests: Sequence[Request], session: str, agent: str | None, start: float
    ) -> Iterator[Recorded]:
        last = 0.0
        for turn, one in enumerate(requests):
            if one.type == "subagent" or one.tokens_in < 1:
                raise self._wrong("requests: a sub-agent inside a sub-agent, or one of no tokens")
            if one.t < last:
                raise self._wrong(f"requests: t goes back from {last} to {one.t}")
            last = one.t
            name = session if agent is None else f"{session}/{agent}"
            yield self._recorded(one, turn, name, None if agent is None else session, agent, start)

    def _recorded(
        self,
        one: Request,
        turn: int,
        session: str,
        parent: str | None,
        agent: str | None,
        start: float,
    ) -> Recorded:
        size, arrival = self._said.block_size, start + one.t
        return Recorded(
            request=f"{session}#{turn}",
            session=session,
            parent=parent,
            agent=agent,
            turn=turn,
            think_s=one.think_time if turn else None,
            model=one.model,
            times=Times(
                arrival=arrival,
                first_token=None if one.ttft is None else arrival + one.ttft,
                end=None if one.api_time is None else arrival + one.api_time,
            ),
            input_tokens=one.tokens_in,
            output_tokens=one.tokens_out,
            max_tokens=one.tokens_out,
            stream=one.type == "s",
            blocks=tuple(_name(self._scope, number) for number in one.hash_ids),
            tail_tokens=one.tokens_in - len(one.hash_ids) * size,
            finish=FINISH.get(one.stop or ""),
        )

    def _wrong(self, words: str) -> TraceError:
        return TraceError(self._path, self._number, f"session {self._said.id}: {words}")


def _name(scope: str, number: int) -> str:
    return blake2b(f"{scope}\0{number}".encode(), digest_size=8).hexdigest()


# ---- writing --------------------------------------------------------------------------------


def write(path: Path, trace: Iterable[Recorded], header: Header, block_tokens: int) -> Coarsened:
    """One session a line, each from 0. Raise TraceError where the blocks cannot be so large."""
    sessions: dict[str, list[Recorded]] = {}
    for one in trace:
        sessions.setdefault(one.session, []).append(one)
    parents = {of[0].session: of[0].parent for of in sessions.values() if of[0].parent in sessions}
    inside: dict[str, list[str]] = {}
    for session, parent in parents.items():
        inside.setdefault(str(parent), []).append(session)
    book = Coarsened(path, header, block_tokens)
    with written(path) as stream:
        for session, requests in sessions.items():
            if session not in parents:
                agents = [sessions[name] for name in inside.get(session, ())]
                stream.write(msgspec.json.encode(_line(session, requests, agents, book)) + b"\n")
    return book


Json = dict[str, Any]


def _line(session: str, own: list[Recorded], agents: list[list[Recorded]], book: Coarsened) -> Json:
    own.sort(key=lambda one: one.times.arrival)
    first = own[0].times.arrival
    book.ids.clear()  # numbers are a session's own
    book.issued = 1  # which are counted from 1
    entries = [_entry(one, first, book) for one in own]
    for number, requests in enumerate(agents, start=1):
        requests.sort(key=lambda one: one.times.arrival)
        began = requests[0].times.arrival
        if began < first:
            words = f"session {session}: a sub-agent begins before it"
            raise TraceError(book.path, None, words)
        last = requests[-1].times
        entries.append(
            {
                "t": began - first,
                "type": "subagent",
                "agent_id": f"agent_{number:03}",
                "duration_ms": round(((last.end or last.arrival) - began) * 1000),
                "requests": [_entry(one, began, book) for one in requests],
            }
        )
    entries.sort(key=lambda one: float(one["t"]))
    models = sorted({one.model for one in own})
    return {
        "id": session,
        "models": models,
        "block_size": book.block_tokens,
        "hash_id_scope": "local",
        "tool_tokens": _tokens(own[0], "tools"),
        "system_tokens": _tokens(own[0], "system"),
        "requests": entries,
    }


def _entry(one: Recorded, first: float, book: Coarsened) -> Json:
    times = one.times
    made: Json = {
        "t": times.arrival - first,
        "type": "s" if one.stream else "n",
        "model": one.model,
        "in": one.input_tokens,
        "out": one.output_tokens or 0,
        "hash_ids": coarsened(book, one, tail=False),
        "input_types": ["text"],
        "output_types": ["text"],
        "stop": STOPS[one.finish] if one.finish else "",
        "think_time": one.think_s or 0.0,
    }
    if times.end is not None:
        made["api_time"] = times.end - times.arrival
    if times.first_token is not None:
        made["ttft"] = times.first_token - times.arrival
    return made


def _tokens(one: Recorded, kind: str) -> int:
    return sum(part.tokens for part in one.segments if part.kind == kind)
