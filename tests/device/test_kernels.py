"""Each fast kernel equals its plain reference: any shape, ragged, on scattered pages, with ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stanchion.device.kernels.experts import (
    Experts,
    Routing,
    experts,
    experts_plain,
    route,
    route_plain,
)
from stanchion.device.kernels.index_select import Context, Selection, select, select_plain
from stanchion.device.kernels.lanes import compiled, exponential
from stanchion.device.kernels.linear import (
    linear,
    linear_heads,
    linear_heads_plain,
    linear_plain,
    pack,
    rms_norm,
    rms_norm_plain,
)
from stanchion.device.kernels.rows import (
    index_rows,
    index_rows_plain,
    latent_rows,
    latent_rows_plain,
    rope_heads,
    rope_plain,
)
from stanchion.device.kernels.sparse_attention import sparse_attention, sparse_attention_plain

CLOSE = 2e-5
few = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**16)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Any, wanted: Tensor) -> bool:
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    return bool((torch.as_tensor(found) - wanted).abs().max() < CLOSE * scale)


@few
@given(seeds, st.integers(1, 20), st.integers(1, 90), st.integers(1, 140), st.booleans())
def test_linear(seed: int, rows: int, inputs: int, outputs: int, dressed: bool) -> None:
    x, weight = noise(seed, rows, inputs + 5), noise(seed + 1, outputs, inputs)
    gain = noise(seed + 2, inputs) if dressed else None
    add = noise(seed + 3, rows, outputs) if dressed else None
    wanted = linear_plain(x, weight, 3, gain, 1e-5, add)
    bare = [None if one is None else one.numpy() for one in (gain, add)]
    found = linear(x.numpy(), pack(weight), 3, bare[0], 1e-5, bare[1])
    assert near(found, wanted)
    one = None if bare[1] is None else bare[1][-1:]
    assert np.array_equal(linear(x[-1:].numpy(), pack(weight), 3, bare[0], 1e-5, one), found[-1:])


def test_linear_with_a_bfloat16_weight() -> None:
    """The weight is widened exactly: the same bits as with its float32 copy."""
    x, weight = noise(0, 9, 50), noise(1, 100, 50).bfloat16()
    found = linear(x.numpy(), pack(weight))
    assert np.array_equal(found, linear(x.numpy(), pack(weight.float())))


def test_linear_over_several_blocks_of_rows() -> None:
    x, weight, gain = noise(0, 700, 40), noise(1, 70, 40), noise(2, 40)
    found = linear(x.numpy(), pack(weight), 0, gain.numpy(), 1e-6)
    assert near(found, linear_plain(x, weight, 0, gain, 1e-6))
    assert near(linear(x.numpy(), pack(weight)), linear_plain(x, weight))


@few
@given(seeds, st.integers(1, 9), st.integers(1, 5), st.integers(1, 70), st.integers(1, 80))
def test_linear_heads(seed: int, rows: int, heads: int, inputs: int, outputs: int) -> None:
    stride = inputs + 3
    x, weight = noise(seed, rows, 4 + heads * stride), noise(seed + 1, heads, outputs, inputs)
    out = np.empty((rows, heads, outputs + 2), np.float32)
    linear_heads(x.numpy(), heads, 4, stride, pack(weight), out)
    assert near(out[:, :, :outputs], linear_heads_plain(x, heads, 4, stride, weight))


@few
@given(seeds, st.integers(1, 9), st.integers(1, 80))
def test_rms_norm(seed: int, rows: int, width: int) -> None:
    x, gain = noise(seed, rows, width), noise(seed + 1, width)
    assert near(rms_norm(x.numpy(), gain.numpy(), 1e-5), rms_norm_plain(x, gain, 1e-5))


@few
@given(seeds, st.integers(1, 9), st.integers(1, 8), st.integers(1, 40))
def test_rows_are_written_where_the_batch_says(
    seed: int, queries: int, half: int, width: int
) -> None:
    rope = 2 * half
    mixed, angles = noise(seed, queries, 7 + width + rope), noise(seed + 1, queries, rope)
    gain, bias = noise(seed + 2, width), noise(seed + 3, width)
    rows = np.random.default_rng(seed).permutation(30)[:queries]
    pool = np.full((30, width + rope), 9.0, np.float32)
    latent_rows(mixed.numpy(), 5, gain.numpy(), 1e-6, angles.numpy(), pool, rows)
    assert near(pool[rows], latent_rows_plain(mixed, 5, gain, 1e-6, angles))
    assert (np.delete(pool, rows, 0) == 9.0).all()
    if width >= rope:
        pool = np.full((30, width), 9.0, np.float32)
        bare = mixed.numpy()
        index_rows(bare, 5, gain.numpy(), bias.numpy(), angles.numpy(), pool, rows)
        assert near(pool[rows], index_rows_plain(mixed, 5, gain, bias, angles))
        assert (np.delete(pool, rows, 0) == 9.0).all()


def test_rope_of_heads() -> None:
    x, angles = noise(0, 6, 3 + 4 * 15), noise(1, 6, 10)
    out = np.zeros((6, 4, 17), np.float32)
    rope_heads(x.numpy(), 3 + 5, 15, angles.numpy(), out, 7)
    wanted = rope_plain(x[:, 3:].view(6, 4, 15)[:, :, 5:], angles)
    assert near(out[:, :, 7:], wanted)
    assert not out[:, :, :7].any()


def make_context(
    seed: int, lengths: list[tuple[int, int]], page_tokens: int
) -> tuple[Context, int]:
    """(rows before the queries, queries) a request, on scattered pages; how many rows in all."""
    random = np.random.default_rng(seed)
    sizes = [-(-(before + count) // page_tokens) for before, count in lengths]
    pages = random.permutation(sum(sizes) + 3)[: sum(sizes)].astype(np.int32)
    positions = [np.arange(before, before + count) for before, count in lengths]
    starts = np.cumsum([0] + [count for _, count in lengths])
    context = Context(np.concatenate(positions), starts, pages, np.cumsum([0, *sizes]), page_tokens)
    return context, (sum(sizes) + 3) * page_tokens


def chosen(selection: Selection) -> list[list[int]]:
    return [
        row[:count].tolist() for row, count in zip(selection.positions, selection.counts.tolist())
    ]


requests = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 12)), min_size=1, max_size=4)


def narrow(keys: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    if dtype == "fp8":
        scales = keys.abs().amax(1, keepdim=True) / 448.0
        return (keys / scales).to(torch.float8_e4m3fn), scales
    return keys.to(getattr(torch, dtype)), None


@few
@given(
    seeds,
    requests,
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 3, 8, 13, 16, 32, 40]),
    st.integers(1, 40),
    st.sampled_from(["float32", "bfloat16", "fp8"]),
)
def test_selection(
    seed: int, lengths: list[tuple[int, int]], page_tokens: int, heads: int, top: int, dtype: str
) -> None:
    context, rows = make_context(seed, lengths, page_tokens)
    queries, width, rope = len(context.positions), 20, 8
    mixed, weights = noise(seed, queries, 3 + heads * width), noise(seed + 1, queries, heads + 2)
    angles = noise(seed + 2, queries, rope)
    keys, scales = narrow(noise(seed + 3, rows, width), dtype)
    found = select(
        mixed.numpy(), 3, heads, weights.numpy(), 2, angles.numpy(), keys, scales, context, top
    )
    wanted = select_plain(mixed, 3, heads, weights, 2, angles, keys, scales, context, top)
    assert chosen(found) == wanted


@few
@given(seeds, requests, st.integers(1, 30))
def test_equal_scores_go_to_the_lowest_positions(
    seed: int, lengths: list[tuple[int, int]], top: int
) -> None:
    """Small whole numbers make exact ties in plenty, and zeros of either sign."""
    context, rows = make_context(seed, lengths, 4)
    queries, heads, width = len(context.positions), 4, 4
    random = np.random.default_rng(seed)
    mixed = torch.tensor(random.integers(-1, 2, (queries, heads * width))).float()
    weights = torch.tensor(random.integers(-1, 2, (queries, heads))).float()
    keys = torch.tensor(random.integers(-1, 2, (rows, width))).float()
    angles = torch.cat([torch.ones(queries, 1), torch.zeros(queries, 1)], 1)
    found = select(
        mixed.numpy(), 0, heads, weights.numpy(), 0, angles.numpy(), keys, None, context, top
    )
    wanted = select_plain(mixed, 0, heads, weights, 0, angles, keys, None, context, top)
    assert chosen(found) == wanted


def test_selection_over_many_queries_and_blocks() -> None:
    context, rows = make_context(1, [(1000, 150), (0, 90)], 16)
    queries, heads, width, top = 240, 8, 16, 100
    mixed, weights = noise(1, queries, heads * width), noise(2, queries, heads)
    angles, keys = noise(3, queries, 8), noise(4, rows, width)
    found = select(
        mixed.numpy(), 0, heads, weights.numpy(), 0, angles.numpy(), keys, None, context, top
    )
    wanted = select_plain(mixed, 0, heads, weights, 0, angles, keys, None, context, top)
    assert chosen(found) == wanted


def test_a_damaged_score_selects_nothing_and_attention_over_nothing_is_nan() -> None:
    context, rows = make_context(5, [(50, 1), (50, 1)], 4)
    keys = noise(1, rows, 8)
    row = context.tables[2] * 4 + 1  # position 9 of the first request
    keys[row] = torch.nan
    found = select(
        noise(2, 2, 16).numpy(),
        0,
        2,
        noise(3, 2, 2).numpy(),
        0,
        noise(4, 2, 4).numpy(),
        keys,
        None,
        context,
        10,
    )
    assert found.counts.tolist() == [0, 10]
    out = sparse_attention(noise(5, 2, 3, 12).numpy(), noise(6, rows, 12), context, found, 8, 0.3)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@few
@given(
    seeds,
    requests,
    st.sampled_from([1, 3, 16]),
    st.integers(1, 21),
    st.sampled_from([1, 8, 16, 23, 64, 100]),
    st.integers(1, 40),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_sparse_attention(
    seed: int,
    lengths: list[tuple[int, int]],
    page_tokens: int,
    heads: int,
    latent: int,
    top: int,
    dtype: str,
) -> None:
    context, rows = make_context(seed, lengths, page_tokens)
    random = np.random.default_rng(seed)
    picks = [
        sorted(random.permutation(place + 1)[:top].tolist()) for place in context.positions.tolist()
    ]
    positions = np.zeros((len(picks), max(len(one) for one in picks)), np.int32)
    for query, one in enumerate(picks):
        positions[query, : len(one)] = one
    selection = Selection(positions, np.array([len(one) for one in picks], np.int32))
    width = latent + 6
    queries, pool = noise(seed, len(picks), heads, width), noise(seed + 1, rows, width)
    pool = pool.to(getattr(torch, dtype))
    wanted = sparse_attention_plain(queries, pool, context, picks, latent, 0.4)
    assert near(sparse_attention(queries.numpy(), pool, context, selection, latent, 0.4), wanted)


def test_absorbed_equals_expanded() -> None:
    """Queries taken into the latent space, against keys and values taken out of it."""
    context, rows = make_context(3, [(20, 4), (0, 3)], 4)
    heads, nope, rope, latent, value = 3, 12, 6, 24, 10
    asked = noise(1, 7, heads * (nope + rope))
    pool, both = noise(2, rows, latent + rope), noise(3, heads, nope + value, latent)
    selection = select(
        np.zeros((7, 4), np.float32), 0, 1, np.zeros((7, 1), np.float32), 0,
        np.zeros((7, 4), np.float32), torch.zeros(rows, 4), None, context, 100,
    )  # fmt: skip
    queries = np.empty((7, heads, latent + rope), np.float32)
    absorb = pack(both[:, :nope].transpose(1, 2))
    linear_heads(asked.numpy(), heads, 0, nope + rope, absorb, queries)
    queries[:, :, latent:] = asked.view(7, heads, -1)[:, :, nope:].numpy()
    found = sparse_attention(queries, pool, context, selection, latent, 0.3)
    out = np.empty((7, heads, value), np.float32)
    linear_heads(found.reshape(7, -1), heads, 0, latent, pack(both[:, nope:]), out)
    expanded = torch.einsum("rl,hdl->rhd", pool[:, :latent], both)
    key = torch.cat([expanded[:, :, :nope], pool[:, None, latent:].expand(-1, heads, -1)], 2)
    for request in range(2):
        table = context.tables[context.table_starts[request] : context.table_starts[request + 1]]
        for query in range(context.starts[request], context.starts[request + 1]):
            places = np.arange(context.positions[query] + 1)
            at = torch.from_numpy(table[places // 4].astype(np.int64) * 4 + places % 4)
            share = torch.einsum("hd,rhd->hr", asked[query].view(heads, -1), key[at]) * 0.3
            wanted = torch.einsum("hr,rhd->hd", share.softmax(1), expanded[at][:, :, nope:])
            assert near(out[query], wanted)


def test_attention_survives_scores_far_apart() -> None:
    context, rows = make_context(0, [(30, 1)], 4)
    queries, pool = 200 * noise(1, 1, 2, 12), noise(2, rows, 12)
    everything = Selection(np.arange(31, dtype=np.int32)[None], np.array([31], np.int32))
    wanted = sparse_attention_plain(queries, pool, context, [list(range(31))], 8, 1.0)
    assert near(sparse_attention(queries.numpy(), pool, context, everything, 8, 1.0), wanted)


@few
@given(
    seeds,
    st.integers(1, 12),
    st.sampled_from([(4, 1, 1), (8, 4, 2), (6, 1, 1), (12, 3, 2)]),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
)
def test_experts(
    seed: int, rows: int, grouping: tuple[int, int, int], picked: int, always: int, even: bool
) -> None:
    routed, groups, kept = grouping
    how = Routing(min(picked, routed // groups * kept), groups, kept, even, 1.5)
    hidden, inner = 20, 12
    x, gain = noise(seed, rows, hidden), noise(seed + 1, hidden)
    router, bias = noise(seed + 2, routed, hidden), 0.2 * noise(seed + 3, routed)
    gate_up = noise(seed + 4, routed + always, 2 * inner, hidden)
    down = noise(seed + 5, routed + always, hidden, inner)
    packed = Experts(pack(router), bias.numpy(), pack(gate_up), pack(down), how, always)
    wanted = experts_plain(x, gain, 1e-5, router, bias, gate_up, down, how, always)
    found = experts(x.numpy(), gain.numpy(), 1e-5, packed)
    assert near(found, wanted)
    assert np.array_equal(experts(x[-1:].numpy(), gain.numpy(), 1e-5, packed), found[-1:])


def test_a_dense_layer_is_one_expert_that_everyone_chooses() -> None:
    x, gain = noise(0, 500, 20), noise(1, 20)
    gate_up, down = noise(2, 1, 60, 20), noise(3, 1, 20, 30)
    none, how = torch.empty(0, 20), Routing(0)
    packed = Experts(pack(none), none[:, 0].numpy(), pack(gate_up), pack(down), how, 1)
    wanted = experts_plain(x, gain, 1e-5, none, none[:, 0], gate_up, down, how, 1)
    assert near(experts(x.numpy(), gain.numpy(), 1e-5, packed), wanted)


def test_equal_experts_go_to_the_lowest_index() -> None:
    picks, weights = route(np.zeros((2, 6), np.float32), np.zeros(6, np.float32), Routing(3))
    assert picks.tolist() == [[0, 1, 2]] * 2
    assert np.allclose(weights, 1 / 3)


@few
@given(seeds, st.sampled_from([(8, 1, 1), (8, 2, 1), (8, 8, 3), (12, 4, 2)]), st.integers(1, 3))
def test_routing(seed: int, grouping: tuple[int, int, int], picked: int) -> None:
    routed, groups, kept = grouping
    how = Routing(picked, groups, kept, True, 2.5)
    logits, bias = noise(seed, 7, routed), 0.3 * noise(seed + 1, routed)
    picks, weights = route(logits.numpy(), bias.numpy(), how)
    found = torch.zeros(7, routed).scatter(1, torch.from_numpy(picks), torch.from_numpy(weights))
    assert near(found, route_plain(logits, bias, how))


def test_a_damaged_token_damages_no_other() -> None:
    x = noise(0, 9, 20)
    x[4, 3] = torch.nan
    router, gate_up, down = noise(1, 6, 20), noise(2, 7, 24, 20), noise(3, 7, 20, 12)
    packed = Experts(
        pack(router), np.zeros(6, np.float32), pack(gate_up), pack(down), Routing(2), 1
    )
    out = experts(x.numpy(), np.ones(20, np.float32), 1e-5, packed)
    assert np.isnan(out[4]).all() and np.isfinite(np.delete(out, 4, 0)).all()


@compiled
def _exponentials(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = exponential(x[i])


def test_the_exponential() -> None:
    x = np.linspace(-86, 87, 30001, dtype=np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 1.5e-7
    odd = np.array([np.nan, -np.inf, 0.0], np.float32)
    _exponentials(odd, odd)
    assert np.isnan(odd[0]) and 0 <= odd[1] < 1e-37 and odd[2] == 1.0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13])
def test_no_row_depends_on_the_others(rows: int) -> None:
    """Bits, for every way of cutting rows into tiles."""
    x, weight = noise(9, 13, 200), pack(noise(8, 130, 200))
    whole = linear(x.numpy(), weight)
    assert np.array_equal(linear(x[:rows].numpy(), weight), whole[:rows])
