"""No bit of an output depends on the batch: who else is in it, in which chunks, on which pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def alone(small_engine: Any, model: Any, tokens: list[int], chunk: int) -> tuple[Tensor, Tensor]:
    """A request by itself: its target rows and its draft rows."""
    engine = small_engine(model, pages=1500, seed=chunk)
    session = engine.start(len(tokens))
    target, drafted = [], []
    before = model.no_hidden(1)
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        hidden = engine.run([(session, part)])[0]
        drafted += engine.run_draft([(session, part, torch.cat([before, hidden])[:-1])])
        before = hidden[-1:]
        target.append(hidden)
    return torch.cat(target), torch.cat(drafted)


@pytest.mark.parametrize("sharing", [{}, {"index_topk_pattern": "FSSF"}])
def test_chunk_sizes_change_no_bit(
    sharing: dict[str, Any], make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair(**sharing)
    model = pair.ours(draft=True, deterministic=True)
    tokens = np.random.default_rng(1).integers(0, 96, 90).tolist()
    wanted = alone(small_engine, model, tokens, 90)
    for chunk in [1, 2, 3, 5, 7, 8, 16, 31, 64]:
        found = alone(small_engine, pair.ours(chunk, draft=True), tokens, chunk)
        assert torch.equal(found[0], wanted[0]), f"target, chunk {chunk}"
        assert torch.equal(found[1], wanted[1]), f"draft, chunk {chunk}"
        assert torch.equal(model.logits(found[0]), model.logits(wanted[0]))


def mixed_batches(seed: int, model: Any, small_engine: Any, requests: int, longest: int) -> None:
    """Random batches of decode steps, verify windows with rejected tails, and prefill chunks."""
    random = np.random.default_rng(seed)
    texts = [random.integers(0, 96, random.integers(2, longest)).tolist() for _ in range(requests)]
    wanted = [alone(small_engine, model, text, 64) for text in texts]
    engine = small_engine(model, pages=1500, seed=seed)
    sessions = [engine.start(len(text) + 8) for text in texts]
    before = [model.no_hidden(1) for _ in texts]
    while any(len(one.tokens) < len(text) for one, text in zip(sessions, texts)):
        open_ones = [i for i, text in enumerate(texts) if len(sessions[i].tokens) < len(text)]
        picked = [i for i in open_ones if random.random() < 0.7] or open_ones[:1]
        work, true = [], []
        for i in picked:
            at = len(sessions[i].tokens)
            part = texts[i][at : at + int(random.choice([1, 1, 4, 17, 40]))]
            true.append(len(part))
            wrong = random.integers(0, 96, int(random.choice([0, 0, 3]))).tolist()
            work.append((sessions[i], part + wrong))
        firsts = [len(sessions[i].tokens) for i in picked]
        rows = engine.run(work)
        drafting = []
        for i, first, count, hidden in zip(picked, firsts, true, rows):
            sessions[i].tokens = sessions[i].tokens[: first + count]  # the tail was rejected
            hidden = hidden[:count]
            assert torch.equal(hidden, wanted[i][0][first : first + count])
            given = torch.cat([before[i], hidden])
            drafting.append((sessions[i], texts[i][first : first + count], given[:-1]))
            before[i] = given[-1:]
        for i, first, drafted in zip(picked, firsts, engine.run_draft(drafting)):
            assert torch.equal(drafted, wanted[i][1][first : first + len(drafted)])


@pytest.mark.parametrize("seed", range(3))
def test_the_batch_changes_no_bit(
    seed: int, make_pair: Callable[..., Any], small_engine: Any
) -> None:
    model = make_pair(index_topk_pattern="FSSF").ours(draft=True, deterministic=True)
    mixed_batches(seed, model, small_engine, requests=5, longest=80)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_batches_change_no_bit(
    seed: int, make_pair: Callable[..., Any], small_engine: Any
) -> None:
    model = make_pair(seed % 3).ours(3 + seed % 6, draft=True, deterministic=True)
    mixed_batches(seed, model, small_engine, requests=9, longest=300)


@pytest.mark.parametrize("index_keys", ["same", "fp8"])
def test_narrow_rows_change_no_bit_either(
    index_keys: str, make_pair: Callable[..., Any], small_engine: Any
) -> None:
    model = make_pair().ours(draft=True, dtype=torch.bfloat16, index_keys=index_keys)
    mixed_batches(7, model, small_engine, requests=4, longest=60)


def test_a_rewritten_prefix_row_is_not_needed(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    """A query whose row is in a shared page writes to the null page and reads the shared row."""
    model = make_pair().ours()
    tokens = np.random.default_rng(4).integers(0, 96, 50).tolist()
    engine = small_engine(model)
    session = engine.start(len(tokens))
    rows = engine.run([(session, tokens)])[0]
    batch, cache = engine.batch([(session, 49, tokens[49:])])
    batch.rows[:] = 2  # of the null page
    assert torch.equal(model.forward(batch, cache), rows[49:])


def test_a_damaged_request_damages_no_other(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    """NaN in one request's rows reaches its own logits, and nobody else's bits."""
    pair = make_pair()
    model = pair.ours()
    for door, name in (("index", "index_key"), ("attend", "latent_rope")):
        engine = small_engine(model)
        texts = [np.random.default_rng(i).integers(0, 96, 60).tolist() for i in range(3)]
        sessions = [engine.start(70) for _ in texts]
        engine.run(list(zip(sessions, texts)))
        clean = engine.batch([(one, 60, [5, 6]) for one in sessions])
        wanted = model.forward(*clean).split(2)
        page = int(sessions[1].pin.pages[2])
        engine.store.behind(1, door)._value[name][page * 4 : page * 4 + 4] = float("nan")
        found = model.forward(*engine.batch([(one, 60, [5, 6]) for one in sessions])).split(2)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
        if door == "index":
            assert model.logits(found[1]).isnan().all()
