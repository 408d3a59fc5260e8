"""Logits equal transformers' GlmMoeDsaForCausalLM: whole, in chunks, on scattered pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stanchion.model.warm import warm_up

CLOSE = 1e-4

SHAPES: dict[str, dict[str, Any]] = {
    "every layer owns an index": {},
    "shared by frequency": {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    "shared by pattern": {"index_topk_pattern": "FSSF"},
    "dense layers only": {"first_k_dense_replace": 4},
    "two shared experts, grouped": {
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "five heads, weights not normalised": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "norm_topk_prob": False,
    },
    "twenty index heads": {"index_n_heads": 20},
    "latents of several tiles": {
        "kv_lora_rank": 88,
        "hidden_size": 72,
        "v_head_dim": 64,
        "num_attention_heads": 9,
        "num_key_value_heads": 9,
    },
}


def tokens_of(seed: int, count: int, vocabulary: int = 96) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
    return tokens


def their_logits(pair: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = pair.theirs(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [11, 75])
def test_logits_equal_the_reference(
    shape: str, length: int, make_pair: Callable[..., Any], small_engine: Any
) -> None:
    """11 tokens: below top-k, all rows are chosen; 75: above it, most are not."""
    pair = make_pair(**SHAPES[shape])
    tokens = tokens_of(length, length)
    wanted = their_logits(pair, tokens)
    assert wanted.std() > 0.3
    for page_tokens, chunks in [(4, [length]), (16, [7] * 11), (5, [1] * 6 + [length - 6])]:
        logits = small_engine(pair.ours(page_tokens)).logits(tokens, chunks)
        assert (logits - wanted).abs().max() < CLOSE


def test_sparse_and_dense_differ(make_pair: Callable[..., Any], small_engine: Any) -> None:
    """The selection matters in these tests: with a top-k over the context, logits are others."""
    pair = make_pair()
    tokens = tokens_of(3, 75)
    wide = make_pair(index_topk=512)
    sparse = small_engine(pair.ours()).logits(tokens, [75])
    dense = small_engine(wide.ours()).logits(tokens, [75])
    assert (sparse - dense).abs().max() > 0.1


def test_a_ragged_batch_equals_each_request_alone(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair()
    model = pair.ours()
    engine = small_engine(model)
    texts = [tokens_of(seed, length) for seed, length in enumerate([3, 40, 66, 19])]
    sessions = [engine.start(len(text)) for text in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for part in range(3):
        cuts = [(len(text) * part // 3, len(text) * (part + 1) // 3) for text in texts]
        work = [(one, text[a:b]) for one, text, (a, b) in zip(sessions, texts, cuts)]
        for kept, hidden in zip(rows, engine.run(work)):
            kept.append(hidden)
    for text, kept in zip(texts, rows):
        logits = model.logits(torch.cat(kept))
        assert (logits - their_logits(pair, text)).abs().max() < CLOSE


def test_an_empty_batch_is_an_empty_answer(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    model = make_pair().ours(draft=True)
    engine = small_engine(model)
    batch, cache = engine.batch([(engine.start(4), 0, [])])
    hidden = model.forward(batch, cache)
    assert hidden.shape == (0, 40) and model.logits(hidden).shape == (0, 96)
    assert model.draft(batch, hidden, cache).shape == (0, 40)


def test_a_warm_model_answers_the_same(make_pair: Callable[..., Any], small_engine: Any) -> None:
    tokens = tokens_of(6, 20)
    for changes in ({}, {"index_topk": 4096}):
        model = make_pair(**changes).ours(draft=True)
        cold = small_engine(model).logits(tokens, [20])
        warm_up(model)
        assert torch.equal(small_engine(model).logits(tokens, [20]), cold)


def test_tied_embeddings(make_pair: Callable[..., Any], small_engine: Any) -> None:
    pair = make_pair(tie_word_embeddings=True)
    tokens = tokens_of(5, 30)
    logits = small_engine(pair.ours()).logits(tokens, [30])
    assert (logits - their_logits(pair, tokens)).abs().max() < CLOSE


def test_bfloat16_is_near_where_everything_is_chosen(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    """Beyond top-k a rounding can change the choice, so the comparison stays below it."""
    pair = make_pair()
    tokens = tokens_of(7, 16)
    wanted = their_logits(pair, tokens)
    logits = small_engine(pair.ours(dtype=torch.bfloat16)).logits(tokens, [5, 11])
    assert logits.dtype is torch.float32
    assert (logits - wanted).abs().max() < 0.3
    assert (logits - wanted).abs().mean() < 0.03


def test_bfloat16_runs_over_long_contexts(make_pair: Callable[..., Any], small_engine: Any) -> None:
    pair = make_pair()
    tokens = tokens_of(8, 75)
    engine = small_engine(pair.ours(dtype=torch.bfloat16, index_keys="fp8"))
    assert engine.logits(tokens, [40, 35]).isfinite().all()


def test_fp8_index_keys_are_near(make_pair: Callable[..., Any], small_engine: Any) -> None:
    """Exact below top-k, where nothing is chosen by score; beyond it, nearer than no choice."""
    pair = make_pair()
    tokens = tokens_of(9, 75)
    wanted = their_logits(pair, tokens)
    logits = small_engine(pair.ours(index_keys="fp8")).logits(tokens, [75])
    assert (logits[:16] - wanted[:16]).abs().max() < CLOSE
    dense = small_engine(make_pair(index_topk=512).ours()).logits(tokens, [75])
    assert (logits - wanted).abs().mean() < 0.5 * (dense - wanted).abs().mean()
