"""What config.json says of a `glm_moe_dsa` checkpoint, checked before a byte of weights is read.

Field names are the checkpoint's own. Anything that would change the arithmetic and that this text
does not compute is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from stanchion.core.errors import WeightsError

IndexerType = Literal["full", "shared"]
MlpType = Literal["dense", "sparse"]
Json = Mapping[str, object]


@dataclass(frozen=True)
class GlmConfig:
    """Shapes and switches of one checkpoint. Every list has an entry a target layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    index_share_for_mtp_iteration: bool
    indexer_types: tuple[IndexerType, ...]
    mlp_layer_types: tuple[MlpType, ...]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def owns_indexer(self, layer: int) -> bool:
        """The draft layer, number `num_hidden_layers`, always has its own."""
        return layer >= self.num_hidden_layers or self.indexer_types[layer] == "full"

    def is_sparse(self, layer: int) -> bool:
        """The draft layer is a mixture, as the last layers are."""
        return layer >= self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"


def read_config(directory: Path) -> GlmConfig:
    """Raises WeightsError: no such file, not JSON, or a field that `parse_config` refuses."""
    path = directory / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: {error}") from error
    if not isinstance(said, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return parse_config(said)


def parse_config(said: Json) -> GlmConfig:
    """Missing fields take transformers' defaults for GLM-5. Raises WeightsError with the field."""
    fields = _Fields(said)
    if said.get("model_type") != "glm_moe_dsa":
        raise WeightsError(f"config.json: model_type {said.get('model_type')!r} is not glm_moe_dsa")
    for name, wanted in REFUSED_UNLESS.items():
        if said.get(name, wanted) != wanted:
            raise WeightsError(
                f"config.json: {name} {said[name]!r} is not supported, {wanted!r} is"
            )
    layers = fields.count("num_hidden_layers", 78)
    config = GlmConfig(
        vocab_size=fields.count("vocab_size", 154880),
        hidden_size=fields.count("hidden_size", 6144),
        intermediate_size=fields.count("intermediate_size", 12288),
        moe_intermediate_size=fields.count("moe_intermediate_size", 2048),
        num_hidden_layers=layers,
        num_attention_heads=fields.count("num_attention_heads", 64),
        n_shared_experts=fields.count("n_shared_experts", 1, least=0),
        n_routed_experts=fields.count("num_experts", fields.count("n_routed_experts", 256)),
        num_experts_per_tok=fields.count("num_experts_per_tok", 8),
        n_group=fields.count("n_group", 1),
        topk_group=fields.count("topk_group", 1),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5),
        q_lora_rank=fields.count("q_lora_rank", 2048),
        kv_lora_rank=fields.count("kv_lora_rank", 512),
        qk_nope_head_dim=fields.count("qk_nope_head_dim", 192),
        qk_rope_head_dim=fields.count("qk_rope_head_dim", 64),
        v_head_dim=fields.count("v_head_dim", 256),
        index_n_heads=fields.count("index_n_heads", 32),
        index_head_dim=fields.count("index_head_dim", 128),
        index_topk=fields.count("index_topk", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope_theta=_rope_theta(said),
        max_position_embeddings=fields.count("max_position_embeddings", 202752),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        num_nextn_predict_layers=fields.count("num_nextn_predict_layers", 0, least=0),
        index_share_for_mtp_iteration=fields.flag("index_share_for_mtp_iteration", False),
        indexer_types=_indexer_types(said, fields, layers),
        mlp_layer_types=_mlp_types(said, fields, layers),
    )
    _check(config)
    return config


REFUSED_UNLESS: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


class _Fields:
    """Typed reading of one JSON object."""

    def __init__(self, said: Json) -> None:
        self._said = said

    def count(self, name: str, default: int, least: int = 1) -> int:
        value = self._said.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise WeightsError(f"config.json: {name} must be a whole number >= {least}: {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._said.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise WeightsError(f"config.json: {name} must be a number > 0: {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._said.get(name, default)
        if not isinstance(value, bool):
            raise WeightsError(f"config.json: {name} must be true or false: {value!r}")
        return value

    def words(self, name: str, allowed: tuple[str, ...], layers: int) -> list[str] | None:
        value = self._said.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(one not in allowed for one in value):
            raise WeightsError(f"config.json: {name} must list {' or '.join(allowed)}: {value!r}")
        if len(value) not in (layers, layers + 1):  # some checkpoints name the draft layer too
            raise WeightsError(f"config.json: {name} has {len(value)} entries for {layers} layers")
        return [str(one) for one in value]


def _rope_theta(said: Json) -> float:
    """`rope_parameters` in new configs, `rope_theta` and `rope_scaling` in old ones."""
    rope = said.get("rope_parameters")
    if rope is None:
        rope = said.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise WeightsError(f"config.json: rope_parameters must be an object: {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise WeightsError(f"config.json: rope_type {kind!r} is not supported, 'default' is")
    theta = rope.get("rope_theta", said.get("rope_theta", 10000.0))
    return _Fields({"rope_theta": theta}).number("rope_theta", 10000.0)


def _indexer_types(said: Json, fields: _Fields, layers: int) -> tuple[IndexerType, ...]:
    """An explicit list, else a pattern of F and S, else the schedule of freq and offset."""
    kinds = fields.words("indexer_types", ("full", "shared"), layers)
    pattern = said.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str):
        if set(pattern) - {"F", "S"} or len(pattern) < layers:
            raise WeightsError(
                f"config.json: index_topk_pattern must be {layers} letters F or S: {pattern!r}"
            )
        kinds = ["full" if letter == "F" else "shared" for letter in pattern]
    elif kinds is None:
        kinds = fields.words("index_topk_pattern", ("full", "shared"), layers)
    if kinds is None:
        every = max(fields.count("index_topk_freq", 1, least=0), 1)
        offset = fields.count("index_skip_topk_offset", 2, least=0)
        kinds = [
            "full" if max(layer - offset + 1, 0) % every == 0 else "shared"
            for layer in range(layers)
        ]
    if kinds[0] != "full":
        raise WeightsError("config.json: layer 0 must own an indexer; there is none before it")
    if "shared" in kinds[layers : layers + 1]:
        raise WeightsError("config.json: the draft layer must own an indexer")
    return cast(tuple[IndexerType, ...], tuple(kinds[:layers]))


def _mlp_types(said: Json, fields: _Fields, layers: int) -> tuple[MlpType, ...]:
    kinds = fields.words("mlp_layer_types", ("dense", "sparse"), layers)
    if kinds is None:
        dense = min(fields.count("first_k_dense_replace", 3, least=0), layers)
        kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    return cast(tuple[MlpType, ...], tuple(kinds[:layers]))


def _check(config: GlmConfig) -> None:
    """Numbers that are well formed and do not fit each other."""
    wrong = [
        (config.qk_rope_head_dim % 2 != 0, "qk_rope_head_dim must be even"),
        (config.index_head_dim < config.qk_rope_head_dim, "index_head_dim < qk_rope_head_dim"),
        (config.n_routed_experts % config.n_group != 0, "n_routed_experts % n_group != 0"),
        (config.topk_group > config.n_group, "topk_group > n_group"),
        (
            config.num_experts_per_tok
            > config.n_routed_experts // config.n_group * config.topk_group,
            "num_experts_per_tok is more than the experts that may be chosen",
        ),
        (config.num_nextn_predict_layers > 1, "more than one draft layer is not supported"),
    ]
    said = [text for bad, text in wrong if bad]
    if said:
        raise WeightsError(f"config.json: {'; '.join(said)}")
