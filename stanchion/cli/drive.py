"""A cluster of real processes, driven from inside: no HTTP, the same fleet and supervisor as serve.

For `verify` and the benchmarks. Leaving `cluster` drains, and ends every process.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stanchion.cli.serve import gateway_settings, worker_environment
from stanchion.cli.supervisor import Supervisor
from stanchion.core.config import Config
from stanchion.core.errors import ConfigError
from stanchion.core.messages import Start
from stanchion.core.outcome import Leaver, Outcome
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.ledger import Ticket
from stanchion.gateway.serve import only


@dataclass
class Cluster:
    fleet: Fleet
    supervisor: Supervisor


@dataclass
class Answer:
    """What one request came to. `arrived`: when tokens came (time.monotonic), and how many."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrived: list[tuple[float, int]] = field(default_factory=list)
    draft_record: list[tuple[list[int], int]] | None = None
    cached_tokens: int = 0
    outcome: Outcome | None = None


@asynccontextmanager
async def cluster(config: Config) -> AsyncIterator[Cluster]:
    """Raise ConfigError where its workers cannot run."""
    with tempfile.TemporaryDirectory(prefix="stanchion-") as folder:
        fleet = Fleet(gateway_settings(config, (), ""), f"ipc://{folder}/join")
        environment = worker_environment(config, "")
        supervisor = Supervisor(config, f"ipc://{folder}", environment, fleet)
        try:
            async with fleet.running(), supervisor.running():
                await _until_complete(fleet)
                try:
                    yield Cluster(fleet, supervisor)
                finally:
                    fleet.drain()
                    fleet.drain_prefill()
        except BaseExceptionGroup as group:
            raise only(group) from group


async def _until_complete(fleet: Fleet) -> None:
    while not fleet.complete:
        if fleet.failed:
            raise ConfigError(fleet.failed)
        fleet.changed.clear()
        await fleet.changed.wait()


async def ask(
    fleet: Fleet, start: Start, leave_after_s: float | None = None, by: Leaver = "client"
) -> Answer:
    """Its answer; its reader leaves after so many seconds, if given. Raise Overloaded or PeerLost
    where it is not even accepted."""
    bell = asyncio.Event()
    answer = Answer()
    (ticket,) = fleet.start([start], bell.set)
    try:
        async with asyncio.timeout(leave_after_s):
            await _read(ticket, bell, answer)
    except TimeoutError:
        fleet.leave(ticket, by)
        await _read(ticket, bell, answer)
    finally:
        fleet.leave(ticket, "client")
    return answer


async def _read(ticket: Ticket, bell: asyncio.Event, answer: Answer) -> None:
    while answer.outcome is None:
        await bell.wait()
        bell.clear()
        mail = ticket.take()
        if mail is None:
            continue
        if mail.tokens:
            answer.arrived.append((time.monotonic(), len(mail.tokens)))
        answer.tokens += mail.tokens
        answer.logprobs += mail.logprobs
        answer.cached_tokens = mail.cached_tokens
        answer.draft_record = mail.draft_record
        answer.outcome = mail.ended
