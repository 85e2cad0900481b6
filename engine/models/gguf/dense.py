"""Architectures with one feed-forward network a layer, and Mixtral, which GGUF calls llama."""

from collections.abc import Callable
from typing import Any

import numpy as np

from metalctl.engine.errors import UnsupportedModelError
from metalctl.engine.models.gguf.mapping import (
    Architecture,
    Config,
    Keys,
    Names,
    minus_one,
    query_key_value,
    shares,
    to,
)
from metalctl.engine.models.gguf.transformer import (
    ATTENTION,
    GATED,
    OUTSIDE,
    PAIRED,
    QK_NORM,
    common,
    layer_norm,
    llama3_frequencies,
    longrope,
    partial_rotary,
    rms,
)


def llama(keys: Keys) -> Config:
    """Dense, or with experts: then it is what mlx-lm calls Mixtral."""
    if not keys.integer("expert_count", 0):
        return rms(keys, "llama")
    return {
        **rms(keys, "mixtral"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def mistral3(keys: Keys) -> Config:
    config = rms(keys, "ministral3")
    parameters = {
        "rope_theta": config["rope_theta"],
        "rope_type": "default",
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
        "original_max_position_embeddings": keys.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        **(config["rope_scaling"] or {}),
    }
    return {**config, "rope_parameters": parameters}


def gemma2(keys: Keys) -> Config:
    config = rms(keys, "gemma2")
    return {
        **config,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
    }


def gemma3(keys: Keys) -> Config:
    config = rms(keys, "gemma3_text")
    return {
        **config,
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "sliding_window": keys.integer("attention.sliding_window", config["max_position_embeddings"]),
        "sliding_window_pattern": 6 if keys.integer("attention.sliding_window", 0) else 1,
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
    }


def _query_scale(config: Config, layers_of_27b: int) -> int:
    """Gemma's 27B models scale by the width of a head's share of the hidden size; it is not in the file."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def phi2(keys: Keys) -> Config:
    config = layer_norm(keys, "phi")
    return {**config, "partial_rotary_factor": partial_rotary(keys, config)}


def phi3(keys: Keys) -> Config:
    config = rms(keys, "phi3")
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    if keys.has("rope_factors_long.weight"):
        config["rope_scaling"] = longrope(keys, original)
    elif config["rope_scaling"] and config["rope_scaling"]["type"] != "linear":
        kind = config["rope_scaling"]["type"]
        raise UnsupportedModelError(f"{keys.header.name}: mlx-lm has no {kind!r} scaling of positions for Phi-3.")
    return {
        **config,
        "partial_rotary_factor": partial_rotary(keys, config),
        "original_max_position_embeddings": original,
    }


def granite(keys: Keys, model_type: str = "granite") -> Config:
    config = rms(keys, model_type)
    return {
        **config,
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def olmo2(keys: Keys) -> Config:
    """With a sliding window it is what mlx-lm calls Olmo 3."""
    window = keys.integer("attention.sliding_window", 0)
    if not window:
        return rms(keys, "olmo2")
    return {**rms(keys, "olmo3"), "sliding_window": window, "layer_types": layer_types(keys, every=4)}


def layer_types(keys: Keys, every: int) -> list[str]:
    """By the file's own list; without one, every so many layers are global."""
    layers = keys.layers
    local = keys.header.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if not isinstance(local, np.ndarray):
        local = [(index + 1) % every != 0 for index in range(layers)]
    return ["sliding_attention" if entry else "full_attention" for entry in local[:layers]]


def stablelm(keys: Keys) -> Config:
    config = layer_norm(keys, "stablelm")
    return {
        **config,
        "partial_rotary_factor": partial_rotary(keys, config),
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not keys.has("blk.0.ffn_norm.weight"),
    }


def starcoder2(keys: Keys) -> Config:
    return {**common(keys, "starcoder2"), "norm_epsilon": keys.number("attention.layer_norm_epsilon")}


def smollm3(keys: Keys) -> Config:
    return {**rms(keys, "smollm3"), "no_rope_layer_interval": 4}


def glm4(keys: Keys) -> Config:
    config = rms(keys, "glm4")
    return {**config, "partial_rotary_factor": partial_rotary(keys, config)}


def exaone4(keys: Keys) -> Config:
    """Global layers have no rotary positions, but where all layers are global all have them."""
    config = rms(keys, "exaone4")
    window = keys.integer("attention.sliding_window", 0) or None
    pattern = "".join("L" if kind == "sliding_attention" else "G" for kind in layer_types(keys, every=4))
    return {**config, "sliding_window": window, "sliding_window_pattern": pattern if window else None}


def hunyuan(keys: Keys) -> Config:
    """The file has the base after scaling."""
    scaling = {"type": "dynamic", "alpha": 1.0, "factor": 1.0}
    qk_norm = keys.has("blk.0.attn_q_norm.weight")
    return {**rms(keys, "hunyuan_v1_dense"), "rope_scaling": scaling, "use_qk_norm": qk_norm}


def ernie(keys: Keys) -> Config:
    config = rms(keys, "ernie4_5")
    return {**config, "use_bias": config["attention_bias"]}


def command_r(keys: Keys) -> Config:
    return {
        **layer_norm(keys, "cohere"),
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def cohere2(keys: Keys) -> Config:
    return {
        **layer_norm(keys, "cohere2"),
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": 4,
    }


def _typed(model_type: str) -> Callable[[Keys], Config]:
    return lambda keys: rms(keys, model_type)


SHIFTED_OUTSIDE: Names = {**OUTSIDE, "output_norm": to("model.norm", values=minus_one)}
GEMMA: Names = {
    **ATTENTION,
    **GATED,
    "attn_norm": to("input_layernorm", values=minus_one),
    "ffn_norm": to("post_attention_layernorm", values=minus_one),
}
GEMMA2: Names = {
    **GEMMA,
    "post_attention_norm": to("post_attention_layernorm", values=minus_one),
    "ffn_norm": to("pre_feedforward_layernorm", values=minus_one),
    "post_ffw_norm": to("post_feedforward_layernorm", values=minus_one),
}
GEMMA3: Names = {
    **GEMMA2,
    "attn_q_norm": to("self_attn.q_norm", values=minus_one),
    "attn_k_norm": to("self_attn.k_norm", values=minus_one),
}
POST_NORM: Names = {
    **ATTENTION,
    **GATED,
    **QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI2: Names = {
    **ATTENTION,
    "attn_qkv": to("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", rows=query_key_value),
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
PHI3: Names = {
    **ATTENTION,
    "attn_qkv": "self_attn.qkv_proj",
    **{f"attn_{name}": to("self_attn.qkv_proj", part=part) for part, name in enumerate("qkv")},
    "ffn_gate": to("mlp.gate_up_proj", part=0),
    "ffn_up": to("mlp.gate_up_proj", part=1),
    "ffn_down": "mlp.down_proj",
}
GLM4: Names = {
    **ATTENTION,
    "ffn_gate": to("mlp.gate_up_proj", part=0),
    "ffn_up": to("mlp.gate_up_proj", part=1),
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
HUNYUAN: Names = {
    **ATTENTION,
    **GATED,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
STABLELM: Names = {
    **ATTENTION,
    **GATED,
    "attn_q_norm": to("self_attn.q_layernorm.norms.{}", rows=shares, each="num_attention_heads"),
    "attn_k_norm": to("self_attn.k_layernorm.norms.{}", rows=shares, each="num_key_value_heads"),
}
MIXTRAL_EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.switch_mlp.gate_proj",
    "ffn_up_exps": "block_sparse_moe.switch_mlp.up_proj",
    "ffn_down_exps": "block_sparse_moe.switch_mlp.down_proj",
}

LLAMA: Names = {**ATTENTION, **GATED, **PAIRED}
PLAIN: Names = {**ATTENTION, **GATED}


def _row(config: Callable[[Keys], Config], layers: Names, outside: Names = OUTSIDE, **more: Any) -> Architecture:
    return Architecture(config, outside, layers, prepare=llama3_frequencies, **more)


DENSE: dict[str, Architecture] = {
    "llama": _row(llama, {**LLAMA, **MIXTRAL_EXPERTS}),
    "mistral3": _row(mistral3, LLAMA),
    "qwen2": _row(_typed("qwen2"), PLAIN),
    "qwen3": _row(_typed("qwen3"), {**PLAIN, **QK_NORM}),
    "gemma": _row(_typed("gemma"), GEMMA, SHIFTED_OUTSIDE, wide_range=True),
    "gemma2": _row(gemma2, GEMMA2, SHIFTED_OUTSIDE, wide_range=True),
    "gemma3": _row(gemma3, GEMMA3, SHIFTED_OUTSIDE, wide_range=True),
    "phi2": _row(phi2, PHI2, {**OUTSIDE, "output_norm": "model.final_layernorm"}),
    "phi3": _row(phi3, PHI3),
    "granite": _row(granite, LLAMA),
    "olmo2": _row(olmo2, POST_NORM),
    "stablelm": _row(stablelm, STABLELM),
    "starcoder2": _row(starcoder2, {**ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "smollm3": _row(smollm3, LLAMA),
    "glm4": _row(glm4, GLM4),
    "exaone4": _row(exaone4, POST_NORM),
    "command-r": _row(command_r, {**PLAIN, **QK_NORM}),
    "cohere2": _row(cohere2, PLAIN),
    "seed_oss": _row(_typed("seed_oss"), {**PLAIN, "post_attention_norm": "post_attention_layernorm"}),
    "ernie4_5": _row(ernie, PLAIN),
    "hunyuan-dense": _row(hunyuan, HUNYUAN),
}
