"""Checkpoints: which tensors a model has by name, and reading them from a directory, strictly.

A directory is Hugging Face's layout: config.json, one model.safetensors or shards with
model.safetensors.index.json. Files are memory-mapped: a tensor's bytes are read when it is used.
Names that are unknown or missing, and shapes that differ, are an error that lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stanchion.core.errors import WeightsError
from stanchion.model.config import GlmConfig

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]
Progress = Callable[[int, int], None]  # tensors read, tensors in all

NAMES_LISTED = 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
READABLE = {torch.float32, torch.bfloat16, torch.float16}


def compute_dtype(name: str) -> torch.dtype:
    """Raises WeightsError: for fp16, with the reason."""
    if name in ("float16", "fp16", "half"):
        raise WeightsError(
            "float16 is refused on a CPU: its matrix products run about a hundred times slower "
            "than float32; choose float32 or bfloat16"
        )
    if name not in DTYPES:
        raise WeightsError(f"no dtype {name}; there are: {', '.join(sorted(DTYPES))}")
    return DTYPES[name]


def expected(config: GlmConfig, draft: bool) -> dict[str, Shape]:
    """Every tensor that the model reads, by its checkpoint name."""
    hidden = config.hidden_size
    names: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers + draft):
        names |= {f"model.layers.{layer}.{k}": v for k, v in _layer(config, layer).items()}
    if draft:
        at = f"model.layers.{config.num_hidden_layers}"
        names |= {
            f"{at}.enorm.weight": (hidden,),
            f"{at}.hnorm.weight": (hidden,),
            f"{at}.eh_proj.weight": (hidden, 2 * hidden),
            f"{at}.shared_head.norm.weight": (hidden,),
        }
    return names


def read_weights(
    directory: Path, config: GlmConfig, draft: bool, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Every expected tensor, as stored. Raises WeightsError, with the names that do not fit."""
    files = _files(directory)
    wanted = expected(config, draft)
    check_names(files.keys(), config, draft)
    read: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name in wanted:
                        read[name] = opened.get_tensor(name)
                        if progress is not None:
                            progress(len(read), len(wanted))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: {error}") from error
    check_tensors(read, config, draft)
    return read


def check_names(names: object, config: GlmConfig, draft: bool) -> None:
    """Refuse unknown and missing names. A draft layer that is not asked for is passed over, and so
    are its copies of the embedding and the head, which are the target's."""
    given = set(names)  # type: ignore[call-overload]
    wanted = expected(config, draft)
    passed_over = expected(config, True).keys() if config.num_nextn_predict_layers else set()
    at = f"model.layers.{config.num_hidden_layers}"
    copies = {f"{at}.embed_tokens.weight", f"{at}.shared_head.head.weight"}
    if config.tie_word_embeddings:
        copies.add("lm_head.weight")
    unknown = sorted(given - wanted.keys() - passed_over - copies)
    missing = sorted(wanted.keys() - given)
    said = []
    if missing:
        said.append(f"missing: {_listed(missing)}")
    if unknown:
        said.append(f"unknown: {_listed(unknown)}")
    if said:
        raise WeightsError("; ".join(said))


def check_tensors(tensors: Tensors, config: GlmConfig, draft: bool) -> None:
    """Names, shapes and dtypes of what a model is built from."""
    check_names(tensors.keys(), config, draft)
    wrong = []
    for name, shape in expected(config, draft).items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            wrong.append(f"{name} is {tuple(tensor.shape)}, not {shape}")
        elif tensor.dtype not in READABLE:
            wrong.append(f"{name} is {tensor.dtype}, which is not read")
    if wrong:
        raise WeightsError(_listed(wrong))


def _layer(config: GlmConfig, layer: int) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query, latent = config.q_lora_rank, config.kv_lora_rank
    names: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (query, hidden),
        "self_attn.q_a_layernorm.weight": (query,),
        "self_attn.q_b_proj.weight": (heads * config.qk_head_dim, query),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            latent,
        ),
        "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.owns_indexer(layer):
        width = config.index_head_dim
        names |= {
            "self_attn.indexer.wq_b.weight": (config.index_n_heads * width, query),
            "self_attn.indexer.wk.weight": (width, hidden),
            "self_attn.indexer.k_norm.weight": (width,),
            "self_attn.indexer.k_norm.bias": (width,),
            "self_attn.indexer.weights_proj.weight": (config.index_n_heads, hidden),
        }
    if not config.is_sparse(layer):
        return names | _mlp("mlp", hidden, config.intermediate_size)
    names["mlp.gate.weight"] = (config.n_routed_experts, hidden)
    names["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        names |= _mlp(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size)
    if config.n_shared_experts:
        inner = config.moe_intermediate_size * config.n_shared_experts
        names |= _mlp("mlp.shared_experts", hidden, inner)
    return names


def _mlp(at: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def _files(directory: Path) -> dict[str, Path]:
    """Which file each tensor is in. Raises WeightsError: no weights, or index and files differ."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        path = directory / "model.safetensors"
        if not path.exists():
            raise WeightsError(f"{directory}: neither model.safetensors nor {index.name}")
        return dict.fromkeys(_names(path), path)
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): directory / str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not an index of shards: {error!r}") from error
    for path in sorted(set(files.values())):
        if path.parent != directory:
            raise WeightsError(f"{index}: names a file outside its directory: {path.name}")
        held = set(_names(path))
        promised = {name for name, file in files.items() if file == path}
        if held != promised:
            raise WeightsError(
                f"{path}: does not hold what its index says: {_listed(sorted(held ^ promised))}"
            )
    return files


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: {error}") from error


def _listed(names: list[str]) -> str:
    rest = len(names) - NAMES_LISTED
    return ", ".join(names[:NAMES_LISTED]) + (f" and {rest} more" if rest > 0 else "")
