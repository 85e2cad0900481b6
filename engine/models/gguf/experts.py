"""Architectures with experts instead of one feed-forward network a layer."""

from metalctl.engine.models.gguf.dense import MIXTRAL_EXPERTS, granite
from metalctl.engine.models.gguf.mapping import (
    Architecture,
    Array,
    Config,
    Keys,
    Names,
    halves,
    to,
)
from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.gguf.transformer import (
    ATTENTION,
    GATED,
    OUTSIDE,
    PAIRED,
    QK_NORM,
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

QWEN2_MOE: Names = {**ATTENTION, **EXPERTS, **SHARED_EXPERT}

WITH_EXPERTS: dict[str, Architecture] = {
    "qwen2moe": Architecture(qwen2moe, OUTSIDE, QWEN2_MOE),
    "qwen3moe": Architecture(qwen3moe, OUTSIDE, {**ATTENTION, **EXPERTS, **QK_NORM}),
    "deepseek2": Architecture(deepseek2, OUTSIDE, DEEPSEEK2, variant=_of_deepseek3, wide_range=True),
    "glm4moe": Architecture(glm4moe, OUTSIDE, GLM4_MOE, wide_range=True),
    "olmoe": Architecture(olmoe, OUTSIDE, {**ATTENTION, **EXPERTS, **QK_NORM}),
    "gpt-oss": Architecture(gpt_oss, OUTSIDE, GPT_OSS, wide_range=True),
    "granitemoe": Architecture(
        granitemoe, OUTSIDE, {**ATTENTION, **PAIRED, **GRANITE_EXPERTS}, prepare=llama3_frequencies
    ),
}
