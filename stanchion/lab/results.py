"""What a replay writes down: a folder with `run.json` and `results-*.jsonl`, one `Result` a line.

Times are seconds from the run's origin, on one monotonic clock. What was not measured is None and
never 0; whoever was aborted, failed or said nothing has no latency. A line is written when its
request is over, so a run that was cut off has what is done, and at most one torn line a file.

A run has content: prompts and answers are in it as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta, Struct

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Spec

RUN = "run.json"
RESULTS = "results-*.jsonl"
LINE_BYTES_MAX = 1 << 28

Ending = Literal["completed", "failed", "aborted", "empty"]
Loop = Literal["open", "session"]
Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=0)]


class Point(Struct, frozen=True, array_like=True):
    """Speculation counters after so many tokens, at this moment."""

    at: float
    tokens: int
    spec: Spec


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a replay. `copy`: which copy of the trace (solo: which time it was asked).

    `due` is when its schedule wanted it, `send` when it was sent: what is between them is its
    lateness, whether it waited for the generator or for a place under its cap. `first_token`: the
    first of any kind, reasoning and calls included; `first_content`: the first of the answer
    itself. `gap_s_max`: the longest pause between two pieces of the answer. `speed`: of the
    trace's time, when it was due.
    """

    request: str
    session: str
    turn: Count = 0
    copy: Count = 0
    arm: str = ""
    due: float
    send: float | None = None
    first_byte: float | None = None
    first_token: float | None = None
    first_content: float | None = None
    last_token: float | None = None
    end: float
    gap_s_max: float | None = None
    speed: float = 1.0
    in_flight: Count = 0  # others of its process, when it was sent
    status: int | None = None
    ending: Ending
    finish: str | None = None
    error: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    reasoning: str = ""
    calls: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    points: tuple[Point, ...] = ()
    accepts: tuple[int, ...] = ()
    failpoints: str = ""  # what the server said is armed
    path: str = ""
    body: msgspec.Raw = msgspec.Raw()  # as it was sent, so that it can be asked again alone

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.copy

    @property
    def lateness_s(self) -> float | None:
        return None if self.send is None else self.send - self.due

    @property
    def measured(self) -> bool:
        """May its times be in a set of latencies?"""
        return self.ending == "completed"

    @property
    def said(self) -> str:
        """All that the model said, in the order in which it is shown."""
        return "".join((self.reasoning, self.text, *self.calls))

    @property
    def spec(self) -> Spec | None:
        return self.points[-1].spec if self.points else None


class Lateness(Struct, frozen=True, kw_only=True):
    """How late the generator itself was, over all requests. None where nothing was sent."""

    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None
    bound_s: float


class RunHeader(Struct, frozen=True, kw_only=True):
    """`valid` is None while it runs: a run that was cut off is not known to be valid. `why` says
    what makes it invalid. `started_unix_s` is the wall clock at the origin of all times."""

    version: Literal[1] = 1
    trace: str
    url: str
    model: str
    loop: Loop
    speed: str
    gap_max_s: float | None = None
    spread_s: float = 0.0
    copies: int
    seed: int
    arm: str = ""
    concurrency: int | None = None
    processes: int = 1
    solo: bool = False
    requests: int
    started_unix_s: float
    sittings: int = 1  # how often it was begun or taken up again
    valid: bool | None = None
    why: str = ""
    lateness: Lateness
    failpoints: tuple[str, ...] = ()


_encode = msgspec.json.encode
_result = msgspec.json.Decoder(Result).decode
_header = msgspec.json.Decoder(RunHeader).decode


class Writer:
    """A file of its own for each process of each sitting, so what a crash cuts off is a file's
    last line. Flushed with each result."""

    def __init__(self, folder: Path, sitting: int, process: int) -> None:
        path = folder / f"results-{sitting:03d}-{process:03d}.jsonl"
        self._file: BinaryIO = path.open("xb")

    def add(self, result: Result) -> None:
        self._file.write(_encode(result) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_header(folder: Path, header: RunHeader) -> None:
    """Whole or not at all."""
    made = msgspec.json.format(_encode(header), indent=1) + b"\n"
    beside = folder / (RUN + ".new")
    beside.write_bytes(made)
    beside.replace(folder / RUN)


def read_header(folder: Path) -> RunHeader:
    """Raise ConfigError where it is no run, or of another version."""
    path = folder / RUN
    try:
        return _header(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder} is no run of replay: {error}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_results(folder: Path) -> Iterator[Result]:
    """All of a run, each (request, copy) once: its first. A last line that a crash cut off is left
    out; any other that is no result is a ConfigError naming file and line."""
    seen: set[tuple[str, int]] = set()
    for path in sorted(folder.glob(RESULTS)):
        with path.open("rb") as lines:
            for result in _results(path, lines):
                if result.key not in seen:
                    seen.add(result.key)
                    yield result


def _results(path: Path, lines: Iterable[bytes]) -> Iterator[Result]:
    for number, line in enumerate(lines, start=1):
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"{path}:{number}: over {LINE_BYTES_MAX:,} bytes")
        if not line.endswith(b"\n"):
            return  # the process ended while it wrote this one
        try:
            yield _result(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
