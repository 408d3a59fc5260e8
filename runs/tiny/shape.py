"""The shape of the embedded model, and the Hugging Face configuration that says the same.

Every width is small, yet none of the parts of a GLM-5 checkpoint is missing: a dense first layer,
routed and shared experts, latent attention, an indexer in every layer, one draft (MTP) layer.
"""

from dataclasses import dataclass

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
END = SPECIAL_TOKENS.index("<|endoftext|>")
PAD = SPECIAL_TOKENS.index("<|pad|>")
SYSTEM = SPECIAL_TOKENS.index("<|system|>")
USER = SPECIAL_TOKENS.index("<|user|>")
ASSISTANT = SPECIAL_TOKENS.index("<|assistant|>")


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 192
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    # With fewer heads all of them can be zero after the ReLU for many keys at once; such exact
    # ties make the chosen set depend on how a kernel sorts.
    index_n_heads: int = 8
    index_head_dim: int = 48
    index_topk: int = 128
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def hf_config(shape: Shape) -> dict[str, object]:
    """All that a loader of `glm_moe_dsa` checkpoints asks for."""
    sparse_layers = shape.num_hidden_layers - shape.first_k_dense_replace
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": shape.first_k_dense_replace,
        "mlp_layer_types": ["dense"] * shape.first_k_dense_replace + ["sparse"] * sparse_layers,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_routed_experts": shape.n_routed_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "n_shared_experts": shape.n_shared_experts,
        "routed_scaling_factor": shape.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_attention_heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "qk_head_dim": shape.qk_head_dim,
        "head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "index_n_heads": shape.index_n_heads,
        "index_head_dim": shape.index_head_dim,
        "index_topk": shape.index_topk,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
