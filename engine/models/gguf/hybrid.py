"""Architectures with experts, and those that mix attention with recurrent layers."""

from typing import Any

from metalctl.engine.models.gguf.dense import MIXTRAL_EXPERTS, granite
from metalctl.engine.models.gguf.mapping import (
    Architecture,
    Array,
    Config,
    Keys,
    Names,
    as_convolution,
    flat,
    halves,
    log_of_negative,
    to,
)
from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.gguf.transformer import (
    ATTENTION,
    GATED,
    OUTSIDE,
    PAIRED,
    QK_NORM,
    common,
    llama3_frequencies,
    partial_rotary,
    rms,
)

SOFTMAX = 1  # values of expert_gating_func

EXPERTS: Names = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_up_exps": to("mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj", rows=halves),
}


SHARED_EXPERT: Names = {
    "ffn_gate_inp_shexp": to("mlp.shared_expert_gate", values=lambda array, config: array.reshape(1, -1)),
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def experts(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length", 0)),
    }


def qwen2moe(keys: Keys) -> Config:
    shared = keys.integer("expert_shared_feed_forward_length", keys.integer("feed_forward_length", 0))
    return {**rms(keys, "qwen2_moe"), **experts(keys), "shared_expert_intermediate_size": shared}


def qwen3moe(keys: Keys) -> Config:
    return {
        **rms(keys, "qwen3_moe"),
        **experts(keys),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def gpt_oss(keys: Keys) -> Config:
    """Every other layer has a sliding window, the first among them."""
    layers = keys.layers
    return {
        **rms(keys, "gpt_oss"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [("full_attention" if index % 2 else "sliding_attention") for index in range(layers)],
    }


def deepseek2(keys: Keys) -> Config:
    config = rms(keys, "deepseek_v2")
    groups = keys.integer("expert_group_count", 1)
    rotary = keys.integer("rope.dimension_count")
    head = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    scaling = dict(config["rope_scaling"] or {"factor": 1.0})
    log_multiplier = keys.optional("rope.scaling.yarn_log_multiplier")
    if log_multiplier is not None:
        scaling["mscale_all_dim"] = scaling["mscale"] = round(log_multiplier / 0.1, 6)
    return {
        **config,
        "rope_scaling": scaling,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": head - rotary,
        "v_head_dim": value,
        "num_key_value_heads": keys.integer("attention.head_count"),
        "n_routed_experts": keys.integer("expert_count", 0) or None,
        "n_shared_experts": keys.integer("expert_shared_count", 0) or None,
        "num_experts_per_tok": keys.integer("expert_used_count", 0) or None,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", groups),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def deepseek3(keys: Keys) -> Config:
    """DeepSeek V3, Kimi K2 and GLM-4.7 Flash, under the name of V2: experts are chosen by sigmoids and a bias."""
    config = deepseek2(keys)
    return {
        **config,
        "model_type": "deepseek_v3",
        "rope_scaling": config["rope_scaling"] if len(config["rope_scaling"]) > 1 else None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
    }


def _of_deepseek3(header: Header) -> Architecture | None:
    gating = header.get("deepseek2.expert_gating_func", int, SOFTMAX)
    return None if gating == SOFTMAX else DEEPSEEK3_ROW


def _keys_upright(array: Array, config: Config) -> Array:
    """llama.cpp keeps each head's share of the keys' projection transposed: [heads, rank, dims]."""
    return array.swapaxes(-1, -2)


def _as_numbers(array: Array, config: Config) -> Array:
    return array


def granitemoe(keys: Keys) -> Config:
    return {
        **granite(keys, "granitemoe"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


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


def glm4moe(keys: Keys) -> Config:
    config = rms(keys, "glm4_moe")
    routed = experts(keys)
    return {
        **config,
        **routed,
        "n_routed_experts": routed["num_experts"],
        "n_shared_experts": keys.integer("expert_shared_count", 0) or None,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": partial_rotary(keys, config),
    }


def olmoe(keys: Keys) -> Config:
    return {**rms(keys, "olmoe"), **experts(keys), "norm_topk_prob": False}


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


GRANITE_EXPERTS: Names = {**MIXTRAL_EXPERTS, "ffn_gate_inp": "block_sparse_moe.router.layer"}

DEEPSEEK2: Names = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": to("self_attn.kv_b_proj", values=_keys_upright, part=0),
    "attn_v_b": to("self_attn.kv_b_proj", values=_as_numbers, part=1),
    "attn_output": "self_attn.o_proj",
    **GATED,
    **EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

SCORE_BIAS: Names = {"exp_probs_b": to("mlp.gate.e_score_correction_bias", whole=True)}

DEEPSEEK3: Names = {
    **DEEPSEEK2,
    **SCORE_BIAS,
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
DEEPSEEK3_ROW = Architecture(deepseek3, OUTSIDE, DEEPSEEK3, wide_range=True)

GLM4_MOE: Names = {
    **ATTENTION,
    **QK_NORM,
    **GATED,
    **EXPERTS,
    **SCORE_BIAS,
    "post_attention_norm": "post_attention_layernorm",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}

GPT_OSS: Names = {
    **ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": to("self_attn.sinks", whole=True),
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
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

QWEN2_MOE: Names = {**ATTENTION, **EXPERTS, **SHARED_EXPERT}

HYBRID: dict[str, Architecture] = {
    "qwen2moe": Architecture(qwen2moe, OUTSIDE, QWEN2_MOE),
    "qwen3moe": Architecture(qwen3moe, OUTSIDE, {**ATTENTION, **EXPERTS, **QK_NORM}),
    "deepseek2": Architecture(deepseek2, OUTSIDE, DEEPSEEK2, variant=_of_deepseek3, wide_range=True),
    "glm4moe": Architecture(glm4moe, OUTSIDE, GLM4_MOE, wide_range=True),
    "olmoe": Architecture(olmoe, OUTSIDE, {**ATTENTION, **EXPERTS, **QK_NORM}),
    "gpt-oss": Architecture(gpt_oss, OUTSIDE, GPT_OSS, wide_range=True),
    "granitemoe": Architecture(
        granitemoe, OUTSIDE, {**ATTENTION, **PAIRED, **GRANITE_EXPERTS}, prepare=llama3_frequencies
    ),
    "granitehybrid": Architecture(granitehybrid, OUTSIDE, GRANITE_HYBRID),
    "nemotron_h": Architecture(
        nemotron_h,
        {**OUTSIDE, "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        NEMOTRON_H,
        layer_path="backbone.layers.{}.",
    ),
    "lfm2": Architecture(lfm2, LFM2_OUTSIDE, LFM2),
    "lfm2moe": Architecture(lfm2moe, LFM2_OUTSIDE, LFM2_MOE),
}
