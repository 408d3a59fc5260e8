"""The embedded model over tiers: floats come back as they were, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stanchion.cli.settings import model_folder
from stanchion.core.messages import Start
from stanchion.engine.assemble import assemble
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.model.load import load_glm
from tests.engine.rig import finish
from tests.engine.test_embedded import starts
from tests.tiers.rig import cached, close, tiers_of


def engine_of(plan: TierPlan | None, pages: int, index_dtype: str = "same") -> Engine:
    model, name, revision, eos = load_glm(
        model_folder("tiny"), 16, draft=True, deterministic=True, index_dtype=index_dtype
    )
    return assemble(
        model, Limits(), pages, name, revision, eos, record_drafts=True, tiers=plan
    ).engine


def named(every: list[Start], name: str) -> list[Start]:
    return [
        Start(request=f"{name} {one.request}", tokens=one.tokens, sampling=one.sampling)
        for one in every
    ]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("index_dtype", ["same", "float8"])
def test_answers_after_a_restore_are_those_of_the_first_time(
    tier: str, index_dtype: str, tmp_path: Path
) -> None:
    """Text, log-probabilities and drafts; with float8 index keys their scales are buffers too."""
    every = [one for one in starts(0.0, 24) if len(one.tokens) > 32]
    alone = {}
    for one in every:
        cold = engine_of(None, 256, index_dtype)
        alone |= finish(cold, [one])
    plan = TierPlan(256, (tmp_path, 1 << 26) if tier == "disk" else None, prefetch="wait")
    engine = engine_of(replace(plan, check="full"), 256, index_dtype)
    finish(engine, named(every, "first"))
    engine.tree.flush()
    if tier == "disk":
        tiers_of(engine).host.flush()
    again = finish(engine, named(every, "again"))
    for one in every:
        heard = again[f"again {one.request}"]
        assert cached(heard) >= 32
        assert heard.answer == alone[one.request].answer
    assert bool(tiers_of(engine).counters.fetched) == (tier == "disk")
    assert engine.audit() == []
    close(engine)
