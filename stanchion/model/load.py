"""From a Hugging Face folder to a model that the engine can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from stanchion.model.config import read_config
from stanchion.model.glm5 import Glm5
from stanchion.model.warm import warm_up
from stanchion.model.weights import compute_dtype, read_weights

INDEX_KEYS = {"same": "same", "float8": "fp8"}


def load_glm(
    folder: Path,
    page_tokens: int,
    dtype: str = "float32",
    index_dtype: str = "same",
    draft: bool = True,
    deterministic: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Glm5, str, str, tuple[int, ...]]:
    """The model, its kernels compiled, its name, its revision and its end tokens.

    A checkpoint without a draft layer is served without speculation. Raise ConfigError or
    WeightsError naming what does not fit.
    """
    config = read_config(folder)
    draft = draft and config.num_nextn_predict_layers > 0
    wanted = compute_dtype(dtype)
    tensors = read_weights(folder, config, draft, progress)
    model = Glm5(
        config, tensors, page_tokens, wanted, draft, deterministic, INDEX_KEYS[index_dtype]
    )
    warm_up(model)
    return model, folder.name, revision(folder), end_tokens(folder)


def revision(folder: Path) -> str:
    """Tells two checkpoints apart: config.json, and the name, size and header of each shard."""
    mixed = blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for shard in sorted(folder.glob("*.safetensors")):
        mixed.update(f"{shard.name} {shard.stat().st_size}".encode())
        with shard.open("rb") as opened:
            mixed.update(opened.read(1 << 16))
    return mixed.hexdigest()


def end_tokens(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json: one id or a list."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        said = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if said is not None:
            return tuple(said) if isinstance(said, list) else (said,)
    return ()
