"""What many tiny configurations have in common, by the names in mlx-lm's `ModelArgs`; each takes what it knows."""

from typing import Any

Config = dict[str, Any]

VOCAB = 128
WINDOW = 8
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

BASE: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "silu",
}

MOE: Config = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "routed_scaling_factor": 1.5,
}

MLA: Config = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "attention_bias": False,
}

GATED_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
}

KDA: Config = {
    "num_heads": 2,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
}

YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}

SLIDING_FIRST: Config = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": WINDOW}


def merged(*configs: Config, **changes: Any) -> Config:
    """All of them in one; the later ones win."""
    whole: Config = {}
    for config in configs:
        whole |= config
    return whole | changes
