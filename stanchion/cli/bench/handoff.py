"""`stanchion bench handoff`: what moving KV from a prefill to a decode worker costs, and brings.

All sizes and repeats are fixed here. `--quick` repeats less and moves less; lengths that a measure
is named after stay.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from stanchion.cli.bench import memory, storm
from stanchion.cli.bench.measure import Measure, interleave, paired
from stanchion.cli.bench.pair import PARTNER, Asked, Held, Link, Pair, build, serve
from stanchion.cli.bench.target import PEER, target
from stanchion.cli.settings import SWITCH_S
from stanchion.core.errors import Bug
from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.disagg.check import Mode
from stanchion.engine.scheduler import Limits
from stanchion.kv.transfer.shm import shm_transfer
from stanchion.kv.transfer.words import TransferError
from stanchion.lab.corpus import corpus
from stanchion.model.hashed import HashModel
from stanchion.model.load import load_glm
from stanchion.model.text import Model

PAGE_TOKENS = 16
LINK_SPEED = 5.0  # of the declared link, in times the rate at which prefill makes KV
TURN_S = 0.02  # what both sides are told that a turn takes, where CPU time is measured


@dataclass(frozen=True)
class Traffic:
    """Lengths in tokens, drawn from `seed` evenly between two ends. `aborted`: the share that
    leaves before its end, after up to `leaves_turns` turns."""

    seed: int
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    aborted: float
    leaves_turns: int
    together: int


@dataclass(frozen=True)
class Sizes:
    shm_pool: memory.Sizes
    nixl_pool: memory.Sizes
    ttft_prompt: int
    ttft_repeats: int
    long_prompts: storm.Sizes
    embedded: Traffic
    embedded_pairs: int
    hashed: Traffic
    hashed_pairs: int


HASHED = Traffic(11, 32, (200, 3000), (16, 64), aborted=0.25, leaves_turns=24, together=8)
EMBEDDED = Traffic(12, 8, (200, 1500), (16, 48), aborted=0.25, leaves_turns=24, together=4)
# 128 pages of 64 tokens are what one prefill chunk of 8k tokens gives at GLM-5's size.
FULL = Sizes(
    shm_pool=memory.Sizes(layers=4, pages=1024, write_pages=128, repeats=25),
    nixl_pool=memory.Sizes(layers=4, pages=1024, write_pages=128, repeats=9),
    ttft_prompt=8192,
    ttft_repeats=9,
    long_prompts=storm.Sizes(6, 64, 1200, prompt=4096, every_s=2.0, repeats=5),
    embedded=EMBEDDED,
    embedded_pairs=40,
    hashed=HASHED,
    hashed_pairs=20,
)
QUICK = Sizes(
    shm_pool=memory.Sizes(layers=4, pages=1024, write_pages=128, repeats=7),
    nixl_pool=memory.Sizes(layers=4, pages=1024, write_pages=128, repeats=3),
    ttft_prompt=8192,
    ttft_repeats=2,
    long_prompts=storm.Sizes(6, 64, 600, prompt=4096, every_s=2.0, repeats=1),
    embedded=EMBEDDED,
    embedded_pairs=6,
    hashed=HASHED,
    hashed_pairs=4,
)


class Bench:
    """Loads the embedded model once, when the first measure asks for it."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder = folder
        self.sizes = sizes
        self.corpus = corpus(folder)
        self.limits = Limits()
        self._salt = itertools.count()
        self.measures: dict[str, Callable[[], Measure]] = {
            "shm_over_memcpy": self.shm,
            "nixl_gibs": self.nixl,
            "layerwise_ttft": partial(self.layerwise, "layerwise_ttft", linked=True),
            "layerwise_ttft_shm": partial(self.layerwise, "layerwise_ttft_shm", linked=False),
            "pd_itl_p99": self.storm,
            "safety_cost": self.safety,
            "kv_check_full_cost": self.check,
        }

    def prepare(self, names: Sequence[str]) -> None:
        sys.setswitchinterval(SWITCH_S)  # as in a prefill worker: the transfer's thread needs it

    @cached_property
    def embedded(self) -> Model:
        return load_glm(self.folder, PAGE_TOKENS)[0]

    @cached_property
    def hashed(self) -> Model:
        return HashModel(PAGE_TOKENS, True, None)

    # ---- memory -----------------------------------------------------------------------------

    def shm(self) -> Measure:
        """Into another process's pool, beside a memcpy for each page of each buffer, from and to
        the same places."""
        sizes = self.sizes.shm_pool
        measure = Measure("shm_over_memcpy", "GiB/s", "rate", gate=0.7, aim=0.85)
        source = memory.Source(sizes)
        at_once: list[float] = []
        with (
            target("shm", sizes.layers, sizes.pages) as invitation,
            closing(shm_transfer(source.arena, source.layout)) as transfer,
        ):
            mover = memory.Mover(source, transfer, invitation)
            there = memory.mapped(invitation)

            def copy() -> float:
                at_once.append(memory.copy_rate(source, there))
                return mover.page_copy_rate(there)

            interleave(measure, mover.rate, copy, sizes.repeats)
        measure.note = (
            f"{source.bytes / 2**20:.0f} MiB, {sizes.write_pages} scattered pages of one layer a "
            f"write, beside a memcpy for each of these pages; one contiguous memcpy of all reaches "
            f"{statistics.median(at_once[1:]):.3g} GiB/s"
        )
        return measure

    def nixl(self) -> Measure:
        sizes = self.sizes.nixl_pool
        measure = Measure("nixl_gibs", "GiB/s", "value")
        source = memory.Source(sizes)
        try:
            from stanchion.kv.transfer.nixl import nixl_transfer

            transfer = nixl_transfer(source.arena, source.layout)
        except TransferError as error:
            measure.note = str(error)
            return measure
        with closing(transfer), target("nixl", sizes.layers, sizes.pages) as invitation:
            mover = memory.Mover(source, transfer, invitation)
            interleave(measure, mover.rate, None, sizes.repeats)
            transfer.disconnect(PEER)
        measure.note = f"over TCP on this machine, {source.bytes / 2**20:.0f} MiB a run"
        return measure

    # ---- time to the first token ------------------------------------------------------------

    def layerwise(self, name: str, linked: bool) -> Measure:
        """Writes as layers become ready, beside all writes once the prompt is computed."""
        measure = Measure(name, "s", "time")
        length = self.sizes.ttft_prompt
        pages = 2 * (length // PAGE_TOKENS + 2)
        model = self.embedded
        with closing(build(model, self.limits, pages)) as pair:
            lane = pair.prefill.lane
            took = [self._first_token_s(pair, length) for _ in range(2)][-1]
            made_s = length * model.schema.row_bytes / took  # bytes of KV a second
            if linked:
                measure.gate, measure.aim = 1.0, 1.15
                lane = Link(lane, model.schema, LINK_SPEED * made_s)
                measure.note = (
                    f"over a declared link: a lane that carries {LINK_SPEED * made_s / 2**20:.0f} "
                    f"MiB/s, {LINK_SPEED:g} times the {made_s / 2**20:.0f} MiB/s of KV that "
                    f"prefill makes of {length} tokens here; a copy's end is reported when that "
                    "link would be done"
                )
            else:
                measure.note = "over shared memory as it is"
            held = Held(lane, pair.prefill.engine)

            def ours() -> float:
                pair.prefill.lane = lane
                return self._first_token_s(pair, length)

            def other() -> float:
                pair.prefill.lane = held
                return self._first_token_s(pair, length)

            return interleave(measure, ours, other, self.sizes.ttft_repeats)

    def _first_token_s(self, pair: Pair, length: int) -> float:
        pair.forget()
        return pair.first_token_s(self._start(self._tokens(length), 1))

    def _tokens(self, length: int, at: int = 0) -> list[int]:
        first = (at * 7919) % (len(self.corpus) - length)
        return self.corpus[first : first + length]

    def _start(self, tokens: list[int], output: int) -> Start:
        sampling = Sampling(max_tokens=output, temperature=0.7, seed=output, ignore_eos=True)
        return Start(
            request=f"r{next(self._salt)}", tokens=tokens, sampling=sampling, prefill=PARTNER
        )

    # ---- a storm ----------------------------------------------------------------------------

    def storm(self) -> Measure:
        """Two processes a side."""
        sizes = self.sizes.long_prompts
        measure = Measure("pd_itl_p99", "s", "time", aim=2.0)
        measure.note = (
            f"{sizes.clients} clients of {sizes.client_tokens} tokens while a prompt of "
            f"{sizes.prompt} tokens arrives every {sizes.every_s:g} s: one prefill and one decode "
            "worker, beside two that do both; tokens that arrive together are one arrival"
        )
        return storm.Storm(sizes, self.corpus, measure).run()

    # ---- CPU time ---------------------------------------------------------------------------

    def safety(self) -> Measure:
        """Pins, doors and draining, beside none of them."""
        sizes = self.sizes
        measure = Measure("safety_cost", "CPU s", "bound", gate=1.05, aim=1.01, at_least=False)
        hashed = Measure("", "CPU s", "bound")
        self._safety(measure, self.embedded, sizes.embedded, sizes.embedded_pairs)
        self._safety(hashed, self.hashed, sizes.hashed, sizes.hashed_pairs)
        measure.note = _beside(measure, hashed)
        return measure

    def _safety(self, measure: Measure, model: Model, traffic: Traffic, pairs: int) -> None:
        safe, unsafe = Load(self, model, traffic), Load(self, model, traffic, unsafe=True)
        with closing(safe), closing(unsafe):
            paired(measure, safe.cpu_s, unsafe.cpu_s, pairs)
        _same(safe, unsafe)

    def check(self) -> Measure:
        """Digests of every page, beside none."""
        sizes = self.sizes
        measure = Measure(
            "kv_check_full_cost", "CPU s", "bound", gate=1.08, aim=1.03, at_least=False
        )
        hashed = Measure("", "CPU s", "bound")
        self._check(measure, self.embedded, sizes.embedded, sizes.embedded_pairs)
        self._check(hashed, self.hashed, sizes.hashed, sizes.hashed_pairs)
        measure.note = _beside(measure, hashed)
        return measure

    def _check(self, measure: Measure, model: Model, traffic: Traffic, pairs: int) -> None:
        full, off = Load(self, model, traffic, "full"), Load(self, model, traffic)
        with closing(full), closing(off):
            paired(measure, full.cpu_s, off.cpu_s, pairs)
        _same(full, off)


@dataclass
class Load:
    """One pair of sides, and the same traffic for every run of it."""

    bench: Bench
    model: Model
    traffic: Traffic
    check: Mode = "off"
    unsafe: bool = False
    pair: Pair = field(init=False)
    completed: list[list[int]] = field(default_factory=list)  # answers of the last run

    def __post_init__(self) -> None:
        traffic = self.traffic
        tokens = traffic.requests * (traffic.prompt[1] + traffic.output[1])
        # Nothing is ever evicted, and what is freed is not taken again within a run.
        pages = tokens // PAGE_TOKENS + 2 * traffic.requests + 2
        self.pair = build(self.model, self.bench.limits, pages, self.check, self.unsafe)

    def cpu_s(self) -> float:
        """Of this process, its transfer's thread included."""
        asked = list(self._asked())
        self.pair.forget()
        gc.collect()
        began = time.process_time()
        answers = serve(self.pair, asked, self.traffic.together, TURN_S)
        took = time.process_time() - began
        staying = [one.start.request for one in asked if one.leaves_after is None]
        self.completed = [answers[name] for name in staying]
        return took

    def _asked(self) -> Iterator[Asked]:
        traffic, model = self.traffic, self.model
        generator = np.random.default_rng(traffic.seed)
        for _ in range(traffic.requests):
            prompt, output = (
                int(generator.integers(low, high + 1))
                for low, high in (traffic.prompt, traffic.output)
            )
            leaves = generator.random() < traffic.aborted
            turns = int(generator.integers(1, traffic.leaves_turns + 1))
            tokens = generator.integers(1, min(model.vocabulary, 256), prompt).tolist()
            yield Asked(self.bench._start(tokens, output), turns if leaves else None)

    def close(self) -> None:
        self.pair.close()


def _same(one: Load, other: Load) -> None:
    """Both did the same work: every request that stayed has the same answer."""
    if one.completed != other.completed:
        raise Bug("two sides were given the same requests, and answered differently")


def _beside(embedded: Measure, hashed: Measure) -> str:
    return (
        f"embedded model; mean of the ratios {_mean(embedded):.4f}; of the hash model, which "
        f"computes next to nothing, {_mean(hashed):.3f} (bound {hashed.result:.3f})"
    )


def _mean(measure: Measure) -> float:
    assert measure.other is not None
    return statistics.fmean(ours / other for ours, other in zip(measure.ours, measure.other))
