"""The failpoint that writes over KV: it strikes whom it should, and nobody else."""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.scheduler import Limits
from stanchion.model.hashed import END_TOKEN, HashModel

from .rig import finish, solo

LIMITS = Limits(running_max=8)


def apart(count: int) -> list[Start]:
    sampling = Sampling(max_tokens=72, temperature=0.0, ignore_eos=True)
    prompt = [32 + at % 90 for at in range(40)]
    return [
        Start(request=f"r{at}", tokens=[*prompt, 33 + at % 60], sampling=sampling, salt=f"{at}")
        for at in range(count)
    ]


@cache
def right() -> dict[str, list[int]]:
    """The answers of `STARTS`, which are the same with any salt."""
    return {one.request: solo(one, LIMITS.draft_tokens).tokens for one in STARTS}


STARTS = apart(60)


def wrong(starts: list[Start], share: float) -> set[str]:
    model = HashModel(16, LIMITS.draft_tokens > 0, None)
    failpoints = frozenset({"foreign_write"})
    engine = assemble(
        model, LIMITS, 4096, eos_ids=(END_TOKEN,), failpoints=failpoints, foreign_share=share
    ).engine
    heard = finish(engine, starts)
    assert engine.audit() == []
    return {name for name, one in heard.items() if one.tokens != right()[name]}


def test_the_share_that_is_asked_for_is_struck() -> None:
    assert wrong(STARTS, 0.0) == set()
    some, most = wrong(STARTS, 0.25), wrong(STARTS, 1.0)
    assert 5 <= len(some) <= 28, "60 draws of a quarter"
    assert some < most and len(most) > 50
    renamed = [replace(one, salt=f"other {one.salt}") for one in STARTS]
    assert wrong(renamed, 0.25) != some, "who is struck goes by name and salt"


def test_whoever_reads_a_damaged_prefix_later_reads_the_damage() -> None:
    """Alone a request is not struck: there is nobody whose rows could be written over its own. Of
    two, each may get its own rows back, from the other that was struck before."""
    wrong = 0
    for struck in apart(8):
        other = replace(struck, request="other", tokens=[60] * 41, salt="other")
        late = replace(struck, request="late", tokens=[*struck.tokens[:32], 90])
        model = HashModel(16, True, None)
        engine = assemble(
            model, LIMITS, 512, eos_ids=(END_TOKEN,), failpoints=frozenset({"foreign_write"})
        ).engine
        finish(engine, [struck, other])
        heard = finish(engine, [late])["late"]
        assert heard.ends[0].cached_tokens == 32
        wrong += heard.tokens != solo(late, LIMITS.draft_tokens).tokens
    assert wrong >= 2
