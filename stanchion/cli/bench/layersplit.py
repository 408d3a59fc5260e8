"""`stanchion bench layersplit`: one worker of two ranks that keep each layer once, beside two ranks
that keep all of them.

Both sides have real processes, the same bytes of KV a rank, and the same requests, which are told
by a seed. Nine tokens of ten are a prefix of the request's session and one of ten is new. One
budget holds for all lengths: that at which replicated storage just holds the working set at 5k.

Gains are predicted first (`sim/perf`): what a flight costs is fitted to a few requests on either
side, none of them of a session; hits and evictions are those of the real engine.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stanchion.cli.bench.measure import Measure, interleave
from stanchion.cli.bench.ranked import CHUNK_TOKENS, PAGE_TOKENS, RANKS, Side, pages_of
from stanchion.cli.bench.waiting import watch
from stanchion.core.errors import Bug
from stanchion.engine.assemble import pages_that_fit
from stanchion.engine.ranks import owners
from stanchion.kv.schema import DOORS, Door
from stanchion.lab.corpus import corpus
from stanchion.model.load import load_glm
from stanchion.model.text import Model
from stanchion.sim.perf import Cost, Simulated, Work

SHORT, LONG = 5120, 15360
LENGTHS = (SHORT, 7680, 10240, 12800, LONG)
FITS_PREFIX, FITS_NEW = 8192, 2047  # with the position that is redone, one chunk
VERY_LONG = 122_880  # the report's 120K, not divided
CALIBRATION = (1024, 2048, 4096, 6144, 8192)  # cold prompts


@dataclass(frozen=True)
class Sizes:
    sessions: int
    requests: int  # of a run, after each session was asked once
    repeats: int
    fits_repeats: int
    calibrations: int  # of each length


FULL = Sizes(sessions=4, requests=12, repeats=3, fits_repeats=9, calibrations=3)
QUICK = Sizes(sessions=4, requests=4, repeats=1, fits_repeats=2, calibrations=1)


class Bench:
    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        self.corpus = corpus(folder)
        self.folder = folder
        self.predicted: dict[int, float] = {}
        self.gained: dict[int, float] = {}
        targets = {SHORT: ("gain_short", 1.0, 1.10), LONG: ("gain_long", 1.5, 2.32)}
        self.measures: dict[str, Callable[[], Measure]] = {"predicted_gain_long": self.predict}
        for length in LENGTHS:
            name, gate, aim = targets.get(length, (f"gain_{length}", None, None))
            self.measures[name] = partial(self.gain, name, length, gate, aim)
        self.measures |= {
            "prediction_error": self.prediction_error,
            "gain_long_cp4": partial(self.gain, "gain_long_cp4", LONG, None, None, ranks=4),
            "gain_long_host": partial(self.gain, "gain_long_host", LONG, None, None, host=True),
            "cost_at_120k": self.very_long,
            "cost_where_it_fits_2k": self.fits,
            "decode_over_rows_sent": self.decode,
            "capacity": self.capacity,
            "index_over_kv": self.index_bytes,
            "bytes_over_needed": self.bytes_sent,
            "exposed_wait": partial(self.exposed, "exposed_wait", ("index", "attend"), 0.03),
            "exposed_wait_index": partial(self.exposed, "exposed_wait_index", ("index",), None),
        }

    def prepare(self, names: Sequence[str]) -> None:
        self.model: Model = load_glm(self.folder, PAGE_TOKENS)[0]

    # ---- predicted --------------------------------------------------------------------------

    def predict(self) -> Measure:
        """The gain at each length, worked out before it is measured."""
        measure = Measure("predicted_gain_long", "x", "value")
        costs = self._costs()
        for length in LENGTHS:
            medians = {
                split: statistics.median(self._predicted_s(split, cost, length))
                for split, cost in costs.items()
            }
            self.predicted[length] = medians[False] / medians[True]
        measure.ours = [self.predicted[LONG]]
        said = ", ".join(f"{length}: {gain:.3f}" for length, gain in self.predicted.items())
        measure.note = f"{said}; costs split {costs[True]}, replicated {costs[False]}"
        return measure

    def _costs(self) -> dict[bool, Cost]:
        """Of both sides, by turns: cold prompts, none of them of a session."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        works = []
        with ExitStack() as stack:
            sides = {
                split: stack.enter_context(closing(self._side(split, 2 * self.budget)))
                for split in seconds
            }
            for side in sides.values():
                side.ask(self.corpus[:1024])
            for length in CALIBRATION * self.sizes.calibrations:
                simulated = Simulated(2 * length, PAGE_TOKENS, CHUNK_TOKENS)
                simulated.ask(self.corpus[:length])
                works.append(simulated.work)
                for split, side in sides.items():
                    side.parts.engine.tree.flush()
                    gc.collect()
                    began = time.perf_counter()
                    side.ask(self.corpus[:length])
                    seconds[split].append(time.perf_counter() - began)
        return {split: Cost.fitted(works, said) for split, said in seconds.items()}

    def _predicted_s(self, split: bool, cost: Cost, length: int) -> list[float]:
        """Of each run, since that is what is measured, and medians of."""
        pages = pages_of(self.model, split, RANKS, self.budget)
        seconds = []
        for prompts in self._runs(length):
            one = Simulated(pages, PAGE_TOKENS, CHUNK_TOKENS)
            for at, prompt in enumerate(prompts):
                if at == self.sizes.sessions:  # each was asked once
                    one.work = Work()
                one.ask(prompt)
            seconds.append(cost.seconds(one.work))
        return seconds

    def prediction_error(self) -> Measure:
        """The largest, in parts of what was measured."""
        measure = Measure("prediction_error", "share", "value", gate=0.15, at_least=False)
        if not self.predicted:
            self.predict()
        for length in LENGTHS:
            if length not in self.gained:
                self.gain("", length, None, None)
        errors = {one: abs(self.predicted[one] / self.gained[one] - 1) for one in LENGTHS}
        measure.ours = [max(errors.values())]
        measure.note = ", ".join(f"{length}: {error:.3f}" for length, error in errors.items())
        return measure

    # ---- sessions ---------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Bytes of KV a rank."""
        return self.sizes.sessions * SHORT * self.model.schema.row_bytes

    def gain(
        self,
        name: str,
        length: int,
        gate: float | None,
        aim: float | None,
        ranks: int = RANKS,
        host: bool = False,
    ) -> Measure:
        """Tokens of prompts a second, split over replicated."""
        measure = Measure(name, "tokens/s", "rate", gate=gate, aim=aim)
        with ExitStack() as stack:
            split, whole = (
                stack.enter_context(closing(self._side(one, self.budget, ranks, host)))
                for one in (True, False)
            )
            runs = self._runs(length)
            at = {id(split): 0, id(whole): 0}

            def rate(side: Side) -> float:
                turn = at[id(side)]
                at[id(side)] += 1
                return side.rate(runs[turn])

            interleave(
                measure, partial(rate, split), partial(rate, whole), self.sizes.repeats, warm=False
            )
            if split.answers != whole.answers:
                raise Bug("two sides were given the same requests, and answered differently")
        sizes = self.sizes
        working = sizes.sessions * length * self.model.schema.row_bytes / self.budget
        if ranks == RANKS and not host:
            self.gained[length] = measure.result
        measure.note = (
            f"{length} tokens, {sizes.sessions} sessions, {sizes.requests} requests a run, {ranks} "
            f"ranks, working set {working:.2f} of what replicated storage holds; of the prefixes "
            f"(0.9 of the tokens) found: split {split.found:.2f}, replicated {whole.found:.2f}; "
            f"tokens computed a second: {split.computed_rate:.0f} and {whole.computed_rate:.0f}"
        )
        return measure

    def _runs(self, length: int) -> list[list[list[int]]]:
        """Of each run, the prompts: every session once, then sessions at random."""
        sizes, rng = self.sizes, np.random.default_rng(length)
        prefix = length * 9 // 10 // PAGE_TOKENS * PAGE_TOKENS
        apart = (len(self.corpus) - 2 * length) // sizes.sessions
        runs = []
        for _ in range(sizes.repeats):
            order = [*range(sizes.sessions), *rng.integers(sizes.sessions, size=sizes.requests)]
            prompts = []
            for session in order:
                tail = int(rng.integers(len(self.corpus) - length))
                base = int(session) * apart
                prompts.append(
                    self.corpus[base : base + prefix] + self.corpus[tail : tail + length - prefix]
                )
            runs.append(prompts)
        return runs

    def _side(
        self,
        layer_split: bool,
        budget: int,
        ranks: int = RANKS,
        host: bool = False,
        sets: Sequence[str] = (),
    ) -> Side:
        return Side(self.model, layer_split, budget, self.sizes.sessions, ranks, host, sets)

    # ---- one request ------------------------------------------------------------------------

    def fits(self) -> Measure:
        """Time of 2k new tokens where all of the prefix is kept: split over replicated."""
        measure = Measure("cost_where_it_fits_2k", "s", "cost", gate=1.05, aim=1.01, at_least=False)
        with closing(self._large(True)) as split, closing(self._large(False)) as whole:
            interleave(
                measure,
                partial(self._more, split),
                partial(self._more, whole),
                self.sizes.fits_repeats,
            )
        measure.note = f"{FITS_NEW} new tokens after {FITS_PREFIX} that are kept, {RANKS} ranks"
        return measure

    def very_long(self) -> Measure:
        """One request of the report's largest size, all of its prefix kept: its time."""
        measure = Measure("cost_at_120k", "s", "cost", at_least=False)
        measure.other = []
        prefix = VERY_LONG * 9 // 10 // PAGE_TOKENS * PAGE_TOKENS
        many = -(-VERY_LONG // len(self.corpus)) * self.corpus
        for split, times in ((True, measure.ours), (False, measure.other)):
            budget = (VERY_LONG + CHUNK_TOKENS) * self.model.schema.row_bytes
            with closing(self._side(split, budget)) as side:
                side.ask(many[:prefix])
                began = time.perf_counter()
                found = side.ask([*many[:prefix], *many[7 : 7 + VERY_LONG - prefix]])
                times.append(time.perf_counter() - began)
                if found != prefix:
                    raise Bug(f"{found} of {prefix} tokens were found")
        measure.note = f"{VERY_LONG - prefix} new tokens after {prefix} that are kept; one run"
        return measure

    def decode(self) -> Measure:
        """A verify step of a long context: queries go to the rows, or rows to the queries."""
        measure = Measure("decode_over_rows_sent", "s a step", "time")
        budget = 2 * LONG * self.model.schema.row_bytes
        sets = ("lab.rows_to_queries=true",)
        with (
            closing(self._side(True, budget)) as ours,
            closing(self._side(True, budget, sets=sets)) as other,
        ):
            prompt = self.corpus[:LONG]
            interleave(
                measure,
                partial(ours.step_s, prompt),
                partial(other.step_s, prompt),
                self.sizes.fits_repeats,
            )
        measure.note = f"{LONG} tokens of context, one request"
        return measure

    def index_bytes(self) -> Measure:
        """What goes before a layer's index keys can be read, over what goes beside it."""
        measure = Measure("index_over_kv", "bytes", "value")
        doors = {
            door: sum(one.row_bytes for one in self.model.schema.buffers if one.door == door)
            for door in DOORS
        }
        measure.ours = [doors["index"] / doors["attend"]]
        measure.note = "of this model; the report says about 1/8 of GLM-5.1"
        return measure

    def capacity(self) -> Measure:
        """Tokens that ranks of one budget hold, over replicated, over the number of ranks."""
        measure = Measure("capacity", "of N times", "value", gate=0.9, aim=0.95)
        schema = self.model.schema
        each = [owners(schema, RANKS).page_bytes(schema), schema.page_bytes]
        split, whole = (pages_that_fit(one, 1.0) for one in each)
        measure.ours = [split / whole / RANKS]
        measure.note = f"{split} pages in 1 GiB a rank, {whole} where each rank keeps all"
        return measure

    def bytes_sent(self) -> Measure:
        """Bytes that owners broadcast, over the rows that passes needed of earlier ones."""
        measure = Measure("bytes_over_needed", "x", "value", gate=1.05, at_least=False)
        with closing(self._large(True)) as split:
            for _ in range(self.sizes.fits_repeats):
                sent, needed = split.sent, split.needed
                self._more(split)
                measure.ours.append((split.sent - sent) / (split.needed - needed))
        measure.note = "whole pages go, and passes need rows"
        return measure

    def exposed(self, name: str, doors: Sequence[Door], aim: float | None) -> Measure:
        """The share of a step in which rank 0 stood still for a broadcast."""
        measure = Measure(name, "share", "value", aim=aim, at_least=False)
        with closing(self._large(True)) as split:
            waiting = watch(split.parts.stream)
            self._more(split)
            for _ in range(self.sizes.fits_repeats):
                waiting.reset()
                took = self._more(split)
                measure.ours.append(sum(waiting.by_door[door] for door in doors) / took)
        measure.note = "two cores: the thread that sends and the rank that computes share one"
        return measure

    def _large(self, layer_split: bool) -> Side:
        """A side that holds everything, and has the prefix."""
        budget = 4 * (FITS_PREFIX + FITS_NEW) * self.model.schema.row_bytes
        side = self._side(layer_split, budget)
        side.ask(self.corpus[:FITS_PREFIX])
        return side

    def _more(self, side: Side) -> float:
        first = FITS_PREFIX + (side.asked * 7919) % (len(self.corpus) - FITS_PREFIX - FITS_NEW)
        prompt = self.corpus[:FITS_PREFIX] + self.corpus[first : first + FITS_NEW]
        gc.collect()
        began = time.perf_counter()
        side.ask(prompt)
        return time.perf_counter() - began
