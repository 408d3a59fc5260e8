"""A prediction is worth as much as its hits and its fit: each is held against what it is of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stanchion.core.errors import Bug
from stanchion.core.messages import Start, Tokens
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.scheduler import Limits
from stanchion.model.hashed import HashModel
from stanchion.sim.perf import Cost, Simulated, Work

PAGE = 16


def prompts(count: int) -> list[list[int]]:
    """Turns of four sessions at random: a prefix of their own and a new end."""
    rng = np.random.default_rng(5)
    sessions = [rng.integers(32, 127, 200).tolist() for _ in range(4)]
    return [
        [*sessions[int(rng.integers(4))][: int(rng.integers(40, 200))], *rng.integers(32, 127, 30)]
        for _ in range(count)
    ]


def test_what_is_found_is_what_the_engine_finds() -> None:
    """Under eviction: to the token, for each prompt."""
    pages = 30
    simulated = Simulated(pages, PAGE, 64)
    limits = Limits(chunk_tokens=64, draft_tokens=0)
    engine = assemble(HashModel(PAGE, True), limits, pages).engine
    found = []
    with torch.inference_mode():
        for at, prompt in enumerate(prompts(60)):
            tokens = [int(one) for one in prompt]
            sampling = Sampling(max_tokens=1, temperature=0.0)
            heard = [Start(request=f"{at}", tokens=tokens, sampling=sampling)]
            while heard or engine.busy:
                said = engine.step(heard)
                found += [one.cached_tokens for one in said if isinstance(one, Tokens)]
                heard = []
    predicted = [simulated.ask(prompt) for prompt in prompts(60)]
    assert predicted == found
    assert 0 < sum(found) < sum(map(len, prompts(60)))


def test_a_fit_gives_back_what_things_cost() -> None:
    cost = Cost(0.02, 6e-5, 3e-8)
    works = [Work(1, 1000, 500_000), Work(3, 5000, 9_000_000), Work(2, 100, 4_000_000)]
    fitted = Cost.fitted(works, [cost.seconds(one) for one in works])
    assert fitted.seconds(Work(4, 9000, 7_000_000)) == pytest.approx(
        cost.seconds(Work(4, 9000, 7_000_000))
    )


def test_nothing_costs_less_than_nothing() -> None:
    works = [Work(1, 1000, 500_000), Work(1, 2000, 2_000_000), Work(1, 4000, 8_000_000)]
    fitted = Cost.fitted(works, [1.0, 2.0, 3.0])
    assert min(fitted.flight_s, fitted.token_s, fitted.pair_s) >= 0


def test_a_prompt_that_does_not_fit_is_not_predicted() -> None:
    with pytest.raises(Bug):
        Simulated(4, PAGE, 64).ask(list(range(100)))
