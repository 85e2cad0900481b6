"""Qwen3-Next and Qwen3.5: gated delta nets, with attention in every fourth layer."""

from collections.abc import Callable

import numpy as np

from metalctl.engine.models.gguf.experts import EXPERTS, SHARED_EXPERT, experts
from metalctl.engine.models.gguf.mapping import (
    Architecture,
    Array,
    Config,
    Keys,
    Names,
    as_convolution,
    log_of_negative,
    to,
)
from metalctl.engine.models.gguf.transformer import GATED, rms

INSIDE = "language_model."  # mlx-lm keeps the text model below that

DELTA_KEYS = {
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_num_key_heads": "ssm.group_count",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}


def delta_net(model_type: str) -> Callable[[Keys], Config]:
    """The config of mlx-lm's Qwen3.5, which Qwen3-Next's is in other words."""

    def config(keys: Keys) -> Config:
        text = rms(keys, model_type + "_text") | {name: keys.integer(key) for name, key in DELTA_KEYS.items()}
        text["linear_value_head_dim"] = keys.integer("ssm.inner_size") // text["linear_num_value_heads"]
        text["full_attention_interval"] = keys.integer("full_attention_interval", 4)
        text["rope_parameters"] = {
            "type": "default",
            "rope_theta": text["rope_theta"],
            "partial_rotary_factor": keys.integer("rope.dimension_count", text["head_dim"]) / text["head_dim"],
        }
        if keys.integer("expert_count", 0):
            text |= experts(keys)
            text["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
        return {**text, "model_type": model_type, "text_config": text}

    return config


def _tiles(config: Config) -> tuple[int, int]:
    """(heads of values for each head of keys, heads of keys)."""
    keys = config["linear_num_key_heads"]
    return config["linear_num_value_heads"] // keys, keys


def _by_key(array: Array, config: Config) -> Array:
    """Qwen3.5's heads of values, which GGUF keeps in turns of one for each head of keys, in groups by head of keys."""
    each, keys = _tiles(config)
    tiled = array.reshape(each, keys, -1, *array.shape[1:])
    return np.ascontiguousarray(tiled.swapaxes(0, 1)).reshape(array.shape)


def _values_by_key(array: Array, config: Config) -> Array:
    """The same for the last of queries, keys and values."""
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return np.concatenate([array[:first], _by_key(array[first:], config)])


def _columns_by_key(config: Config) -> Array:
    each, keys = _tiles(config)
    return np.arange(each * keys).reshape(each, keys).T.reshape(-1)


def _betas_and_alphas(array: Array, config: Config) -> tuple[Array, Array]:
    """Qwen3-Next keeps both side by side for each head of keys."""
    each, keys = _tiles(config)
    grouped = array.reshape(keys, 2, each, *array.shape[1:])
    shape = (each * keys, *array.shape[1:])
    return grouped[:, 0].reshape(shape), grouped[:, 1].reshape(shape)


OUTSIDE: Names = {
    "token_embd": INSIDE + "model.embed_tokens",
    "output_norm": INSIDE + "model.norm",
    "output": INSIDE + "lm_head",
}

ATTENTION: Names = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **GATED,
    **EXPERTS,
    **SHARED_EXPERT,
}

GROUPED: Names = {
    **ATTENTION,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": to("linear_attn.in_proj_b", "linear_attn.in_proj_a", rows=_betas_and_alphas),
    "ssm_conv1d": to("linear_attn.conv1d", values=as_convolution),
    "ssm_dt.bias": to("linear_attn.dt_bias", whole=True),
    "ssm_a": to("linear_attn.A_log", values=log_of_negative, whole=True),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

TILED: Names = {
    **ATTENTION,
    "attn_qkv": to("linear_attn.in_proj_qkv", rows=_values_by_key),
    "attn_gate": to("linear_attn.in_proj_z", rows=_by_key),
    "ssm_beta": to("linear_attn.in_proj_b", rows=_by_key),
    "ssm_alpha": to("linear_attn.in_proj_a", rows=_by_key),
    "ssm_conv1d": to("linear_attn.conv1d", values=as_convolution, rows=_values_by_key),
    "ssm_dt.bias": to("linear_attn.dt_bias", rows=_by_key, whole=True),
    "ssm_a": to("linear_attn.A_log", values=log_of_negative, rows=_by_key, whole=True),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": to("linear_attn.out_proj", columns=_columns_by_key),
}

PATH = INSIDE + "model.layers.{}."

DELTA_NET: dict[str, Architecture] = {
    "qwen3next": Architecture(delta_net("qwen3_5_moe"), OUTSIDE, GROUPED, PATH),
    "qwen35": Architecture(delta_net("qwen3_5"), OUTSIDE, TILED, PATH),
    "qwen35moe": Architecture(delta_net("qwen3_5_moe"), OUTSIDE, TILED, PATH),
}
