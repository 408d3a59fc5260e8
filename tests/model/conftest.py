"""Random small models: transformers' form, ours, and a small engine to run ours in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Stream
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.store import Leased, Store
from stanchion.model.config import GlmConfig, parse_config
from stanchion.model.glm5 import Glm5
from stanchion.model.text import Ragged

SMALL: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 36,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "index_n_heads": 8,
    "index_head_dim": 20,
    "index_topk": 16,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Weights wide enough for logits of order one, and biases that matter."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(value.shape, generator=made)
            if "norm" in name and name.endswith("weight"):
                value.copy_(1.0 + 0.2 * noise)
            elif "bias" in name:
                value.copy_(0.1 * noise)
            else:
                value.copy_(noise / value.shape[-1] ** 0.5)


def as_checkpoint(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers packs experts in memory; a checkpoint names each."""
    named: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                at = name.removesuffix("gate_up_proj") + str(expert)
                named[f"{at}.gate_proj.weight"] = gate.contiguous()
                named[f"{at}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(value):
                at = name.removesuffix("down_proj") + str(expert)
                named[f"{at}.down_proj.weight"] = one.contiguous()
        else:
            named[name] = value
    return named


@dataclass(frozen=True)
class Pair:
    """One random model twice: `theirs` is transformers', `tensors` its checkpoint and a draft."""

    said: dict[str, Any]
    theirs: Any
    tensors: dict[str, Tensor]

    @property
    def config(self) -> GlmConfig:
        return parse_config(self.said)

    def ours(self, page_tokens: int = 4, draft: bool = False, **how: Any) -> Glm5:
        at = f"model.layers.{self.config.num_hidden_layers}."
        tensors = {k: v for k, v in self.tensors.items() if draft or not k.startswith(at)}
        return Glm5(self.config, tensors, page_tokens, draft=draft, **how)


@dataclass
class Session:
    """One request in the small engine: its scattered pages and how far its rows go."""

    pin: Pin
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0  # rows of the draft layer


class SmallEngine:
    """Doors, pools and pages as the real one has them; the test decides each batch."""

    def __init__(self, model: Glm5, pages: int = 400, seed: int = 0) -> None:
        self.model = model
        self.store = Store(model.schema, pages)
        self.pool = PagePool(pages)
        self.stream = Stream("compute", InlineQueue())
        self._shuffle = np.random.default_rng(seed)
        for layer in range(model.schema.layers):  # a row nobody wrote is poison
            for door in ("index", "attend"):
                for name, rows in self.store.behind(layer, door)._value.items():
                    if rows.dtype.is_floating_point and "float8" not in str(rows.dtype):
                        rows.fill_(float("nan"))
                    assert name

    def start(self, room: int) -> Session:
        count = -(-room // self.model.schema.page_tokens)
        spare = self.pool.take(int(self._shuffle.integers(0, 3)), "a gap")
        session = Session(self.pool.take(count, "request"))
        self._shuffle.shuffle(session.pin.pages)
        spare.drop()
        return session

    def batch(self, work: Sequence[tuple[Session, int, list[int]]]) -> tuple[Ragged, Leased]:
        """(session, first position, tokens) each."""
        page_tokens = self.model.schema.page_tokens
        tokens, positions, rows, starts, tables, table_starts = [], [], [], [0], [], [0]
        for session, first, new in work:
            places = np.arange(first, first + len(new))
            pages = session.pin.pages
            tokens += new
            positions += places.tolist()
            rows += (pages[places // page_tokens] * page_tokens + places % page_tokens).tolist()
            starts.append(len(tokens))
            tables += pages.tolist()
            table_starts.append(len(tables))
        whole = np.unique(np.array(tables, np.int32))
        cache = Leased(self.store, self.stream, [one.pin for one, _, _ in work], whole, whole)
        ragged = Ragged(
            np.array(tokens),
            np.array(positions),
            np.array(rows),
            np.array(starts),
            np.array(tables, np.int32),
            np.array(table_starts),
        )
        return ragged, cache

    def run(self, work: Sequence[tuple[Session, list[int]]]) -> list[Tensor]:
        """Each session goes on by its tokens; returns each one's final hidden rows."""
        batch, cache = self.batch([(one, len(one.tokens), new) for one, new in work])
        hidden = self.model.forward(batch, cache)
        for session, new in work:
            session.tokens += new
        return list(torch.split(hidden, [len(new) for _, new in work]))

    def run_draft(self, work: Sequence[tuple[Session, list[int], Tensor]]) -> list[Tensor]:
        batch, cache = self.batch([(one, one.drafted, new) for one, new, _ in work])
        hidden = self.model.draft(batch, torch.cat([given for _, _, given in work]), cache)
        for session, new, _ in work:
            session.drafted += len(new)
        return list(torch.split(hidden, [len(new) for _, new, _ in work]))

    def logits(self, tokens: list[int], chunks: Sequence[int]) -> Tensor:
        """One request in chunks: (tokens, vocabulary)."""
        session = self.start(len(tokens))
        rows = []
        for chunk in chunks:
            first = len(session.tokens)
            if first < len(tokens):
                rows += self.run([(session, tokens[first : first + chunk])])
        session.pin.drop()
        return self.model.logits(torch.cat(rows))


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., Pair]:
    """A random model by its config's changes and a seed; the same ones are made once."""
    made: dict[str, Pair] = {}

    def make(seed: int = 0, **changes: Any) -> Pair:
        key = repr((seed, sorted(changes.items())))
        if key not in made:
            said = SMALL | changes
            config = GlmMoeDsaConfig(**said)
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
            theirs: Any = GlmMoeDsaForCausalLM(config)
            theirs.eval()
            randomise(theirs, seed)
            tensors = as_checkpoint(theirs.state_dict())
            made[key] = Pair(said, theirs, tensors | draft_tensors(said, seed))
        return made[key]

    return make


@pytest.fixture
def small_engine() -> type[SmallEngine]:
    return SmallEngine


def draft_tensors(said: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """A draft layer's tensors, as the checkpoint names them: a full mixture layer and its join."""
    layers, hidden = said["num_hidden_layers"], said["hidden_size"]
    types = {"indexer_types": ["full"], "mlp_layer_types": ["sparse"], "num_hidden_layers": 1}
    rest = {k: v for k, v in said.items() if k not in ("index_topk_freq", "index_topk_pattern")}
    one = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**(rest | types)))
    randomise(one, seed + 1000)
    at = f"model.layers.{layers}"
    named = {
        name.replace("model.layers.0", at): value
        for name, value in as_checkpoint(one.state_dict()).items()
        if name.startswith("model.layers.0")
    }
    noise = torch.Generator().manual_seed(seed + 2000)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        named[f"{at}.{norm}.weight"] = 1.0 + 0.2 * torch.randn(hidden, generator=noise)
    join = torch.randn(hidden, 2 * hidden, generator=noise) / (2 * hidden) ** 0.5
    return named | {f"{at}.eh_proj.weight": join}
