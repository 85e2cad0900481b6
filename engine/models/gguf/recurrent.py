"""Architectures that mix attention with state space layers or short convolutions."""

from typing import Any

from metalctl.engine.models.gguf.dense import granite
from metalctl.engine.models.gguf.experts import GRANITE_EXPERTS, experts
from metalctl.engine.models.gguf.mapping import (
    Architecture,
    Config,
    Keys,
    Names,
    as_convolution,
    flat,
    log_of_negative,
    to,
)
from metalctl.engine.models.gguf.transformer import (
    ATTENTION,
    GATED,
    OUTSIDE,
    PAIRED,
    common,
    rms,
)


def granitehybrid(keys: Keys) -> Config:
    experts = keys.integer("expert_count", 0)
    kinds = ["attention" if count else "mamba" for count in keys.each_layer("attention.head_count_kv")]
    config = granite(keys, "granitemoehybrid")
    attention = kinds.index("attention") if "attention" in kinds else 0
    return {
        **config,
        **_mamba2(keys, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_n_groups"),
        "attention_bias": keys.has(f"blk.{attention}.attn_q.bias"),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count", 0),
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length", config["intermediate_size"]),
        "layer_types": kinds,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else "nope",
        "time_step_limit": (0.0, float("inf")),
    }


def nemotron_h(keys: Keys) -> Config:
    attention, dense = keys.each_layer("attention.head_count_kv"), keys.each_layer("feed_forward_length")
    pattern = ["*" if heads else "-" if size else "M" for heads, size in zip(attention, dense, strict=True)]
    return {
        **common(keys, "nemotron_h"),
        **_mamba2(keys, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel", "n_groups"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "hybrid_override_pattern": pattern,
        "mamba_proj_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "tie_word_embeddings": False,
    }


def nemotron_h_moe(keys: Keys) -> Config:
    config = nemotron_h(keys)
    pattern = ["E" if kind == "-" else kind for kind in config["hybrid_override_pattern"]]
    return {
        **config,
        "hybrid_override_pattern": pattern,
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "moe_latent_size": keys.integer("moe_latent_size", 0) or None,
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _mamba2(keys: Keys, heads: str, width: str, state: str, kernel: str, groups: str) -> dict[str, Any]:
    count = keys.integer("ssm.time_step_rank")
    return {
        heads: count,
        width: keys.integer("ssm.inner_size") // count,
        state: keys.integer("ssm.state_size"),
        kernel: keys.integer("ssm.conv_kernel"),
        groups: keys.integer("ssm.group_count"),
    }


def lfm2(keys: Keys) -> Config:
    config = rms(keys, "lfm2")
    attention = keys.each_layer("attention.head_count_kv")
    return {
        **config,
        "norm_eps": config["rms_norm_eps"],
        "conv_bias": False,
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "block_dim": config["hidden_size"],
        "block_ff_dim": config["intermediate_size"],
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [index for index, heads in enumerate(attention) if heads],
    }


def lfm2moe(keys: Keys) -> Config:
    return {
        **lfm2(keys),
        **experts(keys),
        "model_type": "lfm2_moe",
        "norm_topk_prob": True,
        "num_dense_layers": keys.integer("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in keys.tensors),
    }


def _state_space(module: str) -> Names:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_out": f"{module}.out_proj",
        "ssm_conv1d.weight": to(f"{module}.conv1d", values=as_convolution),
        "ssm_conv1d.bias": f"{module}.conv1d",
        "ssm_dt.bias": to(f"{module}.dt_bias", whole=True),
        "ssm_a": to(f"{module}.A_log", values=log_of_negative, whole=True),
        "ssm_d": to(f"{module}.D", values=flat, whole=True),
        "ssm_norm": to(f"{module}.norm", values=flat),
    }


GRANITE_HYBRID: Names = {
    **ATTENTION,
    **GATED,
    **PAIRED,
    **GRANITE_EXPERTS,
    **_state_space("mamba"),
    "ffn_gate_shexp": to("shared_mlp.input_linear", part=0),
    "ffn_up_shexp": to("shared_mlp.input_linear", part=1),
    "ffn_down_shexp": "shared_mlp.output_linear",
}

NEMOTRON_H: Names = {
    "attn_norm": "norm",
    "attn_q": to("mixer.q_proj", rows=PAIRED["attn_q"].rows),  # type: ignore[union-attr]
    "attn_k": to("mixer.k_proj", rows=PAIRED["attn_k"].rows),  # type: ignore[union-attr]
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    **_state_space("mixer"),
}

NEMOTRON_H_MOE: Names = {
    **NEMOTRON_H,
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": to("mixer.gate.e_score_correction_bias", whole=True),
    "ffn_up_exps": "mixer.switch_mlp.fc1",
    "ffn_down_exps": "mixer.switch_mlp.fc2",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}

NEMOTRON_H_OUTSIDE: Names = {
    **OUTSIDE,
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
}

LFM2: Names = {
    **ATTENTION,
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "shortconv.conv": to("conv.conv", values=as_convolution),
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}

LFM2_OUTSIDE: Names = {
    **OUTSIDE,
    "output_norm": "model.embedding_norm",
    "token_embd_norm": "model.embedding_norm",
    "output": None,
}

LFM2_MOE: Names = {
    **LFM2,
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"feed_forward.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": to("feed_forward.expert_bias", whole=True),
}

RECURRENT: dict[str, Architecture] = {
    "granitehybrid": Architecture(granitehybrid, OUTSIDE, GRANITE_HYBRID),
    "nemotron_h": Architecture(nemotron_h, NEMOTRON_H_OUTSIDE, NEMOTRON_H, layer_path="backbone.layers.{}."),
    "nemotron_h_moe": Architecture(
        nemotron_h_moe, NEMOTRON_H_OUTSIDE, NEMOTRON_H_MOE, layer_path="backbone.layers.{}."
    ),
    "lfm2": Architecture(lfm2, LFM2_OUTSIDE, LFM2),
    "lfm2moe": Architecture(lfm2moe, LFM2_OUTSIDE, LFM2_MOE),
}
