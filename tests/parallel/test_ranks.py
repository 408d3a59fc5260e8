"""Several ranks answer as one does, and keep the rows that one keeps (faults D28 and D29).

The whole matrix is in soak; a covering part of it is here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from stanchion.cli.settings import model_folder
from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.engine.assemble import Parts, assemble
from stanchion.engine.ranks import FEW
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.schema import Door
from stanchion.kv.tiers import Policy
from stanchion.model.hashed import END_TOKEN, HashModel
from stanchion.model.load import load_glm
from stanchion.model.text import Model
from stanchion.parallel.split import SPLITS, Split
from stanchion.sim.choices import seeded
from tests.engine.rig import Heard, finish, late, solo, storm, wrong
from tests.parallel.rig import kept, ranked

PAGE = 16
LIMITS = Limits(draft_tokens=3, chunk_tokens=256)


@dataclass(frozen=True)
class Case:
    ranks: int
    split: Split
    layer_split: bool
    top_k: int | None
    few: int = FEW  # 0: no pass is computed by every rank


def lengths(ranks: int) -> list[int]:
    return sorted({1, 2, ranks, ranks + 1, 2 * ranks - 1, PAGE - 1, PAGE, PAGE + 1, 367})


def prompts(name: str, counts: list[int], base: int) -> list[Start]:
    sampling = Sampling(max_tokens=6, temperature=0.0)
    return [
        Start(
            request=f"{name}{at}",
            tokens=[32 + (base + 7 * at + place * place) % 95 for place in range(count)],
            sampling=sampling,
        )
        for at, count in enumerate(counts)
    ]


def on(starts: list[Start], name: str, hit: int | None) -> list[Start]:
    """Prompts that have their first `hit` tokens in common with earlier ones (all but one)."""
    made = []
    for at, start in enumerate(starts):
        shared = start.tokens[: len(start.tokens) - 1 if hit is None else hit]
        tail = [33 + (at + place) % 90 for place in range(1 if hit is None else 29)]
        made.append(Start(request=f"{name}{at}", tokens=shared + tail, sampling=start.sampling))
    return made


def rounds(case: Case) -> list[list[Start]]:
    """Ragged batches: all lengths together; then hits of nothing, a token, a page, all but one."""
    first = prompts("a", lengths(case.ranks), 3)
    return [
        first,
        on(first, "b", 0),
        on(first, "c", 1),
        on(first, "d", PAGE),
        on(first, "e", None),
    ]


def answers(parts: Parts, case: Case) -> dict[str, tuple[object, ...]]:
    said: dict[str, Heard] = {}
    for starts in rounds(case):
        said |= finish(parts.engine, starts)
    assert parts.engine.audit() == []
    return {name: heard.answer for name, heard in said.items()}


def check(case: Case) -> None:
    """Answers and draft records are those of one rank; so is every row of the pool."""
    alone = assemble(hash_model(case), LIMITS, 512, eos_ids=(END_TOKEN,), record_drafts=True)
    with torch.inference_mode():
        wanted = answers(alone, case)
    with ranked(
        hash_model(case), case.ranks, case.split, case.layer_split, LIMITS, few=case.few
    ) as (parts, others):
        assert answers(parts, case) == wanted
    stores = [parts.store, *(others.stores[rank] for rank in sorted(others.stores))]
    assert kept(stores) == kept([alone.store])
    if case.layer_split:
        layers = [one.layer for store in stores for one in store.schema.buffers]
        assert sorted(set(layers)) == list(range(4))
        assert len(layers) == len(alone.store.schema.buffers), "a layer is kept twice"


def hash_model(case: Case) -> Model:
    return HashModel(PAGE, True, case.top_k)


EVERY = [
    Case(ranks, split, layer_split, top_k, few)
    for ranks, split, layer_split, top_k, few in itertools.product(
        (1, 2, 3, 4), SPLITS, (False, True), (None, 24), (0, FEW)
    )
]
SOME = [
    Case(2, "zigzag", True, 24),
    Case(2, "interleaved", False, None, 0),
    Case(3, "contiguous", True, None, 0),
    Case(4, "zigzag", False, 24),
    Case(4, "interleaved", True, 24, 0),
    Case(1, "zigzag", True, None),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_ranks_answer_and_keep_as_one(case: Case) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize("case", [one for one in EVERY if one not in SOME], ids=str)
def test_ranks_answer_and_keep_as_one_everywhere(case: Case) -> None:
    check(case)


# ---- the old wrong ways ---------------------------------------------------------------------


def differs(failpoint: str) -> bool:
    """Does a second turn, on a prefix of many pages, answer otherwise than alone?"""
    (first,) = prompts("first", [300], 5)
    (second,) = on([first], "second", None)
    with ranked(
        HashModel(PAGE, True, 24), 2, layer_split=True, limits=LIMITS, failpoints=(failpoint,)
    ) as (parts, _):
        finish(parts.engine, [first])
        # What scratch still holds of other passes must not be the right thing by chance.
        finish(parts.engine, prompts("other", [310], 50))
        heard = finish(parts.engine, [second])[second.request]
    return heard.answer[:3] != solo(second, 3, 24).answer[:3]


@pytest.mark.parametrize("failpoint", ["scratch_refilled_under_reader", "index_broadcast_skipped"])
def test_the_old_wrong_ways_are_caught(failpoint: str) -> None:
    assert differs(failpoint)
    assert not differs("")


def test_a_slow_broadcast_changes_nothing() -> None:
    """The reader waits at its door, however late the pages are."""
    starts = prompts("a", [200], 9)
    more = on(starts, "b", None)
    with ranked(HashModel(PAGE, True, 24), 2, layer_split=True, limits=LIMITS, slow_s=0.02) as (
        parts,
        _,
    ):
        finish(parts.engine, starts)
        said = finish(parts.engine, more)
    for start in more:
        assert said[start.request].answer[:3] == solo(start, 3, 24).answer[:3]


# ---- host memory on every rank --------------------------------------------------------------


def lifted(failpoint: str, slow: tuple[int, Door] | None) -> Heard:
    """A second turn, whose prefix left the device and comes back from each rank's host memory."""
    (first,) = prompts("first", [300], 5)
    (second,) = on([first], "second", None)
    places = [(one.layer, one.door) for one in HashModel(PAGE, True).schema.buffers]
    delays = dict.fromkeys(places if slow is None else [slow], 0.02)
    with ranked(
        HashModel(PAGE, True, 24), 2, layer_split=True, limits=LIMITS, failpoints=(failpoint,),
        tiers=TierPlan(64, delays_s=delays, check="full"),
    ) as (parts, _):  # fmt: skip
        engine = parts.engine
        finish(engine, [first])
        finish(engine, prompts("other", [310], 50))
        while engine.copies:
            engine.step([])
        engine.tree.flush()
        finish(
            engine, prompts("third", [330], 70)
        )  # the pages hold other rows when the lift begins
        heard = finish(engine, [second])[second.request]
        assert engine.tiered is not None and engine.tiered.tiers.counters.lifted >= 18
        while engine.copies:
            engine.step([])
        assert engine.audit() == []
    return heard


def test_a_load_is_awaited_before_its_broadcast() -> None:
    (second,) = on(prompts("first", [300], 5), "second", None)
    right = solo(second, 3, 24).answer
    assert lifted("", None).answer[:3] == right[:3]
    assert lifted("broadcast_before_load", None).answer[:3] != right[:3]


@pytest.mark.parametrize(("layer", "door"), [(0, "index"), (1, "attend"), (3, "index")])
def test_whichever_door_is_late(layer: int, door: Door) -> None:
    (second,) = on(prompts("first", [300], 5), "second", None)
    assert lifted("", (layer, door)).answer[:3] == solo(second, 3, 24).answer[:3]


def test_what_differs_in_another_rank_s_host_memory_is_not_read() -> None:
    (first,) = prompts("first", [300], 5)
    (second,) = on([first], "second", None)
    plan = TierPlan(64, check="full")
    with ranked(HashModel(PAGE, True, 24), 2, layer_split=True, limits=LIMITS, tiers=plan) as (
        parts,
        others,
    ):
        engine = parts.engine
        finish(engine, [first])
        while engine.copies:
            engine.step([])
        engine.tree.flush()
        others.hosts[1][:] ^= 1
        heard = finish(engine, [second])[second.request]
        while engine.copies:
            engine.step([])
        assert engine.tiered is not None and engine.tiered.tiers.counters.bad_host > 0
        assert engine.audit() == []
    assert heard.answer[:3] == solo(second, 3, 24).answer[:3]


# ---- storms ---------------------------------------------------------------------------------


def one_storm(seed: int, requests: int, ranks: int, layer_split: bool, tiered: bool) -> None:
    """Aborts, preemption, prefixes and turns; what the seed decides is as in the engine's storm."""
    choices = seeded(seed)
    drafts, chunk = choices.pick(6), (1, 3, 17, 1 + choices.pick(64))[choices.pick(4)]
    top_k = None if choices.pick(2) else 48
    page_tokens = (1, 4, 16)[choices.pick(3)]
    pages = (16 + choices.pick(30)) * 16 // page_tokens
    limits = Limits(chunk_tokens=chunk, running_max=1 + choices.pick(24), draft_tokens=drafts)
    split = SPLITS[choices.pick(len(SPLITS))]
    model = HashModel(page_tokens, drafts > 0, top_k)
    policy: Policy = ("through", "back")[choices.pick(2)]
    plan = TierPlan(pages // 2, policy=policy, check="full") if tiered else None
    with ranked(model, ranks, split, layer_split, limits, pages, tiers=plan) as (parts, _):
        engine = late(parts.engine) if seed % 2 else parts.engine
        result = storm(engine, choices, requests)
        assert wrong(result, drafts, top_k) == [], f"replay with seed {seed}"
        while engine.copies:
            engine.step([])
        assert engine.audit() == [], f"replay with seed {seed}"


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("layer_split", [False, True])
def test_storms_over_ranks(layer_split: bool, tiered: bool) -> None:
    for seed in range(300, 302):
        one_storm(seed, 25, 2 + seed % 2, layer_split, tiered)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("layer_split", [False, True])
def test_thousands_of_requests_over_ranks(layer_split: bool, tiered: bool) -> None:
    for seed in range(3000, 3050):
        one_storm(seed, 50, 2 + seed % 2, layer_split, tiered)


# ---- the embedded model ---------------------------------------------------------------------


@pytest.mark.parametrize("layer_split", [False, True])
def test_no_bit_of_the_embedded_model_depends_on_ranks(layer_split: bool) -> None:
    """Its kernels give a row the same bits in any batch: so the text, the log-probabilities, the
    drafts and every row of the pool are those of one rank."""
    limits = Limits(draft_tokens=3, chunk_tokens=128)
    alone = assemble(embedded(), limits, 512, record_drafts=True)
    with torch.inference_mode():
        wanted = turns(alone)
    with ranked(embedded(), 2, layer_split=layer_split, limits=limits) as (parts, others):
        assert turns(parts) == wanted
    assert kept([parts.store, *others.stores.values()]) == kept([alone.store])


@pytest.mark.parametrize("layer_split", [False, True])
def test_narrow_rows_and_their_scales_travel_too(layer_split: bool) -> None:
    """bfloat16 rows, and fp8 index keys with a scale a row."""
    limits = Limits(draft_tokens=3, chunk_tokens=128)
    alone = assemble(embedded("bfloat16", "float8"), limits, 512, record_drafts=True)
    with torch.inference_mode():
        wanted = turns(alone)
    model = embedded("bfloat16", "float8")
    with ranked(model, 2, layer_split=layer_split, limits=limits) as (parts, others):
        assert turns(parts) == wanted
    assert kept([parts.store, *others.stores.values()]) == kept([alone.store])


def embedded(dtype: str = "float32", index_dtype: str = "same") -> Model:
    folder = model_folder("tiny")
    return load_glm(
        folder, PAGE, dtype=dtype, index_dtype=index_dtype, draft=True, deterministic=True
    )[0]


def turns(parts: Parts) -> dict[str, tuple[object, ...]]:
    """Prompts above the top-k of 128, and a second turn on each."""
    first = prompts("a", [1, 40, 333], 3)
    said = finish(parts.engine, first)
    said |= finish(parts.engine, on(first, "b", None))
    return {name: heard.answer for name, heard in said.items()}
