"""GLM-5, 5.1, 5.2 and 5.3 (`glm_moe_dsa`) as one text.

A layer: project the input once; write and read index keys, and choose rows, behind the door
`index`; write and read latents behind the door `attend`; then the experts. Queries are absorbed
into the latent space, so keys and values are never expanded. A layer that shares an index reuses
the last choice made. All activations are float32 in both dtypes.

The draft layer chooses anew in every iteration. A checkpoint with `index_share_for_mtp_iteration`
may so draft other tokens than with a shared choice; what verification accepts is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.core.errors import Bug, ConfigError, WeightsError
from stanchion.device.kernels.experts import Experts, Routing, experts
from stanchion.device.kernels.index_select import Context, Selection, select
from stanchion.device.kernels.linear import Floats, Packed, linear, linear_heads, pack, rms_norm
from stanchion.device.kernels.rows import index_rows, latent_rows, rope_heads
from stanchion.device.kernels.sparse_attention import sparse_attention
from stanchion.kv.schema import Buffer, Schema
from stanchion.model.config import GlmConfig
from stanchion.model.text import Cache, Found, Ragged, Rows
from stanchion.model.weights import DTYPES, Tensors, check_tensors

LATENT_EPSILON = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps is
FP8_HIGHEST = 448.0  # the largest float8_e4m3fn
ANGLE_BLOCK = 4096  # positions whose cosines are worked out at once


@dataclass(frozen=True)
class Indexer:
    key_gain: Floats  # (index width,)
    key_bias: Floats  # (index width,)


@dataclass(frozen=True)
class Layer:
    number: int
    input_gain: Floats  # (hidden,)
    inputs: Packed  # hidden -> query latent | latent | rope [| index key | index head weights]
    query_gain: Floats  # (query latent,)
    queries: Packed  # query latent -> heads * (nope | rope) [| index heads * index width]
    latent_gain: Floats  # (latent,)
    absorb: Packed  # nope -> latent
    expand: Packed  # latent -> value
    output: Packed  # heads * value -> hidden
    feed_gain: Floats  # (hidden,)
    feed: Experts
    indexer: Indexer | None  # None: shares the index of the last layer that has one


@dataclass(frozen=True)
class Draft:
    """What the draft layer has besides a layer: its input's norms and join, its output's norm."""

    token_gain: Floats  # (hidden,)
    hidden_gain: Floats  # (hidden,)
    join: Packed  # 2 * hidden -> hidden
    output_gain: Floats  # (hidden,)


@dataclass(frozen=True)
class Step:
    """What all layers of one pass share."""

    context: Context
    angles: Floats  # (queries, rope): cosines | sines
    rows: NDArray[np.int64]  # (queries,)
    cache: Cache


class Glm5:
    """The target and, if asked for, its draft layer.

    `dtype` is how weights and KV rows are kept; router, norms and the indexer's head weights stay
    float32, and so does the arithmetic. `index_keys` is how index keys are kept: "same" as the
    rest, or "fp8" with a scale a row. No bit of an output depends on the batch, the chunk or the
    pages, whatever `deterministic` says: there is no faster way to trade it for.

    Raises ConfigError for a dtype that is not kept, WeightsError for tensors that do not fit.
    """

    def __init__(
        self,
        config: GlmConfig,
        tensors: Tensors,
        page_tokens: int,
        dtype: torch.dtype = torch.float32,
        draft: bool = False,
        deterministic: bool = False,
        index_keys: str = "same",
    ) -> None:
        if dtype not in DTYPES.values():
            raise ConfigError(f"no model in {dtype}; there are: {', '.join(sorted(DTYPES))}")
        if index_keys not in ("same", "fp8"):
            raise ConfigError(f"index_keys: {index_keys!r} is neither 'same' nor 'fp8'")
        if draft and not config.num_nextn_predict_layers:
            raise WeightsError("config.json: num_nextn_predict_layers is 0: no draft layer")
        check_tensors(tensors, config, draft)
        self.config = config
        self.deterministic = True
        self.vocabulary = config.vocab_size
        self.context_max = config.max_position_embeddings
        self.hidden_width = config.hidden_size
        self.schema = schema(config, page_tokens, dtype, draft, index_keys)
        self._dtype = dtype
        reader = _Reader(config, tensors, dtype)
        self._embedding = tensors["model.embed_tokens.weight"].to(dtype)
        self._layers = [reader.layer(layer) for layer in range(config.num_hidden_layers)]
        self._norm = reader.gain("model.norm")
        self._head = reader.head()
        self._draft_layer = reader.layer(config.num_hidden_layers) if draft else None
        self._draft = reader.draft() if draft else None
        self._angles = Angles(config.qk_rope_head_dim, config.rope_theta)

    def forward(self, batch: Ragged, cache: Cache) -> Tensor:
        """The final hidden after the norm, float32 (queries, hidden)."""
        step = self._step(batch, cache)
        hidden = self._embed(batch)  # (queries, hidden)
        selection = None
        for layer in self._layers:
            hidden, selection = self._pass(layer, hidden, step, selection)
        return torch.from_numpy(rms_norm(hidden, self._norm, self.config.rms_norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden) -> float32 (rows, vocabulary)."""
        return torch.from_numpy(linear(_rows(hidden), self._head))

    def draft(self, batch: Ragged, hidden: Tensor, cache: Cache) -> Tensor:
        """The draft layer over (token p, hidden of p - 1): its hidden after its own norm."""
        if self._draft is None or self._draft_layer is None:
            raise Bug("a model without a draft layer was asked to draft")
        extra, epsilon = self._draft, self.config.rms_norm_eps
        token = rms_norm(self._embed(batch), extra.token_gain, epsilon)  # (queries, hidden)
        before = rms_norm(_rows(hidden), extra.hidden_gain, epsilon)  # (queries, hidden)
        joined = linear(np.concatenate([token, before], 1), extra.join)  # (queries, hidden)
        out, _ = self._pass(self._draft_layer, joined, self._step(batch, cache), None)
        return torch.from_numpy(rms_norm(out, extra.output_gain, epsilon))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The target's head reads the draft's hidden too."""
        return self.logits(hidden)

    def no_hidden(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.hidden_width)

    def _embed(self, batch: Ragged) -> Floats:
        tokens = torch.from_numpy(np.array(batch.tokens, np.int64))
        rows: Floats = self._embedding[tokens].float().numpy()
        return rows  # (queries, hidden)

    def _step(self, batch: Ragged, cache: Cache) -> Step:
        """Copies of the batch's arrays: kernels are compiled for plain, writable ones."""
        positions = np.array(batch.positions, np.int64)
        context = Context(
            positions,
            np.array(batch.starts, np.int64),
            np.array(batch.tables, np.int32),
            np.array(batch.table_starts, np.int64),
            cache.page_tokens,
        )
        rows = np.array(batch.rows, np.int64)
        return Step(context, self._angles.at(positions), rows, cache)

    def _pass(
        self, layer: Layer, hidden: Floats, step: Step, selection: Selection | None
    ) -> tuple[Floats, Selection]:
        epsilon = self.config.rms_norm_eps
        mixed = linear(
            hidden, layer.inputs, gain=layer.input_gain, epsilon=epsilon
        )  # (queries, inputs)
        queries = linear(mixed, layer.queries, gain=layer.query_gain, epsilon=LATENT_EPSILON)
        if layer.indexer is not None:
            selection = self._select(layer, layer.indexer, mixed, queries, step)
        if selection is None:
            raise Bug(f"layer {layer.number} shares an index that nobody made")
        attended = self._attend(layer, mixed, queries, step, selection)  # (queries, heads * value)
        hidden = linear(attended, layer.output, add=hidden)  # (queries, hidden)
        return experts(hidden, layer.feed_gain, epsilon, layer.feed), selection

    def _select(
        self, layer: Layer, indexer: Indexer, mixed: Floats, queries: Floats, step: Step
    ) -> Selection:
        """Write these queries' index keys, then let each query choose among its context's."""
        config = self.config
        key_at = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
        weights_at = key_at + config.index_head_dim
        queries_at = config.num_attention_heads * config.qk_head_dim
        with step.cache.writing(layer.number, "index") as view:
            if view.rows:
                _write_index(view.rows, mixed, key_at, indexer, step)

        def read(rows: Rows) -> Found:
            found = select(
                queries,
                queries_at,
                config.index_n_heads,
                mixed,
                weights_at,
                step.angles,
                rows["index_key"],
                rows.get("index_scale"),
                step.context,
                config.index_topk,
            )
            return found.positions, found.counts

        return Selection(*step.cache.ask(layer.number, "index", read))

    def _attend(
        self, layer: Layer, mixed: Floats, queries: Floats, step: Step, selection: Selection
    ) -> Floats:
        """Write these queries' latents, then attend the chosen rows: (queries, heads * value)."""
        config = self.config
        count, heads, latent = len(mixed), config.num_attention_heads, config.kv_lora_rank
        nope, each = config.qk_nope_head_dim, config.qk_head_dim
        with step.cache.writing(layer.number, "attend") as view:
            if view.rows:
                _write_latents(view.rows, mixed, config.q_lora_rank, layer.latent_gain, step)
        asking: Floats = np.empty((count, heads, latent + each - nope), np.float32)
        linear_heads(
            queries, heads, 0, each, layer.absorb, asking
        )  # [:, :, :latent] = nope @ key half of kv_b
        rope_heads(queries, nope, each, step.angles, asking, latent)  # [:, :, latent:]
        scale = each**-0.5

        def read(rows: Rows) -> Found:
            pool = rows["latent_rope"]
            return (sparse_attention(asking, pool, step.context, selection, latent, scale),)

        (found,) = step.cache.ask(layer.number, "attend", read)
        values: Floats = np.empty((count, heads, config.v_head_dim), np.float32)
        flat = found.reshape(count, heads * latent)
        linear_heads(flat, heads, 0, latent, layer.expand, values)
        return values.reshape(count, heads * config.v_head_dim)


class Angles:
    """Cosines and sines of positions, worked out in blocks of fixed size and kept."""

    def __init__(self, rope: int, theta: float) -> None:
        self._inverse = 1.0 / (theta ** (torch.arange(0, rope, 2, dtype=torch.float) / rope))
        self._table: Floats = np.empty((0, rope), np.float32)  # (positions, cosines | sines)

    def at(self, positions: NDArray[np.int64]) -> Floats:
        """(queries,) -> (queries, rope)."""
        highest = int(positions.max()) if len(positions) else 0
        while highest >= len(self._table):
            first = len(self._table)
            places = torch.arange(first, first + ANGLE_BLOCK).float()
            turns = places[:, None] * self._inverse  # (block, rope / 2)
            block = torch.cat([turns.cos(), turns.sin()], 1).numpy()
            self._table = np.concatenate([self._table, block])
        return self._table[positions]


def schema(
    config: GlmConfig, page_tokens: int, dtype: torch.dtype, draft: bool, index_keys: str
) -> Schema:
    """What the engine keeps of each token: latent and rope in every layer, index where owned."""
    kept = str(dtype).removeprefix("torch.")
    layers = config.num_hidden_layers + draft
    buffers: list[Buffer] = []
    for layer in range(layers):
        if config.owns_indexer(layer):
            key = "float8_e4m3fn" if index_keys == "fp8" else kept
            buffers.append(Buffer("index_key", layer, "index", key, config.index_head_dim))
            if index_keys == "fp8":
                buffers.append(Buffer("index_scale", layer, "index", "float32", 1))
        width = config.kv_lora_rank + config.qk_rope_head_dim
        buffers.append(Buffer("latent_rope", layer, "attend", kept, width))
    return Schema("glm_moe_dsa", page_tokens, layers, draft, tuple(buffers))


class _Reader:
    """Checkpoint tensors, by name, into the forms that the kernels read."""

    def __init__(self, config: GlmConfig, tensors: Tensors, dtype: torch.dtype) -> None:
        self._config = config
        self._tensors = tensors
        self._dtype = dtype

    def gain(self, name: str, kind: str = "weight") -> Floats:
        values: Floats = self._tensors[f"{name}.{kind}"].float().contiguous().numpy()
        return values

    def head(self) -> Packed:
        tied = self._config.tie_word_embeddings
        return _joined([self._weight("model.embed_tokens" if tied else "lm_head")])

    def draft(self) -> Draft:
        at = f"model.layers.{self._config.num_hidden_layers}"
        return Draft(
            token_gain=self.gain(f"{at}.enorm"),
            hidden_gain=self.gain(f"{at}.hnorm"),
            join=_joined([self._weight(f"{at}.eh_proj")]),
            output_gain=self.gain(f"{at}.shared_head.norm"),
        )

    def layer(self, number: int) -> Layer:
        config, at = self._config, f"model.layers.{number}"
        own = f"{at}.self_attn"
        inputs = [self._weight(f"{own}.q_a_proj"), self._weight(f"{own}.kv_a_proj_with_mqa")]
        queries = [self._weight(f"{own}.q_b_proj")]
        indexer = None
        if config.owns_indexer(number):
            inputs.append(self._weight(f"{own}.indexer.wk"))
            inputs.append(self._tensors[f"{own}.indexer.weights_proj.weight"].float())
            queries.append(self._weight(f"{own}.indexer.wq_b"))
            norm = f"{own}.indexer.k_norm"
            indexer = Indexer(self.gain(norm), self.gain(norm, "bias"))
        nope = config.qk_nope_head_dim
        both = self._weight(f"{own}.kv_b_proj").view(
            config.num_attention_heads, nope + config.v_head_dim, config.kv_lora_rank
        )  # (heads, nope + value, latent)
        return Layer(
            number=number,
            input_gain=self.gain(f"{at}.input_layernorm"),
            inputs=_joined(inputs),
            query_gain=self.gain(f"{own}.q_a_layernorm"),
            queries=_joined(queries),
            latent_gain=self.gain(f"{own}.kv_a_layernorm"),
            absorb=pack(both[:, :nope].transpose(1, 2)),  # (heads, latent, nope)
            expand=pack(both[:, nope:]),  # (heads, value, latent)
            output=_joined([self._weight(f"{own}.o_proj")]),
            feed_gain=self.gain(f"{at}.post_attention_layernorm"),
            feed=self._feed(number, f"{at}.mlp"),
            indexer=indexer,
        )

    def _feed(self, number: int, at: str) -> Experts:
        config = self._config
        router = torch.empty(0, config.hidden_size)
        bias = router[:, 0]
        how = Routing(chosen=0)
        pairs, always = [], 1
        if config.is_sparse(number):
            router = self._tensors[f"{at}.gate.weight"].float()
            bias = self._tensors[f"{at}.gate.e_score_correction_bias"].float()
            how = Routing(
                chosen=config.num_experts_per_tok,
                groups=config.n_group,
                groups_kept=config.topk_group,
                normalised=config.norm_topk_prob,
                scaling=config.routed_scaling_factor,
            )
            pairs = [self._expert(f"{at}.experts.{i}") for i in range(config.n_routed_experts)]
            always = config.n_shared_experts
            pairs += self._shared(f"{at}.shared_experts") if always else []
        else:
            pairs = [self._expert(at)]
        return Experts(
            pack(router),
            bias.contiguous().numpy(),
            pack(torch.stack([gate_up for gate_up, _ in pairs])),  # (experts, 2 * inner, hidden)
            pack(torch.stack([down for _, down in pairs])),  # (experts, hidden, inner)
            how,
            always,
        )

    def _expert(self, at: str) -> tuple[Tensor, Tensor]:
        gate, up = self._weight(f"{at}.gate_proj"), self._weight(f"{at}.up_proj")
        return torch.cat([gate, up]), self._weight(f"{at}.down_proj")

    def _shared(self, at: str) -> list[tuple[Tensor, Tensor]]:
        """n shared experts are stored as one of n times the width; it splits into n exactly."""
        gates = self._weight(f"{at}.gate_proj").chunk(self._config.n_shared_experts)
        ups = self._weight(f"{at}.up_proj").chunk(self._config.n_shared_experts)
        downs = self._weight(f"{at}.down_proj").chunk(self._config.n_shared_experts, 1)
        return [(torch.cat([gate, up]), down) for gate, up, down in zip(gates, ups, downs)]

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"].to(self._dtype)


def _joined(parts: list[Tensor]) -> Packed:
    """One product for weights that read the same input; in float32 if a part of it must be."""
    return pack(torch.cat(parts))


def _rows(hidden: Tensor) -> Floats:
    rows: Floats = hidden.float().contiguous().numpy()
    return rows


def _write_index(into: Rows, mixed: Floats, at: int, indexer: Indexer, step: Step) -> None:
    pool = into["index_key"]  # (pool rows, index width)
    direct = pool.dtype is torch.float32
    keys = pool.numpy() if direct else _fresh(mixed, pool)
    rows = step.rows if direct else np.arange(len(mixed))
    index_rows(mixed, at, indexer.key_gain, indexer.key_bias, step.angles, keys, rows)
    if not direct:
        _keep_index(into, step.rows, keys)


def _write_latents(into: Rows, mixed: Floats, at: int, gain: Floats, step: Step) -> None:
    pool = into["latent_rope"]  # (pool rows, latent + rope)
    direct = pool.dtype is torch.float32
    kept = pool.numpy() if direct else _fresh(mixed, pool)
    rows = step.rows if direct else np.arange(len(mixed))
    latent_rows(mixed, at, gain, LATENT_EPSILON, step.angles, kept, rows)
    if not direct:
        pool[torch.from_numpy(step.rows)] = torch.from_numpy(kept).to(pool.dtype)


def _fresh(mixed: Floats, pool: Tensor) -> Floats:
    return np.empty((len(mixed), pool.shape[1]), np.float32)


def _keep_index(into: Rows, rows: NDArray[np.int64], keys: Floats) -> None:
    """Index keys in a narrower dtype; fp8 has one scale a row, so that its largest fits."""
    at, values, pool = torch.from_numpy(rows), torch.from_numpy(keys), into["index_key"]
    if "index_scale" not in into:
        pool[at] = values.to(pool.dtype)
        return
    scale = values.abs().amax(1, keepdim=True) / FP8_HIGHEST  # (queries, 1)
    scale = torch.where(scale == 0, 1.0, scale)
    into["index_scale"][at] = scale
    pool.view(torch.uint8)[at] = (values / scale).to(pool.dtype).view(torch.uint8)
