"""Checkpoints are read strictly: by name, from one file or shards, with every misfit listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GlmMoeDsaConfig

from stanchion.core.errors import WeightsError
from stanchion.model.config import parse_config, read_config
from stanchion.model.glm5 import Glm5
from stanchion.model.weights import compute_dtype, expected, read_weights


def save(pair: Any, at: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    (at / "config.json").write_text(json.dumps(pair.said))
    if shards == 1:
        save_file(tensors, at / "model.safetensors")
        return
    named: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, at / file)
        named |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": named}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_gives_the_same_model(
    shards: int, tmp_path: Path, make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair()
    save(pair, tmp_path, pair.tensors, shards)
    said: list[tuple[int, int]] = []
    config = read_config(tmp_path)
    tensors = read_weights(tmp_path, config, True, lambda done, all_of: said.append((done, all_of)))
    assert said[-1] == (len(tensors), len(tensors)) and len(said) == len(tensors)
    model = Glm5(config, tensors, 4, draft=True)
    tokens = list(range(40))
    wanted = small_engine(pair.ours()).logits(tokens, [40])
    assert torch.equal(small_engine(model).logits(tokens, [40]), wanted)


def test_what_transformers_saves_is_read(
    tmp_path: Path, make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair()
    pair.theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = read_config(tmp_path)
    model = Glm5(config, read_weights(tmp_path, config, False), 4)
    tokens = list(range(40))
    wanted = small_engine(pair.ours()).logits(tokens, [40])
    assert torch.equal(small_engine(model).logits(tokens, [40]), wanted)


def test_a_draft_layer_that_is_not_asked_for_is_passed_over(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair()
    at = f"model.layers.{pair.config.num_hidden_layers}"
    copies = {
        f"{at}.embed_tokens.weight": pair.tensors["model.embed_tokens.weight"].clone(),
        f"{at}.shared_head.head.weight": pair.tensors["lm_head.weight"].clone(),
    }
    save(pair, tmp_path, pair.tensors | copies)
    assert read_weights(tmp_path, pair.config, False).keys() == expected(pair.config, False).keys()
    assert read_weights(tmp_path, pair.config, True).keys() == expected(pair.config, True).keys()


def test_unknown_and_missing_names_are_listed(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair()
    tensors = dict(pair.tensors)
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save(pair, tmp_path, tensors)
    with pytest.raises(WeightsError) as caught:
        read_weights(tmp_path, pair.config, True)
    assert "missing: model.layers.2.mlp.experts.3.up_proj.weight" in str(caught.value)
    assert "unknown: model.layers.1.self_attn.sinks" in str(caught.value)


def test_an_indexer_on_a_shared_layer_is_unknown(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair()
    shared = make_pair(index_topk_pattern="FSFF")
    save(shared, tmp_path, pair.tensors)
    with pytest.raises(WeightsError, match=r"unknown: model\.layers\.1\.self_attn\.indexer"):
        read_weights(tmp_path, shared.config, False)


def test_a_wrong_shape_is_named(make_pair: Callable[..., Any]) -> None:
    pair = make_pair()
    wrong = dict(pair.tensors) | {"model.norm.weight": torch.ones(41)}
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \(41,\), not \(40,\)"):
        Glm5(pair.config, wrong, 4, draft=True)


def test_a_wrong_dtype_is_named(make_pair: Callable[..., Any]) -> None:
    pair = make_pair()
    wrong = dict(pair.tensors) | {"model.norm.weight": torch.ones(40, dtype=torch.float64)}
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is torch\.float64"):
        Glm5(pair.config, wrong, 4, draft=True)


def test_broken_directories_are_errors_that_name_the_file(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair()
    with pytest.raises(WeightsError, match="neither"):
        read_weights(tmp_path, pair.config, False)
    with pytest.raises(WeightsError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        read_weights(tmp_path, pair.config, False)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="not an index"):
        read_weights(tmp_path, pair.config, False)


def test_a_shard_that_is_not_what_the_index_says(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair()
    save(pair, tmp_path, pair.tensors, 3)
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    del said["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(said))
    with pytest.raises(WeightsError, match=r"does not hold what its index says: model\.norm"):
        read_weights(tmp_path, pair.config, False)
    said["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(said))
    with pytest.raises(WeightsError, match="outside its directory"):
        read_weights(tmp_path, pair.config, False)


def test_float16_is_refused_with_its_reason() -> None:
    assert compute_dtype("float32") is torch.float32
    assert compute_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(WeightsError, match="slower"):
        compute_dtype("float16")
    with pytest.raises(WeightsError, match="bfloat16, float32"):
        compute_dtype("int8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": "192"}, "hidden_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"index_topk": 0}, "index_topk"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"index_topk_pattern": "SFFF"}, "layer 0"),
        ({"index_topk_pattern": "FX"}, "index_topk_pattern"),
        ({"indexer_types": ["full"] * 3}, "indexer_types"),
        ({"indexer_types": ["full"] * 4 + ["shared"]}, "draft layer"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"n_group": 4}, "n_group"),
        ({"num_nextn_predict_layers": 2}, "draft layer"),
        ({"qk_rope_head_dim": 7}, "even"),
    ],
)
def test_a_config_that_we_cannot_run_names_the_field(
    change: dict[str, Any], said: str, make_pair: Callable[..., Any]
) -> None:
    with pytest.raises(WeightsError, match=said):
        parse_config(make_pair().said | change)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSFSFSSFFSS"},
        {"indexer_types": ["full"] * 5 + ["shared"] * 7},
        {"mlp_layer_types": ["dense", "sparse"] * 6},
        {"first_k_dense_replace": 2},
    ],
)
def test_layer_types_are_those_of_transformers(
    change: dict[str, Any], make_pair: Callable[..., Any]
) -> None:
    said = make_pair().said | {"num_hidden_layers": 12} | change
    theirs = GlmMoeDsaConfig(**said)
    ours = parse_config(said)
    assert list(ours.indexer_types) == theirs.indexer_types
    assert list(ours.mlp_layer_types) == theirs.mlp_layer_types


def test_shared_layers_own_no_index_buffer(make_pair: Callable[..., Any]) -> None:
    schema = make_pair(index_topk_pattern="FSSF").ours(draft=True).schema
    owners = [one.layer for one in schema.buffers if one.name == "index_key"]
    assert owners == [0, 3, 4]
    assert [one.layer for one in schema.buffers if one.name == "latent_rope"] == [0, 1, 2, 3, 4]
    assert schema.draft and schema.layers == 5 and schema.target_layers == 4
    assert schema.row_bytes == 4 * (3 * 20 + 5 * 32)


def test_fp8_index_keys_have_a_scale_a_row(make_pair: Callable[..., Any]) -> None:
    schema = make_pair().ours(index_keys="fp8").schema
    kept = [(one.name, one.dtype, one.width) for one in schema.behind(0, "index")]
    assert kept == [("index_key", "float8_e4m3fn", 20), ("index_scale", "float32", 1)]
    assert schema.digest() != make_pair().ours().schema.digest()
