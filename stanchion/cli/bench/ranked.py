"""A worker of several ranks, for benchmarks: rank 0 in this process, the others in theirs."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stanchion.cli.ranks import Followers
from stanchion.cli.tiers import tier_plan
from stanchion.core.config import Config, load
from stanchion.core.errors import Bug
from stanchion.core.messages import Ended, Start, Tokens
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.engine.assemble import Parts, assemble, pages_that_fit
from stanchion.engine.others import Others
from stanchion.engine.ranks import Ranked, page_bytes
from stanchion.engine.scheduler import Limits
from stanchion.model.text import Model

PAGE_TOKENS = 16
RANKS = 2
CHUNK_TOKENS = 2048
DECODED = 9  # tokens of an answer whose steps are timed
HOST_TIMES = 3  # the host's memory, where there is one: so many times the device's


def pages_of(model: Model, layer_split: bool, ranks: int, budget: int) -> int:
    return pages_that_fit(page_bytes(model.schema, ranks, layer_split), budget / 2**30)


@dataclass
class Side:
    """A worker's rank 0 in this process, and its others in theirs. `budget` is bytes a rank."""

    model: Model
    layer_split: bool
    budget: int
    sessions: int
    ranks: int = RANKS
    host: bool = False
    sets: Sequence[str] = ()
    asked: int = 0
    answers: list[list[int]] = field(default_factory=list)
    needed: int = 0
    _cached: int = 0
    _prefixes: int = 0
    _tokens: int = 0
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        sets = [
            f"parallel.cp={self.ranks}",
            f"parallel.layer_split={str(self.layer_split).lower()}",
            f"kv.page_tokens={PAGE_TOKENS}",
            f"kv.host_cache_gib={HOST_TIMES * self.budget / 2**30 if self.host else 0}",
            *self.sets,
        ]
        config = load(Config(), "", sets)
        schema = self.model.schema
        pages = pages_of(self.model, self.layer_split, self.ranks, self.budget)
        self.followers = Followers(config, frozenset())
        ranks = self.followers.start(pages)
        each = page_bytes(schema, self.ranks, self.layer_split)
        self.parts: Parts = assemble(
            self.model,
            Limits(chunk_tokens=CHUNK_TOKENS, draft_tokens=3),
            pages,
            ranks=ranks,
            others=Others(self.followers),
            tiers=tier_plan(config, "bench", schema, each),
        )

    def rate(self, prompts: list[list[int]]) -> float:
        """Prompt tokens a second, once each session was asked."""
        self.parts.engine.tree.flush()
        for prompt in prompts[: self.sessions]:
            self.ask(prompt)
        gc.collect()
        timed = prompts[self.sessions :]
        began = time.perf_counter()
        for prompt in timed:
            self._cached += self.ask(prompt)
            self._prefixes += len(prompt) * 9 // 10
        took = time.perf_counter() - began
        tokens = sum(len(one) for one in timed)
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + took
        return tokens / took

    @property
    def computed_rate(self) -> float:
        """Tokens a second that were not found: what is left to compare at equal hits."""
        return (self._tokens - self._cached) / self._seconds

    def step_s(self, prompt: list[int]) -> float:
        """Seconds a step, once the first token is there."""
        self.asked += 1
        sampling = Sampling(max_tokens=DECODED, temperature=0.0, ignore_eos=True)
        engine = self.parts.engine
        said = engine.step([Start(request=f"r{self.asked}", tokens=prompt, sampling=sampling)])
        while not any(isinstance(one, Tokens) for one in said):
            said = engine.step([])
        began, steps = time.perf_counter(), engine.counters.steps
        while engine.working:
            engine.step([])
        return (time.perf_counter() - began) / (engine.counters.steps - steps)

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
        if self.parts.engine.tiered is not None:
            self.parts.engine.tiered.tiers.close()
