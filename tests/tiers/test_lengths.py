"""D15 at its bounds: a request that passes 2**15, 2**16 or 2**17 positions spoils nobody's drafts,
nor its own, though its prefix has been to a tier and back."""

from __future__ import annotations

import numpy as np
import pytest

from stanchion.core.messages import Start
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from tests.engine.rig import hashed_engine
from tests.tiers.rig import Still, asks, prompt, run_all, tiers_of

SHORT = 20


def records(engine: Engine, still: Still, starts: list[Start]) -> list[object]:
    said = run_all(engine, still, starts)
    return [said[one.request].answer for one in starts]


def engine_for(length: int) -> tuple[Engine, Still]:
    still, pages = Still(), length // 16 + 200
    plan = TierPlan(pages, queue=still, sleep=still.stall)
    limits = Limits(chunk_tokens=1 << 15)
    return hashed_engine(limits, pages, tiers=plan), still


@pytest.mark.parametrize(
    "length", [1 << 15, *(pytest.param(1 << at, marks=pytest.mark.soak) for at in (16, 17))]
)
def test_no_length_spoils_the_drafts(length: int) -> None:
    engine, still = engine_for(length)
    tokens = np.random.default_rng(length).integers(32, 127, length).tolist()
    before = records(engine, still, [asks(f"a{at}", prompt(at, 40), 16) for at in range(SHORT)])
    first: list[object] = []
    for name in ("cold", "lifted"):
        every = [asks(f"{name} {more}", tokens[: length - 8 + more], 14) for more in (0, 1, 2, 8)]
        said = [records(engine, still, [one])[0] for one in every]
        assert not first or said == first, "what came back from the host is what left for it"
        first = said
        engine.tree.flush()
    assert tiers_of(engine).counters.lifted >= length // 16
    after = records(engine, still, [asks(f"b{at}", prompt(at, 40), 16) for at in range(SHORT)])
    assert after == before
    assert engine.audit() == []
