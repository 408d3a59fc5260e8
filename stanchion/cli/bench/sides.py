"""The two sides of `bench engine`: our engine without HTTP, and transformers in its best setting.

Both get one thread, float32, the same weights and the same prompts, and choose greedily, unless a
measure says otherwise. transformers' side is a bare loop over its model (no `generate` around it),
with the fastest of its attention and expert implementations on this machine, tried beforehand.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stanchion.core.matching import Grammars
from stanchion.core.messages import Start, Tokens
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble, pages_that_fit
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.gateway.tokens import load_vocabulary
from stanchion.model.load import load_glm
from stanchion.model.text import Model

KV_GIB = 2.0
PREFILL_CHUNK = 1024  # transformers: larger chunks were slower and need gigabytes for scores


@dataclass
class Ours:
    """One engine, driven step by step in this process."""

    folder: Path
    draft_tokens: int
    engine: Engine = field(init=False)
    model: Model = field(init=False)
    model_s: float = 0.0  # time spent inside the model's passes
    _names: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        draft = self.draft_tokens > 0
        model, name, revision, eos = load_glm(self.folder, 16, draft=draft)
        self.model = model
        for one in ("forward", "logits", "draft", "draft_logits"):
            setattr(model, one, self._timed(getattr(model, one)))
        limits = Limits(draft_tokens=self.draft_tokens)
        pages = pages_that_fit(model.schema.page_bytes, KV_GIB)
        words = load_vocabulary(self.folder)
        grammars = Grammars(words.pieces, words.special, eos, model.vocabulary)
        self.engine = assemble(model, limits, pages, name, revision, eos, grammars=grammars).engine

    def start(
        self,
        prompt: list[int],
        output: int,
        temperature: float = 0.0,
        salt: str = "",
        grammar: str | None = None,
    ) -> Start:
        """It goes on for `output` tokens; under a grammar, only if that does."""
        sampling = Sampling(
            max_tokens=output,
            temperature=temperature,
            ignore_eos=grammar is None,
            seed=len(prompt),
        )
        return Start(
            request=f"r{next(self._names)}",
            tokens=prompt,
            sampling=sampling,
            salt=salt,
            grammar=grammar,
        )

    def first_token_s(self, start: Start) -> float:
        """Seconds from arrival to the first token; the request is run to its end after."""
        began = time.perf_counter()
        said = self.engine.step([start])
        while not any(isinstance(one, Tokens) for one in said):
            said = self.engine.step([])
        took = time.perf_counter() - began
        while self.engine.busy:
            self.engine.step([])
        return took

    def decode_rate(self, starts: list[Start]) -> float:
        """Tokens a second over all requests, from when the last of them has its first token."""
        self.engine.step(starts)
        while any(one.phase != "decode" for one in self._requests()):
            self.engine.step([])
        tokens = 0
        began = time.perf_counter()
        while self.engine.busy:
            said = self.engine.step([])
            tokens += sum(len(one.tokens) for one in said if isinstance(one, Tokens))
        return tokens / (time.perf_counter() - began)

    def generate(self, start: Start) -> list[int]:
        said = self.engine.step([start])
        tokens: list[int] = []
        while said or self.engine.busy:
            tokens += [token for one in said if isinstance(one, Tokens) for token in one.tokens]
            said = self.engine.step([]) if self.engine.busy else []
        return tokens

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            done = work(*arguments)
            self.model_s += time.perf_counter() - began
            return done

        return timed

    def _requests(self) -> list[Any]:
        return [*self.engine.running.values(), *self.engine.waiting]


@dataclass
class Theirs:
    """transformers' GlmMoeDsaForCausalLM with its own cache."""

    folder: Path
    model: Any = field(init=False)
    setting: str = ""

    def __post_init__(self) -> None:
        from transformers import GlmMoeDsaForCausalLM, logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it lists the draft layer, which it drops
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        fastest = 0.0
        for attention, experts in itertools.product(("eager", "sdpa"), ("eager", "grouped_mm")):
            model = GlmMoeDsaForCausalLM.from_pretrained(
                self.folder, dtype=torch.float32, attn_implementation=attention
            )
            model.train(False)
            model.config._experts_implementation = experts
            model.model.config._experts_implementation = experts
            self.model = model
            cache = self.prefill([list(range(20, 148))])
            rate = max(self.decode_rate(cache, 1, 8) for _ in range(3))
            if rate > fastest:
                fastest, best, self.setting = rate, model, f"{attention}, experts {experts}"
        self.model = best

    def prefill(self, prompts: list[list[int]]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor(prompts)
        for low in range(0, ids.shape[1], PREFILL_CHUNK):
            out = self.model(
                ids[:, low : low + PREFILL_CHUNK], cache=cache, use_cache=True, logits_to_keep=1
            )
        self.last = out.logits[:, -1:].argmax(-1)
        return cache

    def decode(self, cache: Any, tokens: Any, steps: int) -> list[list[int]]:
        """Greedy tokens a step, batch by batch; the cache is cropped back afterwards."""
        said = []
        for _ in range(steps):
            out = self.model(tokens, cache=cache, use_cache=True)
            tokens = out.logits[:, -1:].argmax(-1)
            said.append(tokens[:, 0].tolist())
        cache.crop(-steps)
        return said

    def decode_rate(self, cache: Any, batch: int, steps: int) -> float:
        tokens = self.last[:1].expand(batch, 1) if len(self.last) != batch else self.last
        began = time.perf_counter()
        self.decode(cache, tokens, steps)
        return batch * steps / (time.perf_counter() - began)
