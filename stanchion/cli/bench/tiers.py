"""`stanchion bench tiers`: what KV beyond the device brings, and what it costs to be sure of it.

All sizes and repeats are fixed here. `--quick` repeats less; lengths that a measure is named after
stay. Sessions are real ones (STANCHION_TRACES), scaled down: their prefix structure is kept.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from stanchion.cli.bench.hostcopy import Board
from stanchion.cli.bench.measure import Measure, interleave, paired
from stanchion.cli.bench.sessions import Session, sessions
from stanchion.cli.bench.waiting import watch
from stanchion.cli.settings import SWITCH_S
from stanchion.core.errors import Bug, ConfigError
from stanchion.core.messages import Ended, Start, Tokens
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.device.stream import Queue
from stanchion.engine.assemble import Parts, assemble
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.copy import Mode
from stanchion.kv.tiers import Tiers
from stanchion.lab.corpus import corpus
from stanchion.model.load import load_glm
from stanchion.model.text import Model

PAGE_TOKENS = 16
LINK_SHARE = 1 / 3  # of the new tokens' compute time: what a declared link takes to load the hit
DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class Sizes:
    prompt: int
    ttft_repeats: int
    overlap_repeats: int
    sessions: int
    requests: int  # of each session, at most
    throughput_repeats: int
    check_pairs: int
    copy_pages: int
    copy_repeats: int

    @property
    def hit(self) -> int:
        """9 tokens of 10, in whole pages."""
        return self.prompt * 9 // 10 // PAGE_TOKENS * PAGE_TOKENS

    @property
    def pages(self) -> int:
        """More than one prompt needs."""
        return 2 * self.prompt // PAGE_TOKENS


FULL = Sizes(8192, 9, 121, 8, 6, 5, 24, 1024, 25)
QUICK = Sizes(8192, 2, 2, 8, 3, 1, 2, 1024, 5)


class Bench:
    """Loads the embedded model once, when the first measure asks for it."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder = folder
        self.sizes = sizes
        self.corpus = corpus(folder)
        self.measures: dict[str, Callable[[], Measure]] = {
            "host_hit_ttft": partial(self.hit, "host_hit_ttft", False, 3.0),
            "disk_hit_ttft": partial(self.hit, "disk_hit_ttft", True, 2.0),
            "exposed_wait": self.exposed,
            "overlap_gain": partial(self.overlap, "overlap_gain", linked=False),
            "overlap_gain_linked": partial(self.overlap, "overlap_gain_linked", linked=True),
            "throughput_at_25": self.throughput,
            "kv_check_full_cost": self.check,
            "load_over_memcpy": self.copy,
        }

    def prepare(self, names: Sequence[str]) -> None:
        sys.setswitchinterval(SWITCH_S)  # as in a worker that has tiers

    @cached_property
    def model(self) -> Model:
        return load_glm(self.folder, PAGE_TOKENS)[0]

    # ---- time to the first token ------------------------------------------------------------

    def hit(self, name: str, disk: bool, gate: float) -> Measure:
        """9 tokens of 10 are in the tier, beside an engine that computes all of them."""
        measure = Measure(name, "s", "time", gate=gate)
        pages = self.sizes.pages
        with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as folder:
            kept = (Path(folder) / "kv", DISK_BYTES) if disk else None
            plan = TierPlan(pages, kept, prefetch="wait")
            with closing(Side(self.model, pages, plan)) as tiered:
                cold = Side(self.model, pages, None)
                prefix = self.corpus[: self.sizes.hit]
                tiered.first_token_s(prefix)
                tiered.settle()

                def ours() -> float:
                    tiered.leave_device()
                    if disk:
                        tiered.leave_host(Path(folder) / "kv")
                    took = tiered.first_token_s(self._prompt(tiered.asked))
                    if tiered.cached != self.sizes.hit:
                        raise Bug(f"{tiered.cached} of {self.sizes.hit} tokens were found")
                    return took

                def other() -> float:
                    cold.leave_device()
                    return cold.first_token_s(self._prompt(tiered.asked))

                interleave(measure, ours, other, self.sizes.ttft_repeats)
        measure.note = (
            f"{self.sizes.prompt} tokens, {self.sizes.hit} of them in the tier; beside computing "
            "all"
            + (", read from files that the machine's page cache was told to drop" if disk else "")
        )
        return measure

    def _prompt(self, turn: int) -> list[int]:
        """The prefix, and new tokens after it: others for each turn."""
        first = self.sizes.hit + (turn * 7919) % (len(self.corpus) - 2 * self.sizes.prompt)
        return (
            self.corpus[: self.sizes.hit]
            + self.corpus[first : first + self.sizes.prompt - self.sizes.hit]
        )

    def exposed(self) -> Measure:
        """The share of a host hit's time to first token in which the engine stood at a door."""
        measure = Measure("exposed_wait", "share of TTFT", "value", aim=0.10, at_least=False)
        with closing(self._warmed()) as side:
            waiting = watch(side.parts.stream)

            def share() -> float:
                side.leave_device()
                waiting.reset()
                took = side.first_token_s(self._prompt(side.asked))
                return waiting.seconds / took

            interleave(measure, share, None, self.sizes.ttft_repeats)
        new = self.sizes.prompt - self.sizes.hit
        measure.note = f"{self.sizes.hit} tokens loaded from host memory, {new} computed"
        return measure

    def overlap(self, name: str, linked: bool) -> Measure:
        """Layers loaded as compute goes, beside a load that ends before compute begins."""
        measure = Measure(name, "s", "time", gate=None if linked else 1.0)
        plan = TierPlan(self.sizes.pages)
        words = "over host memory as it is"
        if linked:
            with closing(self._warmed()) as side:
                took = statistics.median(self._hit_s(side, turn) for turn in range(3))
            doors = {(one.layer, one.door) for one in self.model.schema.buffers}
            plan = replace(plan, delays_s={at: took * LINK_SHARE / len(doors) for at in doors})
            words = (
                f"over a declared link that takes {1000 * took * LINK_SHARE:.0f} ms for the hit, a "
                f"third of what the new tokens' compute takes"
            )
        with closing(self._warmed(plan)) as side:
            tiers, submit, calls = side.tiers, side.tiers.submit, itertools.count()

            def blocking() -> None:
                submit()
                queue = side.load_queue
                queue.finish(queue.mark())

            def ours() -> float:
                tiers.submit = submit  # type: ignore[method-assign]
                return self._hit_s(side, next(calls) // 2)

            def other() -> float:
                tiers.submit = blocking  # type: ignore[method-assign]
                return self._hit_s(side, next(calls) // 2)

            paired(measure, ours, other, self.sizes.overlap_repeats)
        measure.note = words
        return measure

    def _warmed(self, plan: TierPlan | None = None) -> Side:
        """A side whose host has the prefix."""
        pages = self.sizes.pages
        side = Side(self.model, pages, plan or TierPlan(pages))
        side.first_token_s(self.corpus[: self.sizes.hit])
        side.settle()
        return side

    def _hit_s(self, side: Side, turn: int) -> float:
        """Both of a pair have the same turn: other tokens have other experts, and another time.
        The first new token differs from run to run, so that no tier has what follows it."""
        side.leave_device()
        prompt = self._prompt(turn)
        prompt[self.sizes.hit] = side.asked % side.engine.served.vocabulary
        return side.first_token_s(prompt)

    # ---- sessions ---------------------------------------------------------------------------

    def throughput(self) -> Measure:
        """A device of a quarter of the working set with a host behind it, beside one of all."""
        measure = Measure("throughput_at_25", "tokens/s", "rate", gate=0.6, aim=0.8)
        try:
            every = self._sessions()
        except ConfigError as error:
            measure.note = str(error)
            return measure
        whole = sum(one.pages(PAGE_TOKENS) for one in every)
        asked = sum(one.tokens for one in every)
        with closing(Side(self.model, whole // 4 + 1, TierPlan(whole))) as quarter:
            full = Side(self.model, whole + 1, None)
            without = Side(self.model, whole // 4 + 1, None)
            interleave(
                measure,
                lambda: asked / quarter.serve_s(every),
                lambda: asked / full.serve_s(every),
                self.sizes.throughput_repeats,
            )
            bare = asked / without.serve_s(every)
        other = statistics.median(measure.other or [1.0])
        measure.note = (
            f"{len(every)} sessions, {sum(len(one.starts) for one in every)} requests, a working "
            f"set of {whole} pages; a quarter without a host reaches {bare / other:.2f}"
        )
        return measure

    def check(self) -> Measure:
        """Digests of every page that is loaded from the host, beside none: CPU time."""
        measure = Measure(
            "kv_check_full_cost", "CPU s", "bound", gate=1.08, aim=1.03, at_least=False
        )
        every = self._sessions(must=False)
        whole = sum(one.pages(PAGE_TOKENS) for one in every)

        def side(mode: Mode) -> Side:
            return Side(self.model, whole // 4 + 1, TierPlan(whole, check=mode))

        with closing(side("full")) as full, closing(side("off")) as off:
            run = self.sizes.check_pairs
            paired(measure, partial(full.cpu_s, every), partial(off.cpu_s, every), run)
            if full.answers != off.answers:
                raise Bug("two sides were given the same requests, and answered differently")
        measure.note = f"{sum(len(one.starts) for one in every)} requests, embedded model"
        return measure

    def _sessions(self, must: bool = True) -> list[Session]:
        sizes, folder = self.sizes, os.environ.get("STANCHION_TRACES") or None
        if folder is None and must:
            raise ConfigError("STANCHION_TRACES does not say where the public traces are")
        few = 1 if must else 2
        requests, blocks = max(sizes.requests // few, 1), sizes.prompt // PAGE_TOKENS
        return sessions(folder, self.corpus, sizes.sessions, requests, blocks)

    # ---- memory -----------------------------------------------------------------------------

    def copy(self) -> Measure:
        """Pages of GLM-5's size from host to device, beside one memcpy of as many bytes."""
        measure = Measure("load_over_memcpy", "GiB/s", "rate", gate=0.6)
        with closing(Board(self.sizes.copy_pages)) as board:
            interleave(measure, board.load_rate, board.memcpy_rate, self.sizes.copy_repeats)
            measure.note = f"{board.bytes / 2**20:.0f} MiB of scattered pages, layer by layer"
        return measure


@dataclass
class Side:
    """One engine, driven in this process."""

    model: Model
    pages: int
    plan: TierPlan | None
    parts: Parts = field(init=False)
    asked: int = 0
    cached: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = Limits(draft_tokens=3)
        self.parts = assemble(self.model, limits, self.pages + 1, tiers=self.plan)

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @property
    def tiers(self) -> Tiers:
        assert self.engine.tiered is not None
        return self.engine.tiered.tiers

    def first_token_s(self, tokens: list[int]) -> float:
        """From arrival to the first token; the request is run to its end after."""
        self.asked += 1
        sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
        start = Start(request=f"r{self.asked}", tokens=tokens, sampling=sampling)
        gc.collect()
        began = time.perf_counter()
        said = self.engine.step([start])
        while not any(isinstance(one, Tokens) for one in said):
            said = self.engine.step([])
        took = time.perf_counter() - began
        self.cached = next(one.cached_tokens for one in said if isinstance(one, Tokens))
        self.settle()
        return took

    def settle(self) -> None:
        while self.engine.busy:
            self.engine.step([])

    def leave_device(self) -> None:
        self.engine.tree.flush()

    def leave_host(self, folder: Path) -> None:
        """What the host has, the disk has too; and the machine keeps no copy of the files."""
        self.tiers.host.flush()
        for path in folder.glob("*.kv"):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def serve_s(self, every: Sequence[Session]) -> float:
        """All sessions side by side, each one's requests in order; cold at first."""
        self.leave_device()
        if self.plan is not None:
            self.tiers.flush()
            self.settle()
        gc.collect()
        began = time.perf_counter()
        self._serve(every)
        return time.perf_counter() - began

    def cpu_s(self, every: Sequence[Session]) -> float:
        self.leave_device()
        self.tiers.flush()
        self.settle()
        gc.collect()
        began = time.process_time()
        self._serve(every)
        self.settle()
        return time.process_time() - began

    def _serve(self, every: Sequence[Session]) -> None:
        left = [list(one.starts) for one in every]
        mine = {start.request: at for at, one in enumerate(every) for start in one.starts}
        self.answers = {name: [] for name in mine}
        heard = [queue.pop(0) for queue in left]
        ended = 0
        while ended < len(mine):
            said = self.engine.step(heard)
            heard = []
            for one in said:
                if isinstance(one, Tokens):
                    self.answers[one.request] += one.tokens
                elif isinstance(one, Ended):
                    if not isinstance(one.outcome, Completed):
                        raise Bug(f"{one.request} ended as {one.outcome}")
                    ended += 1
                    queue = left[mine[one.request]]
                    heard += [queue.pop(0)] if queue else []

    @property
    def load_queue(self) -> Queue:
        return self.tiers.copier.load_queue  # type: ignore[attr-defined,no-any-return]

    def close(self) -> None:
        if self.plan is not None:
            self.tiers.close()
