"""Speculation through the whole engine: what is asked of a request holds whatever is drafted."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.stats import chi2_contingency

from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.engine.request import Request
from stanchion.engine.scheduler import Limits
from stanchion.sim.choices import seeded
from tests.engine.rig import finish, hashed_engine, random_start

PROMPT = [40, 41, 40, 50, 40, 41]


def test_greedy_answers_are_the_same_for_every_number_of_drafts() -> None:
    """With penalties, biases, stops and min_tokens on, as the storms pick them."""
    choices = seeded(11)
    rng = np.random.default_rng(11)
    prefixes = [rng.integers(32, 127, 120).tolist() for _ in range(4)]
    starts = []
    for at in range(60):
        start = random_start(choices, f"r{at}", prefixes, [])
        greedy = msgspec.structs.replace(
            start.sampling, temperature=0.0, draft_tokens=None, frequency_penalty=at % 3 / 2
        )
        starts.append(msgspec.structs.replace(start, sampling=greedy))
    plain = finish(hashed_engine(Limits(draft_tokens=0)), starts)
    for drafts in (1, 3, 5):
        speculated = finish(hashed_engine(Limits(draft_tokens=drafts)), starts)
        for name, heard in plain.items():
            assert speculated[name].tokens == heard.tokens, (drafts, name)
            assert speculated[name].logprobs == heard.logprobs, (drafts, name)


def counts(drafts: int, draws: int, first_seed: int) -> dict[tuple[int, ...], int]:
    """How often each sequence of kept tokens comes, over `draws` requests that differ in seed."""
    sampling = Sampling(
        max_tokens=4, temperature=1.0, top_k=3, presence_penalty=1.5, frequency_penalty=0.5,
        repetition_penalty=1.4, ignore_eos=True,
    )  # fmt: skip
    engine = hashed_engine(Limits(draft_tokens=drafts, waiting_max=10_000))
    starts = [
        Start(
            request=str(seed),
            tokens=PROMPT,
            sampling=msgspec.structs.replace(sampling, seed=seed),
        )
        for seed in range(first_seed, first_seed + draws)
    ]
    seen: dict[tuple[int, ...], int] = {}
    for heard in finish(engine, starts).values():
        key = tuple(heard.tokens)
        seen[key] = seen.get(key, 0) + 1
    return seen


def same_law(draws: int) -> float:
    """The chance that two samples, with and without drafts, differ as much as these by accident."""
    plain, speculated = counts(0, draws, 0), counts(3, draws, draws)
    keys = sorted(plain.keys() | speculated.keys())
    table = np.array([[side.get(key, 0) for key in keys] for side in (plain, speculated)])
    common = table[:, table.sum(0) >= 10]
    rare = table[:, table.sum(0) < 10].sum(1, keepdims=True)
    cells = np.concatenate([common, rare], 1)
    return float(chi2_contingency(cells[:, cells.sum(0) > 0]).pvalue)


def test_penalised_samples_have_one_law_with_and_without_drafts() -> None:
    chance = same_law(2500)
    print(f"p = {chance:.3g}")
    assert chance > 1e-6


def test_penalties_that_forget_the_drafts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Request.ask

    def forgetful(self: Request, drafts: list[int], *mask: Any) -> object:
        asked = right(self, drafts, *mask)
        known = self.tokens[self.prompt_length : self.length].tolist()
        fields = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
        return type(asked)(**(fields | {"output": tuple(known)}))

    monkeypatch.setattr(Request, "ask", forgetful)
    chance = same_law(2500)
    print(f"p = {chance:.3g}")
    assert chance < 1e-6
