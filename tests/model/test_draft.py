"""The draft layer equals a reference built from transformers' decoder layer and MTP wiring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaRotaryEmbedding,
)

from stanchion.core.errors import Bug, WeightsError
from stanchion.model.glm5 import Glm5

CLOSE = 1e-4


def reference(pair: Any, tokens: list[int], hidden: Tensor) -> Tensor:
    """eh_proj(enorm(embedding) | hnorm(hidden)) -> one full decoder layer -> shared_head.norm."""
    said = pair.said | {"num_hidden_layers": 1, "indexer_types": ["full"]}
    config = GlmMoeDsaConfig(**(said | {"mlp_layer_types": ["sparse"]}))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    at = f"model.layers.{pair.config.num_hidden_layers}."
    given = {k.removeprefix(at): v for k, v in pair.tensors.items() if k.startswith(at)}
    layer = GlmMoeDsaDecoderLayer(config, 0).eval()
    layer.load_state_dict({k: packed(k, given) for k in layer.state_dict()})

    def norm(name: str, rows: Tensor) -> Tensor:
        module = GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        module.load_state_dict({"weight": given[f"{name}.weight"]})
        normed: Tensor = module(rows)
        return normed

    with torch.no_grad():
        embedded = pair.tensors["model.embed_tokens.weight"][torch.tensor([tokens])]
        both = torch.cat([norm("enorm", embedded), norm("hnorm", hidden[None])], -1)
        joined = both @ given["eh_proj.weight"].T
        places = torch.arange(len(tokens))[None]
        mask = create_causal_mask(
            config=config,
            inputs_embeds=joined,
            attention_mask=None,
            cache=None,
            position_ids=places,
            allow_is_causal_skip=False,
        )
        angles = GlmMoeDsaRotaryEmbedding(config)(joined, places)
        out, _ = layer(joined, attention_mask=mask, position_ids=places, position_embeddings=angles)
        return norm("shared_head.norm", out)[0]


def packed(name: str, given: dict[str, Tensor]) -> Tensor:
    """A tensor by its name in memory, where experts are stacked."""
    if name == "mlp.experts.gate_up_proj":
        count = len([one for one in given if one.endswith("gate_proj.weight")]) - 1
        pairs = [
            torch.cat([given[f"mlp.experts.{i}.{part}_proj.weight"] for part in ("gate", "up")])
            for i in range(count)
        ]
        return torch.stack(pairs)
    if name == "mlp.experts.down_proj":
        count = len([one for one in given if one.endswith("down_proj.weight")]) - 1
        return torch.stack([given[f"mlp.experts.{i}.down_proj.weight"] for i in range(count)])
    return given[name]


@pytest.mark.parametrize("length", [9, 60])
@pytest.mark.parametrize("sharing", [{}, {"index_topk_pattern": "FSSF"}])
def test_the_draft_layer_equals_its_reference(
    length: int, sharing: dict[str, Any], make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair(**sharing)
    model = pair.ours(draft=True)
    tokens = [(7 * i * i + 3) % 96 for i in range(length)]
    hidden = torch.randn(length, 40, generator=torch.Generator().manual_seed(length))
    hidden[0] = model.no_hidden(1)[0]
    wanted = reference(pair, tokens, hidden)
    head = pair.tensors["lm_head.weight"]
    for chunks in ([length], [4] * 15):
        engine = small_engine(model)
        session = engine.start(length)
        rows = []
        for chunk in chunks:
            first = session.drafted
            if first < length:
                part = (session, tokens[first : first + chunk], hidden[first : first + chunk])
                rows += engine.run_draft([part])
        out = torch.cat(rows)
        assert (out - wanted).abs().max() < CLOSE
        assert (model.draft_logits(out) - wanted @ head.T).abs().max() < CLOSE


def test_the_target_is_the_same_with_and_without_a_draft_layer(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair()
    tokens = [(5 * i) % 96 for i in range(40)]
    without = small_engine(pair.ours()).logits(tokens, [40])
    assert torch.equal(small_engine(pair.ours(draft=True)).logits(tokens, [40]), without)


def test_a_checkpoint_without_a_draft_layer_cannot_draft(
    make_pair: Callable[..., Any], small_engine: Any
) -> None:
    pair = make_pair(num_nextn_predict_layers=0)
    with pytest.raises(WeightsError, match="num_nextn_predict_layers"):
        pair.ours(draft=True)
    model: Glm5 = pair.ours()
    engine = small_engine(model)
    session = engine.start(1)
    with pytest.raises(Bug, match="draft"):
        engine.run_draft([(session, [1], model.no_hidden(1))])
