"""`stanchion bench engine`: the engine on one worker, beside transformers with the same weights.

Lengths, batch sizes and repeats are fixed here. `--quick` repeats less and decodes fewer tokens;
contexts stay what the names say.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stanchion.cli.bench.measure import Measure, interleave
from stanchion.cli.bench.sides import Ours, Theirs
from stanchion.device.kernels.index_select import Context, Selection, select
from stanchion.device.kernels.sparse_attention import sparse_attention
from stanchion.gateway.structured import lark_part, schema_part
from stanchion.lab.corpus import corpus
from stanchion.model.glm5 import Glm5

SAMPLED_TEMPERATURE = 0.7  # the embedded model's working range; greedy loops by itself
TOP_K = 128
# An answer that cannot end before the measure does.
RECORD = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 40},
        "line": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["function", "class", "constant"]},
    },
    "required": ["path", "line", "kind"],
    "additionalProperties": False,
}
RECORDS = json.dumps(
    {
        "grammars": [
            lark_part("start: @records"),
            {"name": "records"} | schema_part({"type": "array", "minItems": 500, "items": RECORD}),
        ]
    }
)


@dataclass(frozen=True)
class Sizes:
    repeats: int
    repeats_long: int  # of a 16k prefill
    tokens: int  # decoded a request at short contexts
    tokens_long: int  # at 4k and 16k


FULL = Sizes(repeats=5, repeats_long=3, tokens=96, tokens_long=24)
QUICK = Sizes(repeats=2, repeats_long=1, tokens=48, tokens_long=4)


class Bench:
    """Builds each side once, when the first measure asks for it."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder = folder
        self.sizes = sizes
        self.tokens = corpus(folder)
        self._long_cache: Any = None
        self.measures: dict[str, Callable[[], Measure]] = {
            "decode_c1_512": partial(self.decode, "decode_c1_512", 1, 512, gate=2.0),
            "decode_c16_512": partial(self.decode, "decode_c16_512", 16, 512, gate=1.5),
            "decode_c16_4k": partial(self.decode, "decode_c16_4k", 16, 4096, aim=4.0),
            "prefill_16k": self.prefill,
            "decode_c1_16k": partial(self.decode, "decode_c1_16k", 1, 16384, gate=4.0),
            "spec_gain_c1": partial(self.speculation, "spec_gain_c1", 0.0, 1.2, 1.6),
            "spec_gain_c1_sampled": partial(
                self.speculation, "spec_gain_c1_sampled", SAMPLED_TEMPERATURE, None, None
            ),
            "sparse_attention_flat": self.attention_flat,
            "indexer_floor": self.indexer_floor,
            "engine_overhead": self.overhead,
            "grammar_cost": self.grammar_cost,
            "prefix_hit_ttft": self.prefix_hit,
            "start_to_ready_s": self.start_to_ready,
        }

    def prepare(self, names: Sequence[str]) -> None:
        """Load both sides before the first measure: what comes later must not disturb one."""
        if set(names) - {"start_to_ready_s"}:
            _ = self.ours, self.speculating, self.theirs
            gc.collect()
            gc.freeze()  # as a serving process does: both are spared walks over what was loaded

    @cached_property
    def ours(self) -> Ours:
        return Ours(self.folder, draft_tokens=0)

    @cached_property
    def speculating(self) -> Ours:
        return Ours(self.folder, draft_tokens=3)

    @cached_property
    def theirs(self) -> Theirs:
        return Theirs(self.folder)

    def prompt(self, length: int, at: int = 0) -> list[int]:
        """`length` tokens of the corpus; another stretch for each `at`."""
        first = (at * 7919) % (len(self.tokens) - length)
        return self.tokens[first : first + length]

    def decode(
        self, name: str, batch: int, context: int, gate: float | None = None,
        aim: float | None = None,
    ) -> Measure:  # fmt: skip
        """Tokens a second over the batch; prompts are prefilled outside the timing."""
        steps = self.sizes.tokens if context < 4096 else self.sizes.tokens_long
        prompts = [self.prompt(context, at) for at in range(batch)]
        if context <= 512:
            cache = self.theirs.prefill(prompts)
        elif batch == 1 and self._long_cache is not None:
            cache = self._long_cache  # of the same prompt, from `prefill_16k`
        else:  # one prompt's cache, repeated: the same bytes a row, without hours of prefill
            cache = self.theirs.prefill(prompts[:1])
            cache.batch_repeat_interleave(batch)
        measure = Measure(name, "tokens/s", "rate", gate=gate, aim=aim)
        measure.note = f"transformers: {self.theirs.setting}"
        if batch == 1:
            measure.note += f"; {self._agreement(prompts[0], cache, steps)}"
        return interleave(
            measure,
            lambda: self.ours.decode_rate([self.ours.start(p, steps + 1) for p in prompts]),
            lambda: self.theirs.decode_rate(cache, batch, steps),
            self.sizes.repeats,
        )

    def _agreement(self, prompt: list[int], cache: object, steps: int) -> str:
        mine = self.ours.generate(self.ours.start(prompt, steps + 1))
        first = self.theirs.last
        other = [int(first[0, 0]), *(row[0] for row in self.theirs.decode(cache, first, steps))]
        same = next((at for at, (a, b) in enumerate(zip(mine, other)) if a != b), len(mine))
        return f"greedy tokens equal: {same} of {len(mine)}"

    def prefill(self) -> Measure:
        """16k prompt tokens to the first token, in tokens a second."""
        prompt = self.prompt(16384)
        measure = Measure("prefill_16k", "tokens/s", "rate", gate=1.5, aim=3.0)
        salt = iter(range(1000))

        def ours() -> float:
            start = self.ours.start(prompt, 1, salt=f"cold {next(salt)}")
            return len(prompt) / self.ours.first_token_s(start)

        def other() -> float:
            began = time.perf_counter()
            self._long_cache = self.theirs.prefill([prompt])
            return len(prompt) / (time.perf_counter() - began)

        # A minute a run on their side: what warms up is nothing against it.
        return interleave(measure, ours, other, self.sizes.repeats_long, warm=False)

    def speculation(
        self, name: str, temperature: float, gate: float | None, aim: float | None
    ) -> Measure:
        """One stream with 3 drafts against none."""
        measure = Measure(name, "tokens/s", "rate", gate=gate, aim=aim)
        steps = 2 * self.sizes.tokens
        at = {"on": 0, "off": 0}
        counts = self.speculating.engine.counters
        before = counts.verify_steps, counts.accepted

        def rate(side: Ours, key: str) -> float:
            rates = []
            for _ in range(4):  # acceptance differs by prompt, so each run takes four
                at[key] += 1
                prompt = self.prompt(512, at[key])
                rates.append(side.decode_rate([side.start(prompt, steps, temperature)]))
            return 4 / sum(1 / one for one in rates)

        result = interleave(
            measure,
            lambda: rate(self.speculating, "on"),
            lambda: rate(self.ours, "off"),
            self.sizes.repeats,
        )
        steps_taken = counts.verify_steps - before[0]
        result.note = f"accept length {1 + (counts.accepted - before[1]) / steps_taken:.2f}"
        return result

    def attention_flat(self) -> Measure:
        """Attention over the chosen rows: a token at 32k over one at 4k."""
        measure = Measure("sparse_attention_flat", "us/token", "cost", gate=1.15, at_least=False)
        return interleave(
            measure,
            partial(self._attention_us, 32768),
            partial(self._attention_us, 4096),
            4 * self.sizes.repeats,
        )

    def _attention_us(self, context: int) -> float:
        generator = np.random.default_rng(context)
        model = self._glm
        rows = torch.randn(context, model.config.kv_lora_rank + model.config.qk_rope_head_dim)
        geometry = _one_query(context, 16, 16)
        picks = [np.sort(generator.choice(context, TOP_K, replace=False)) for _ in range(16)]
        chosen = Selection(np.stack(picks).astype(np.int32), np.full(16, TOP_K, np.int32))
        config = model.config
        queries = np.ones((16, config.num_attention_heads, rows.shape[1]), np.float32)
        latent = config.kv_lora_rank
        took = _us(lambda: sparse_attention(queries, rows, geometry, chosen, latent, 0.1))
        return took / 16

    @property
    def _glm(self) -> Glm5:
        model = self.ours.model
        assert isinstance(model, Glm5)
        return model

    def indexer_floor(self) -> Measure:
        """Scoring and choosing 128 of 16k rows, over one matrix product of the same shapes."""
        config = self._glm.config
        heads, width, context = config.index_n_heads, config.index_head_dim, 16384
        keys = torch.randn(context, width)
        query = torch.randn(1, heads * width)
        weights = torch.randn(1, heads)
        angles = np.ones((1, config.qk_rope_head_dim), np.float32)
        geometry = _one_query(context, 16, 1)
        product = torch.empty(heads, context)

        def ours() -> float:
            return _us(
                lambda: select(
                    query.numpy(), 0, heads, weights.numpy(), 0, angles, keys, None, geometry, TOP_K
                )
            )

        def floor() -> float:
            return _us(lambda: torch.mm(query.view(heads, width), keys.T, out=product))

        measure = Measure("indexer_floor", "us", "cost", aim=3.0, at_least=False)
        return interleave(measure, ours, floor, 4 * self.sizes.repeats)

    def overhead(self) -> Measure:
        """The share of a step at 16 streams that is spent outside the model's passes."""
        measure = Measure("engine_overhead", "share", "value", aim=0.15, at_least=False)
        prompts = [self.prompt(512, at) for at in range(16)]

        def share() -> float:
            side = self.ours
            side.model_s = 0.0
            began = time.perf_counter()
            for prompt in prompts:
                side.engine.step([side.start(prompt, self.sizes.tokens)])
            while side.engine.busy:
                side.engine.step([])
            return 1.0 - side.model_s / (time.perf_counter() - began)

        return interleave(measure, share, None, self.sizes.repeats)

    def grammar_cost(self) -> Measure:
        """16 streams that follow a JSON schema, beside 16 that are free; no drafts on either."""
        measure = Measure("grammar_cost", "tokens/s", "rate")
        prompts = [self.prompt(512, at) for at in range(16)]
        steps = self.sizes.tokens + 1

        def rate(grammar: str | None) -> float:
            return self.ours.decode_rate(
                [self.ours.start(prompt, steps, grammar=grammar) for prompt in prompts]
            )

        return interleave(measure, lambda: rate(RECORDS), lambda: rate(None), self.sizes.repeats)

    def prefix_hit(self) -> Measure:
        """Time to the first token at 8k: 90 % from the prefix tree, beside all of it cold."""
        measure = Measure("prefix_hit_ttft", "s", "time", gate=4.0)
        shared = self.prompt(8192)[: 8192 * 9 // 10]
        self.ours.first_token_s(self.ours.start(shared, 1))
        tail = iter(range(1, 1000))
        salt = iter(range(1000))

        def hit() -> float:
            prompt = shared + self.prompt(8192 - len(shared), next(tail))
            return self.ours.first_token_s(self.ours.start(prompt, 1))

        def cold() -> float:
            prompt = shared + self.prompt(8192 - len(shared), next(tail))
            unknown = f"unknown {next(salt)}"
            return self.ours.first_token_s(self.ours.start(prompt, 1, salt=unknown))

        return interleave(measure, hit, cold, self.sizes.repeats)

    def start_to_ready(self) -> Measure:
        """From the command to the line that says where it serves."""
        measure = Measure("start_to_ready_s", "s", "value", aim=6.0, at_least=False)
        return interleave(measure, _start_s, None, self.sizes.repeats)


def _one_query(context: int, page_tokens: int, requests: int) -> Context:
    """`requests` requests of one query each, at the end of a context of scattered pages."""
    pages = np.random.default_rng(7).permutation(context // page_tokens).astype(np.int32)
    return Context(
        np.full(requests, context - 1, np.int64),
        np.arange(requests + 1, dtype=np.int64),
        np.tile(pages, requests),
        np.arange(requests + 1, dtype=np.int64) * len(pages),
        page_tokens,
    )


def _us(work: Callable[[], object], times: int = 30) -> float:
    """Microseconds a call, over `times` calls after one that is not counted."""
    work()
    began = time.perf_counter()
    for _ in range(times):
        work()
    return 1e6 * (time.perf_counter() - began) / times


def _start_s() -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "stanchion.cli.main", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        took = next(
            (time.perf_counter() - began for line in server.stdout if "http://" in line), None
        )
        server.terminate()
        server.stdout.read()
    assert took is not None, "the server never said where it serves"
    return took
