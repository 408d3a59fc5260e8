"""`stanchion replay`: reads a trace, sends it to a server, writes a run; takes up one that was cut.

One process, or several that share the sessions. Children get their job on stdin and say on stdout
how far they are; all keep one clock, the machine's monotonic one.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stanchion.cli.replay_asked import Asked, Server, ask_server, make_bodies, make_plan
from stanchion.cli.settings import model_folder, output_folder
from stanchion.core.errors import ConfigError
from stanchion.gateway.serve import only
from stanchion.lab.replay_client import HttpClient, client
from stanchion.lab.replay_plan import Plan, resumed, share
from stanchion.lab.replay_run import Limits, Replay
from stanchion.lab.replay_timing import lateness, timing, verdict, words
from stanchion.lab.results import (
    RUN,
    Result,
    RunHeader,
    Writer,
    read_header,
    read_results,
    write_header,
)

LEAD_S = 0.5  # between the word to begin and a run's time 0
SAY_S = 0.5
RECENT = 1000  # results that the lateness on display is of
Value = TypeVar("Value")


class Job(Struct, frozen=True):
    """One child's part."""

    asked: Asked
    server: Server
    sitting: int
    number: int
    done: tuple[tuple[str, int], ...]
    base_s: float


class Said(Struct, frozen=True):
    """How far a child is: endings so far, requests in flight, how late the latest were."""

    endings: dict[str, int]
    in_flight: int
    late: list[float]


@dataclass
class Tally:
    endings: Counter[str] = field(default_factory=Counter)
    late: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    in_flight: int = 0

    def add(self, result: Result) -> None:
        self.endings[result.ending] += 1
        if result.lateness_s is not None:
            self.late.append(result.lateness_s)

    @property
    def total(self) -> int:
        return sum(self.endings.values())


# ---- the parent -----------------------------------------------------------------------------


def replay(asked: Asked, quiet: bool = False) -> RunHeader:
    """The whole run, or what is left of it. Raise ConfigError where it cannot begin."""
    asked.check()
    folder = Path(asked.out)
    whole, block_tokens = make_plan(asked)
    server = _run(_ask(asked))
    # What these refuse is told before anything is written.
    make_bodies(asked, server, block_tokens)
    if asked.tokenizer != "hashed":
        model_folder(asked.tokenizer)
    output_folder(folder)
    header, done, base_s = _taken_up(folder, asked, whole, server)
    write_header(folder, header)
    parts = min(asked.processes, len(whole.steps))
    jobs = [
        Job(asked, server, header.sittings, at, tuple(sorted(done)), base_s) for at in range(parts)
    ]
    with _display(quiet, len(whole.steps), len(done)) as show:
        if len(jobs) == 1:
            _run(_alone(jobs[0], show))
        else:
            _together(jobs, show)
    return finish(folder, header)


def finish(folder: Path, header: RunHeader) -> RunHeader:
    """The header with its verdict, written down."""
    results = list(read_results(folder))
    late = [one.lateness_s for one in results if one.lateness_s is not None]
    said = lateness(late, header.lateness.bound_s)
    failed = bool(results) and all(one.ending == "failed" for one in results)
    valid, why = verdict(said, header.concurrency, header.requests - len(results), failed)
    armed = dict.fromkeys(
        name for one in results for name in filter(None, one.failpoints.split(","))
    )
    header = msgspec.structs.replace(
        header, valid=valid, why=why, lateness=said, failpoints=tuple(armed)
    )
    write_header(folder, header)
    return header


def _taken_up(
    folder: Path, asked: Asked, whole: Plan, server: Server
) -> tuple[RunHeader, frozenset[tuple[str, int]], float]:
    """The header to begin with, what is done, and where its time goes on."""
    header = RunHeader(
        trace=asked.trace, url=asked.url, model=asked.model or server.model, loop=whole.loop,
        speed=whole.pace.words(), gap_max_s=asked.gap_max_s, spread_s=asked.spread_s,
        copies=asked.copies, seed=asked.seed, arm=asked.arm,
        concurrency=asked.concurrency, processes=asked.processes, solo=bool(asked.solo),
        requests=len(whole.steps), started_unix_s=time.time(),
        lateness=lateness([], asked.lateness_max_s),
    )  # fmt: skip
    if not (folder / RUN).exists():
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder} is not empty, and it is no run that could go on")
        return header, frozenset(), 0.0
    before = read_header(folder)
    for name in (
        *("trace", "loop", "speed", "gap_max_s", "spread_s", "copies"),
        *("seed", "arm", "solo", "requests"),
    ):
        was, now = getattr(before, name), getattr(header, name)
        if was != now:
            raise ConfigError(f"--out {folder} has a run with {name} {was!r}, not {now!r}")
    results = list(read_results(folder))
    base_s = max((one.end for one in results), default=0.0)
    again = msgspec.structs.replace(
        header, sittings=before.sittings + 1, started_unix_s=before.started_unix_s
    )
    return again, frozenset(one.key for one in results), base_s


async def _ask(asked: Asked) -> Server:
    async with client(asked.url, asked.api_key) as http:
        return await ask_server(http)


def _run(work: Coroutine[None, None, Value]) -> Value:
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise only(group) from group


Show = Callable[[Tally], None]


@contextmanager
def _display(quiet: bool, total: int, done: int) -> Iterator[Show]:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    # No thread that draws: it would take the interpreter from what is measured.
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=total, completed=done, told="")

        def show(tally: Tally) -> None:
            late = lateness(list(tally.late), 0.0).p99_s
            told = f"{tally.in_flight} in flight"
            told += "".join(f", {count} {name}" for name, count in sorted(tally.endings.items()))
            told += "" if late is None else f"; late by {1000 * late:.1f} ms (p99)"
            progress.update(task, completed=done + tally.total, told=told, refresh=True)

        yield show


# ---- one process ----------------------------------------------------------------------------


async def _alone(job: Job, show: Show) -> None:
    tally = Tally()
    async with client(job.asked.url, job.asked.api_key) as http:
        with closing(Writer(Path(job.asked.out), job.sitting, job.number)) as writer:
            one = _part(job, http, writer, tally)
            one.prepare()
            origin = asyncio.get_running_loop().time() + LEAD_S - job.base_s
            await _shown(one, tally, show, origin)


def _part(job: Job, http: HttpClient, writer: Writer, tally: Tally) -> Replay:
    asked = job.asked
    whole, block_tokens = make_plan(asked)
    left, ended = resumed(whole, frozenset(job.done), job.base_s)
    parts = min(asked.processes, len(whole.steps))
    own = left if parts == 1 else share(left, job.number, parts)

    def tell(result: Result) -> None:
        writer.add(result)
        tally.add(result)

    bodies = make_bodies(asked, job.server, block_tokens)
    concurrency = asked.concurrency
    if concurrency is not None:  # the cap is shared out; nobody gets none
        concurrency = max(1, (concurrency + job.number) // parts)
    limits = Limits(concurrency, asked.timeout_s)
    return Replay(own, bodies, http, limits, tell, asked.arm, ended)


async def _shown(one: Replay, tally: Tally, show: Show, origin: float) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(one.run(origin))
        while not running.done():
            await asyncio.wait([running], timeout=SAY_S)
            tally.in_flight = one.in_flight
            show(tally)


# ---- several --------------------------------------------------------------------------------


def _together(jobs: Sequence[Job], show: Show) -> None:
    """Raise ConfigError where a child failed; then the others are ended too."""
    command = [sys.executable, "-m", "stanchion.cli.replay"]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for _ in jobs
        ]
        try:
            _drive(jobs, children, show)
        finally:
            for child in children:
                if child.poll() is None:
                    child.terminate()


def _drive(jobs: Sequence[Job], children: Sequence[subprocess.Popen[bytes]], show: Show) -> None:
    for job, child in zip(jobs, children):
        _send(child, msgspec.json.encode(job))
    for child in children:
        _heard(child)  # it has made its first bodies
    origin = time.monotonic() + LEAD_S - jobs[0].base_s
    for child in children:
        _send(child, msgspec.json.encode(origin))
    told: dict[int, Said] = {}
    working = list(enumerate(children))
    while working:
        for number, child in list(working):
            line = _heard(child)
            if line == b"done\n":
                working.remove((number, child))
                continue
            told[number] = msgspec.json.decode(line, type=Said)
        show(_sum(told.values()))


def _sum(parts: Iterable[Said]) -> Tally:
    tally = Tally()
    for one in parts:
        tally.endings.update(one.endings)
        tally.in_flight += one.in_flight
        tally.late.extend(one.late)
    return tally


def _send(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise ConfigError("a process of the replay ended before it began") from None


def _heard(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise ConfigError(f"a process of the replay ended early, with code {child.wait()}")
    return line


async def _child(job: Job, heard: IO[bytes], say: Callable[[bytes], None]) -> None:
    tally = Tally()
    async with client(job.asked.url, job.asked.api_key) as http:
        with closing(Writer(Path(job.asked.out), job.sitting, job.number)) as writer:
            one = _part(job, http, writer, tally)
            one.prepare()
            say(b"ready")
            origin = msgspec.json.decode(heard.readline(), type=float)

            def show(tally: Tally) -> None:
                said = Said(dict(tally.endings), tally.in_flight, list(tally.late))
                say(msgspec.json.encode(said))

            await _shown(one, tally, show, origin)
    say(b"done")


def report(header: RunHeader, folder: Path) -> str:
    return words(header, timing(read_results(folder)))


def main() -> None:
    def say(line: bytes) -> None:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    with suppress(KeyboardInterrupt):  # the parent hears it too, and says so
        _run(_child(job, sys.stdin.buffer, say))


if __name__ == "__main__":
    main()
