"""`stanchion verify`: is every answer right under load, on this machine and this topology?

The hash model runs over the user's own roles, transport and settings, under a storm of requests,
aborts, deadlines and, if asked for, killed and stopped processes. Every answer is compared with the
same request alone and cold, to the last draft; afterwards no page may be missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from stanchion.cli.drive import Answer, Cluster, ask, cluster
from stanchion.cli.plan import Asked
from stanchion.cli.storm import Expected, Oracle, Wrong, digest, starts, wrong
from stanchion.cli.supervisor import Process
from stanchion.core.config import Config
from stanchion.core.errors import ConfigError, Overloaded, PeerLost
from stanchion.core.messages import Progress as Said
from stanchion.core.messages import Start
from stanchion.core.outcome import OutputSuspect

SETTLE_S = 60.0
KEPT_WRONG = 20
TROUBLE_UNTIL = 0.9  # of the storm: the rest shows that all is well again
LEAVE_S = 0.1  # a client that leaves does so after this long, on average
PAUSE_S, PAUSE_S_MAX = 0.05, 1.0
RESTARTS_MAX = 1000


@dataclass
class Report:
    """What happened. `pages` are those of prompts that were computed or found."""

    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kills: int = 0
    stops: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    kv_bytes_sent: int = 0
    deadlines: int = 0
    suspicions: int = 0
    lifted: int = 0  # pages loaded from host memory
    fetched: int = 0  # pages read from disk
    restarts: int = 0
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    wrong_count: int = 0

    @property
    def passed(self) -> bool:
        return not self.wrong_count and not self.lost


def verify(config: Config, asked: Asked, json_file: str | None) -> int:
    """Return 0 if all was right, 1 if something was wrong, 2 if it could not be run."""
    if asked.requests is None and asked.minutes is None:
        asked = replace(asked, requests=2000)
    try:
        asked.check()
        report = run(config, asked)
    except (ConfigError, OSError) as error:
        print(f"stanchion: verify could not run: {error}", file=sys.stderr)
        return 2
    print(words(report))
    if json_file is not None:
        Path(json_file).write_bytes(as_json(report, config, asked))
    return 0 if report.passed else 1


def run(config: Config, asked: Asked, quiet: bool = False) -> Report:
    config = settings(config)
    return asyncio.run(_Run(config, asked, _expected(config, asked, quiet), quiet).whole())


def settings(config: Config) -> Config:
    return replace(
        config,
        model=replace(config.model, path="hashed"),
        lab=replace(config.lab, record_drafts=True),
        cluster=replace(config.cluster, restarts_max=RESTARTS_MAX),
        gateway=replace(config.gateway, in_flight_max=1 << 16),
    )


def _expected(config: Config, asked: Asked, quiet: bool) -> list[Expected]:
    oracle = Oracle(
        config.kv.page_tokens, config.engine.draft_tokens, config.model.hashed_top_k or None,
        asked.context,
    )  # fmt: skip
    count = min(asked.variety, asked.requests or asked.variety)
    drawn = starts(asked.seed, count, asked.context)
    with _bar(quiet, "working out what is right", count) as (progress, task):
        found = []
        for start in drawn:
            found.append(oracle.answer(start))
            progress.advance(task)
    return found


@dataclass
class _Run:
    config: Config
    asked: Asked
    expected: list[Expected]
    quiet: bool
    report: Report = field(default_factory=Report)
    given: int = 0
    ends_at: float = 0.0
    advance: Callable[[], None] = lambda: None

    async def whole(self) -> Report:
        began = time.monotonic()
        async with cluster(self.config) as running:
            self.ends_at = time.monotonic() + 60 * (self.asked.minutes or float("inf"))
            with _bar(self.quiet, "storm", self.asked.requests) as (progress, task):
                self.advance = lambda: progress.advance(task)
                async with asyncio.TaskGroup() as group:
                    trouble = group.create_task(self._trouble(running))
                    async with asyncio.TaskGroup() as tasks:
                        for at in range(self.asked.concurrency):
                            tasks.create_task(self._client(running, at))
                    trouble.cancel()
            self.report.seconds = time.monotonic() - began
            await self._settled(running)
            self._count(running)
        return self.report

    # ---- clients ----------------------------------------------------------------------------

    async def _client(self, running: Cluster, number: int) -> None:
        rng = np.random.default_rng([self.asked.seed, number])
        most = self.asked.requests or sys.maxsize
        while self.given < most and time.monotonic() < self.ends_at:
            self.given += 1
            expected = self.expected[int(rng.integers(len(self.expected)))]
            one_in = self.asked.abort_one_in
            leaves = one_in > 0 and rng.integers(one_in) == 0
            leave_after_s = float(rng.exponential(LEAVE_S)) if leaves else None
            await self._one(running, expected, f"{number}.{self.given}", leave_after_s)
            self.advance()

    async def _one(
        self, running: Cluster, expected: Expected, name: str, leave_after_s: float | None
    ) -> None:
        report, start = self.report, msgspec.structs.replace(expected.start, request=name)
        report.requests += 1
        answer = await self._accepted(running, start, leave_after_s)
        assert answer.outcome is not None
        tag = str(answer.outcome.__struct_config__.tag)
        by = getattr(answer.outcome, "by", getattr(answer.outcome, "reason", ""))
        report.outcomes[f"{tag} ({by})" if by else tag] += 1
        report.tokens += len(answer.tokens)
        report.prompt_tokens += len(start.tokens)
        report.cached_tokens += answer.cached_tokens
        found = wrong(expected, answer)
        if found is None and isinstance(answer.outcome, OutputSuspect):
            right = digest(expected.tokens, expected.record)
            evidence = answer.outcome.evidence
            found = Wrong(evidence, name, start, len(answer.tokens), right, "not answered")
        if found is not None:
            report.wrong_count += 1
            report.wrong += [found][: KEPT_WRONG - len(report.wrong)]

    async def _accepted(
        self, running: Cluster, start: Start, leave_after_s: float | None
    ) -> Answer:
        """As a client does: who is refused waits, and asks again."""
        pause_s = PAUSE_S
        while not running.fleet.failed:
            try:
                return await ask(running.fleet, start, leave_after_s)
            except (Overloaded, PeerLost) as error:
                self.report.outcomes[f"refused, and asked again: {type(error).__name__}"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        raise ConfigError(running.fleet.failed)

    # ---- trouble ----------------------------------------------------------------------------

    async def _trouble(self, running: Cluster) -> None:
        """Kills and stops, spread over the requests at moments that the seed picks."""
        asked, rng = self.asked, np.random.default_rng([self.asked.seed, 1 << 20])
        whats = ["kill"] * asked.kills + ["stop"] * asked.stops
        rng.shuffle(whats)
        moments = sorted(rng.uniform(0.0, TROUBLE_UNTIL, len(whats)).tolist())
        for what, moment in zip(whats, moments):
            while self._progress() < moment or not (there := _there(running)):
                await asyncio.sleep(0.02)
            process = there[int(rng.integers(len(there)))]
            send = process.send
            if ranks := _ranks(process.pid):  # any of a worker's ranks may be met
                at = int(rng.integers(1 + len(ranks)))
                send = partial(_send, ranks[at - 1]) if at else send
            if what == "kill":
                self.report.kills += 1
                send(signal.SIGKILL)
                await process.over.wait()
                continue
            self.report.stops += 1
            send(signal.SIGSTOP)
            try:
                await asyncio.sleep(float(rng.uniform(0.1, 1.5 * self.config.cluster.silence_s)))
            finally:
                send(signal.SIGCONT)

    def _progress(self) -> float:
        """How much of the storm is over, 0 to 1."""
        asked, left_s = self.asked, self.ends_at - time.monotonic()
        by_count = self.given / asked.requests if asked.requests else 0.0
        by_time = 1 - left_s / (60 * asked.minutes) if asked.minutes else 0.0
        return max(by_count, by_time)

    # ---- afterwards -------------------------------------------------------------------------

    async def _settled(self, running: Cluster) -> None:
        """Within a minute nothing is held any more, by anybody."""
        fleet = running.fleet
        try:
            async with asyncio.timeout(SETTLE_S):
                while len(fleet) or _leftovers(running) or not fleet.complete:
                    fleet.changed.clear()
                    await fleet.changed.wait()
        except TimeoutError:
            self.report.lost = list(_leftovers(running)) or ["requests are still in flight"]

    def _count(self, running: Cluster) -> None:
        report, fleet = self.report, running.fleet
        report.retries = dict(fleet.attempts.retries)
        report.suspicions = fleet.suspicions
        for view in fleet.views():
            report.restarts += view.lost
            said = None if view.member is None else view.member.link.ledger.progress
            if said is not None:
                report.kv_bytes_sent += said.kv_bytes_sent
                report.deadlines += said.deadlines
                if said.tiers is not None:
                    report.lifted += said.tiers.lifted
                    report.fetched += said.tiers.fetched


def _there(running: Cluster) -> list[Process]:
    """The processes that have joined, and are not known to have ended."""
    found = []
    for name, process in sorted(running.supervisor.processes.items()):
        hello = running.fleet.who_is(name)
        if hello is not None and hello.pid == process.pid and not process.over.is_set():
            found.append(process)
    return found


def _ranks(worker: int) -> list[int]:
    """The processes of its other ranks."""
    try:
        return [
            int(one) for one in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []  # it has ended meanwhile


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it went with its worker


def _leftovers(running: Cluster) -> list[str]:
    found = []
    for view in running.fleet.views():
        said: Said | None = None if view.member is None else view.member.link.ledger.progress
        if said is None:
            found.append(f"{view.name} has not reported")
            continue
        if said.handoffs or said.pages_handoff or said.running or said.waiting:
            held = f"{said.handoffs} handoffs, {said.pages_handoff} pages of handoffs"
            found.append(f"{view.name} holds {held}, {said.running + said.waiting} requests")
        missing = said.pages - said.pages_free - said.pages_cached - said.pages_quarantined
        if missing:
            found.append(f"{view.name} lost {missing} pages")
        if (tiers := said.tiers) is not None:
            kept = tiers.host_free + tiers.host_kept + tiers.host_quarantined
            if tiers.copies or kept != tiers.host_pages:
                lost = tiers.host_pages - kept
                found.append(f"{view.name}: {tiers.copies} copies, {lost} pages of the host lost")
    return found


def words(report: Report) -> str:
    mib = report.kv_bytes_sent / 2**20
    cached = f"{report.prompt_tokens:,} prompt tokens ({report.cached_tokens:,} cached)"
    trouble = f"{report.kills} kills, {report.stops} stops, {report.restarts} restarts"
    lines = [
        f"{report.requests:,} requests in {report.seconds:.0f} s, {report.tokens:,} tokens",
        cached,
        f"{mib:,.1f} MiB of KV moved, {report.deadlines:,} deadlines, {trouble}",
        f"{report.lifted:,} pages from host memory, {report.fetched:,} from disk",
    ]
    lines += [f"  {count:>9,} {what}" for what, count in sorted(report.outcomes.items())]
    lines += [f"  {count:>9,} retries: {what}" for what, count in sorted(report.retries.items())]
    lines += [f"LEFT OVER: {line}" for line in report.lost]
    for one in report.wrong[:1]:
        lines += [
            f"WRONG: request {one.request}: {one.why}",
            f"  first difference at token {one.at}; digest {one.actual} for {one.expected}",
            f"  prompt of {len(one.start.tokens)} tokens; the whole request is in --json",
        ]
    if report.wrong_count:
        lines.append(f"FAIL: {report.wrong_count:,} of {report.requests:,} answers are wrong")
    else:
        lines.append("FAIL" if report.lost else "PASS")
    return "\n".join(lines)


def as_json(report: Report, config: Config, asked: Asked) -> bytes:
    said = {
        "passed": report.passed,
        "asked": asdict(asked),
        "config": msgspec.to_builtins(config),
        "report": {
            name: value for name, value in vars(report).items() if name not in ("wrong", "outcomes")
        },
        "outcomes": dict(report.outcomes),
        "wrong": [msgspec.to_builtins(asdict(one)) for one in report.wrong],
    }
    return json.dumps(said, indent=1, default=msgspec.to_builtins).encode() + b"\n"


@contextmanager
def _bar(quiet: bool, what: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console) as progress:
        yield progress, progress.add_task(what, total=total)
