"""`stanchion bench replay`: how fast answers are looked at, how punctual the load generator is, and
what a request costs it.

The server is a stub in a process of its own. Peers are run by `runs/replay_peers.sh`, in
environments of their own, over the same traces against the same stub; where STANCHION_PEERS names
what it wrote, the best of them is the other side.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from stanchion.cli.bench import stub
from stanchion.cli.bench.measure import Measure, interleave
from stanchion.cli.replay_asked import Asked, Server, make_bodies, make_plan
from stanchion.core.errors import ConfigError
from stanchion.gateway.monitor.baseline import read as read_baselines
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.lab import corpus
from stanchion.lab.detect import Eyes, find
from stanchion.lab.replay_client import client
from stanchion.lab.replay_run import Limits, Replay
from stanchion.lab.replay_text import Stretches
from stanchion.lab.results import Result
from stanchion.lab.stats import percentile

PEERS = "STANCHION_PEERS"
RATES = (50, 200, 500)
LEAD_S = 0.5
PROMPT_TOKENS, ANSWER_TOKENS = 512, 512
Figure = Literal["lateness_p99_s", "cpu_s"]


@dataclass(frozen=True)
class Sizes:
    seconds: float  # of load, each run
    repeats: int
    answers: int


FULL = Sizes(seconds=20.0, repeats=5, answers=400)
QUICK = Sizes(seconds=4.0, repeats=1, answers=60)


@dataclass(frozen=True)
class Cost:
    lateness_p99_s: float
    cpu_s: float  # of a request
    failed: int


class Bench:
    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder = folder
        self.sizes = sizes
        self.measures: dict[str, Callable[[], Measure]] = {"detect_mb_s": self.detect}
        for rate in RATES:
            name = f"lateness_p99_{rate}"
            self.measures[name] = partial(self.load, name, rate, "lateness_p99_s")
            name = f"cpu_per_request_{rate}"
            self.measures[name] = partial(self.load, name, rate, "cpu_s")
        self._runs: dict[int, list[Cost]] = {}

    def prepare(self, names: Sequence[str]) -> None:
        if any(name != "detect_mb_s" for name in names):
            _ = self.peers  # an unreadable file is told before anything runs

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(self.folder)

    @cached_property
    def peers(self) -> dict[str, dict[str, dict[str, list[float]]]]:
        """By peer, rate and figure: one value a run."""
        path = os.environ.get(PEERS, "")
        if not path:
            return {}
        try:
            return msgspec.json.decode(
                Path(path).read_bytes(), type=dict[str, dict[str, dict[str, list[float]]]]
            )
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{PEERS} {path}: {error}") from None

    # ---- looking at answers -----------------------------------------------------------------

    def detect(self) -> Measure:
        """All detectors, one core, answers of source text behind a prompt of source text."""
        stretches = Stretches(self.vocabulary, corpus.tokens(self.vocabulary))
        file = Path(__file__).parents[2] / "gateway" / "monitor" / "baselines.json"
        known = read_baselines(file.read_bytes(), str(file)).baselines
        eyes = Eyes(self.vocabulary, known[0])
        answers = [_answer(stretches, at) for at in range(self.sizes.answers)]
        size = sum(len(one.said.encode()) for one in answers)

        def rate() -> float:
            began = time.perf_counter()
            for one in answers:
                find(one, eyes)
            return size / 1e6 / (time.perf_counter() - began)

        measure = Measure("detect_mb_s", "MB/s", "rate")
        lengths = f"{ANSWER_TOKENS} tokens behind prompts of {PROMPT_TOKENS}"
        measure.note = f"{len(answers)} answers of {lengths}, all detectors, one core"
        return interleave(measure, rate, None, self.sizes.repeats)

    # ---- making load ------------------------------------------------------------------------

    def load(self, name: str, rate: int, figure: Figure) -> Measure:
        unit = "s late" if figure == "lateness_p99_s" else "CPU s"
        measure = Measure(name, unit, "cost")
        costs = self._costs(rate)
        measure.ours = [getattr(one, figure) for one in costs]
        if failed := sum(one.failed for one in costs):
            raise ConfigError(f"{failed} requests to the stub failed at {rate} a second")
        measure.note = f"{rate} requests a second for {self.sizes.seconds:g} s, one process"
        best = self._best(rate, figure)
        if best is None:
            measure.note += f"; no peer was run beside it ({PEERS} is not set)"
            return measure
        peer, measure.other = best
        measure.gate, measure.aim = (1.0, 0.5) if figure == "lateness_p99_s" else (None, 0.5)
        measure.at_least = False
        measure.note += f"; the best peer is {peer}"
        return measure

    def _best(self, rate: int, figure: Figure) -> tuple[str, list[float]] | None:
        told = {
            name: by_rate[str(rate)][figure]
            for name, by_rate in self.peers.items()
            if by_rate.get(str(rate), {}).get(figure)
        }
        if not told:
            return None
        return min(told.items(), key=lambda one: sorted(one[1])[len(one[1]) // 2])

    def _costs(self, rate: int) -> list[Cost]:
        """The runs of this rate: made once, for both figures."""
        if rate not in self._runs:
            with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as folder, serving() as url:
                path = Path(folder) / "trace.jsonl"
                lines = map(json.dumps, stub.trace(rate, self.sizes.seconds))
                path.write_text("\n".join(lines) + "\n")
                made = [self._run(path, url) for _ in range(1 + self.sizes.repeats)]
                self._runs[rate] = made[1:]  # the first one warms both sides
        return self._runs[rate]

    def _run(self, path: Path, url: str) -> Cost:
        asked = Asked(trace=str(path), url=url, out="", api="completions")
        whole, block_tokens = make_plan(asked)
        bodies = make_bodies(asked, Server(stub.MODEL, "stub"), block_tokens)
        told: list[Result] = []

        async def run() -> tuple[float, list[float]]:
            async with client(url) as http:
                await http.get("/arrivals")
                one = Replay(whole, bodies, http, Limits(), told.append)
                one.prepare()
                began = time.process_time()
                await one.run(asyncio.get_running_loop().time() + LEAD_S)
                spent_s = time.process_time() - began
                return spent_s, await http.get("/arrivals")

        cpu_s, arrivals = asyncio.run(run())
        late_s = lateness_p99(arrivals, [step.at_s for step in whole.steps])
        failed = sum(one.ending != "completed" for one in told)
        return Cost(late_s, cpu_s / len(told), failed)


def lateness_p99(arrivals: Sequence[float], wanted: Sequence[float]) -> float:
    """Of requests that reached the server, in order, against when they were wanted there. The most
    punctual one is taken to be on time: nobody says when a tool's time 0 was. Raise ConfigError
    where some did not come."""
    if len(arrivals) != len(wanted):
        raise ConfigError(f"{len(arrivals)} requests came of {len(wanted)}")
    late = [came - due for came, due in zip(sorted(arrivals), sorted(wanted))]
    least = min(late)
    found = percentile([one - least for one in late], 0.99)
    assert found is not None
    return found


@contextmanager
def serving() -> Iterator[str]:
    """The stub's URL."""
    command = [sys.executable, "-m", "stanchion.cli.bench.stub", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _answer(stretches: Stretches, number: int) -> Result:
    prompt = stretches.text(stretches.tokens(f"prompt {number}", PROMPT_TOKENS))
    tokens = stretches.tokens(f"answer {number}", ANSWER_TOKENS)
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0.0}
    return Result(
        request=str(number),
        session=str(number),
        due=0.0,
        end=1.0,
        ending="completed",
        text=stretches.text(tokens),
        tokens=tuple(tokens),
        logprobs=(-0.5,) * len(tokens),
        path="/v1/completions",
        body=msgspec.Raw(msgspec.json.encode(body)),
    )
