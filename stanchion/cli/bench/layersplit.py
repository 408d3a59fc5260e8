"""`stanchion bench layersplit`: one worker of two ranks that keep each layer once, beside two ranks
that keep all of them.

Both sides have real processes, the same bytes of KV a rank, and the same requests, which are told
by a seed. Nine tokens of ten are a prefix of the request's session and one of ten is new. One
budget holds for all lengths: that at which replicated storage just holds the working set at 5k.

Predicted, before the first run, for sessions asked in random order and tokens that each cost the
same: a request computes its new tenth, and what of its prefix is not kept. Replicated storage keeps
5k / length of the working set, split storage twice that, so the gain at 5k is 1, at 10k
(0.1 + 0.9 / 2) / 0.1 = 5.5, and at 15k (0.1 + 0.9 * 2/3) / (0.1 + 0.9 / 3) = 1.75.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from stanchion.cli.bench.measure import Measure, interleave
from stanchion.cli.bench.sides import corpus
from stanchion.cli.bench.waiting import Waiting
from stanchion.cli.ranks import Followers
from stanchion.core.config import Config, load
from stanchion.core.errors import Bug
from stanchion.core.messages import Ended, Start, Tokens
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.engine.assemble import Parts, assemble, pages_that_fit
from stanchion.engine.others import Others
from stanchion.engine.ranks import Ranked, owners
from stanchion.engine.scheduler import Limits
from stanchion.model.load import load_glm
from stanchion.model.text import Model

PAGE_TOKENS = 16
RANKS = 2
CHUNK_TOKENS = 2048
SHORT, MIDDLE, LONG = 5120, 10240, 15360
FITS_PREFIX, FITS_NEW = 8192, 2047  # with the position that is redone, one chunk


@dataclass(frozen=True)
class Sizes:
    sessions: int
    requests: int  # of a run, after each session was asked once
    repeats: int
    fits_repeats: int


FULL = Sizes(sessions=4, requests=12, repeats=3, fits_repeats=9)
QUICK = Sizes(sessions=3, requests=4, repeats=1, fits_repeats=2)


class Bench:
    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        self.corpus = corpus(folder)
        self.folder = folder
        self.measures: dict[str, Callable[[], Measure]] = {
            "gain_short": partial(self.gain, "gain_short", SHORT, 1.0, 1.10),
            "gain_middle": partial(self.gain, "gain_middle", MIDDLE, None, None),
            "gain_long": partial(self.gain, "gain_long", LONG, 1.5, 2.32),
            "cost_where_it_fits_2k": self.fits,
            "capacity": self.capacity,
            "bytes_over_needed": self.bytes_sent,
            "exposed_wait": self.exposed,
        }

    def prepare(self, names: Sequence[str]) -> None:
        self.model: Model = load_glm(self.folder, PAGE_TOKENS)[0]

    # ---- sessions ---------------------------------------------------------------------------

    def gain(self, name: str, length: int, gate: float | None, aim: float | None) -> Measure:
        """Tokens of prompts a second, split over replicated."""
        measure = Measure(name, "tokens/s", "rate", gate=gate, aim=aim)
        with ExitStack() as stack:
            budget = self.sizes.sessions * SHORT * self.model.schema.row_bytes
            split = stack.enter_context(closing(self._side(True, budget)))
            whole = stack.enter_context(closing(self._side(False, budget)))
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
            measure.note = (
                f"{length} tokens, {sizes.sessions} sessions, {sizes.requests} requests a run; of "
                f"the prefixes found: split {split.found:.2f}, replicated {whole.found:.2f}"
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

    def _side(self, layer_split: bool, budget: int) -> Side:
        return Side(self.model, layer_split, budget, self.sizes.sessions)

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

    def exposed(self) -> Measure:
        """The share of a step in which rank 0 stood still for a broadcast."""
        measure = Measure("exposed_wait", "share", "value", aim=0.03, at_least=False)
        with closing(self._large(True)) as split:
            waiting = Waiting()
            split.parts.stream.queue = waiting
            self._more(split)
            for _ in range(self.sizes.fits_repeats):
                waiting.seconds = 0.0
                took = self._more(split)
                measure.ours.append(waiting.seconds / took)
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


@dataclass
class Side:
    """A worker's rank 0 in this process, and its others in theirs. `budget` is bytes a rank."""

    model: Model
    layer_split: bool
    budget: int
    sessions: int
    asked: int = 0
    answers: list[list[int]] = field(default_factory=list)
    needed: int = 0
    _cached: int = 0
    _prefixes: int = 0

    def __post_init__(self) -> None:
        sets = [f"parallel.cp={RANKS}", f"parallel.layer_split={str(self.layer_split).lower()}"]
        config = load(Config(), "", [*sets, f"kv.page_tokens={PAGE_TOKENS}"])
        schema = self.model.schema
        each = owners(schema, RANKS).page_bytes(schema) if self.layer_split else schema.page_bytes
        pages = pages_that_fit(each, self.budget / 2**30)
        self.followers = Followers(config, frozenset())
        ranks = self.followers.start(pages)
        limits = Limits(chunk_tokens=CHUNK_TOKENS, draft_tokens=3)
        self.parts: Parts = assemble(
            self.model, limits, pages, ranks=ranks, others=Others(self.followers)
        )

    def rate(self, prompts: list[list[int]]) -> float:
        """Prompt tokens a second, once each session was asked."""
        self.parts.engine.tree.flush()
        for prompt in prompts[: self.sessions]:
            self.ask(prompt)
        gc.collect()
        began = time.perf_counter()
        for prompt in prompts[self.sessions :]:
            self._cached += self.ask(prompt)
            self._prefixes += len(prompt) * 9 // 10
        took = time.perf_counter() - began
        return sum(len(one) for one in prompts[self.sessions :]) / took

    def ask(self, prompt: list[int]) -> int:
        """Answer it with one token. Return how many of its tokens were found."""
        self.asked += 1
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        heard = [Start(request=f"r{self.asked}", tokens=prompt, sampling=sampling)]
        engine, found = self.parts.engine, 0
        answer: list[int] = []
        while heard or engine.busy:
            for one in engine.step(heard):
                if isinstance(one, Tokens):
                    answer += one.tokens
                    found = one.cached_tokens
                elif isinstance(one, Ended) and not isinstance(one.outcome, Completed):
                    raise Bug(f"{one.request} ended as {one.outcome}")
            heard = []
        self.answers.append(answer)
        self.needed += self._rows(len(prompt), found) * self.model.schema.row_bytes
        return found

    def _rows(self, prompt: int, found: int) -> int:
        """Rows of earlier passes that the prompt's chunks needed: the last position that was found
        is computed again, for its hidden state."""
        return sum(range(max(found - 1, 0), prompt, CHUNK_TOKENS))

    @property
    def found(self) -> float:
        return self._cached / max(1, self._prefixes)

    @property
    def sent(self) -> int:
        ranked = self.parts.runner.model
        assert isinstance(ranked, Ranked) and ranked.broadcasts is not None
        return ranked.broadcasts.bytes_sent

    def close(self) -> None:
        self.followers.close()
