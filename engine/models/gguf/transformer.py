"""What all transformers have in common in GGUF: names of tensors, keys of metadata, the scaling of positions."""

import math
from typing import Any

import numpy as np

from metalctl.engine.errors import UnsupportedModelError
from metalctl.engine.models.gguf.mapping import Config, Keys, Names, interleave, to

POOLING = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # how an embedding model makes one vector of its states

OUTSIDE: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": None,
    "rope_factors_long": None,
    "rope_factors_short": None,
}

ATTENTION: Names = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_rot_embd": None,
    "rope_freqs": None,
}

GATED: Names = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

QK_NORM: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

# llama.cpp keeps the rotary dimensions of these side by side
PAIRED: Names = {
    "attn_q": to("self_attn.q_proj", rows=interleave("num_attention_heads")),
    "attn_k": to("self_attn.k_proj", rows=interleave("num_key_value_heads")),
}


def common(keys: Keys, model_type: str) -> Config:
    """What nearly every config has. `tie_word_embeddings` and the biases follow from which tensors there are."""
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": keys.layers,
        "intermediate_size": keys.integer("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": keys.integer("attention.key_length", hidden // heads),
        "vocab_size": keys.rows("token_embd.weight"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys),
        "tie_word_embeddings": not keys.has("output.weight"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        "pooling": POOLING.get(keys.integer("pooling_type", 0)),
    }


def rms(keys: Keys, model_type: str) -> Config:
    return {**common(keys, model_type), "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def layer_norm(keys: Keys, model_type: str) -> Config:
    return {**common(keys, model_type), "layer_norm_eps": keys.number("attention.layer_norm_epsilon")}


def rope_scaling(keys: Keys) -> Config | None:
    """mlx-lm's description of how rotary positions are stretched; None: not at all."""
    name = _frequency_factors(keys)
    if name:
        # `llama3_frequencies` puts the factors themselves in place; this is what they mostly come from.
        return {
            "rope_type": "llama3",
            "factor": max(keys.tensor(name)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    kind = keys.text("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        log_multiplier = keys.optional("rope.scaling.yarn_log_multiplier")
        if log_multiplier:
            scaling["mscale"], scaling["mscale_all_dim"] = 1.0, log_multiplier
        attention = keys.optional("rope.scaling.attn_factor")
        if attention is not None and attention != 1 and factor > 1:
            scaling["mscale"] = (attention * (1 + 0.1 * math.log(factor)) - 1) / (0.1 * math.log(factor))
        return scaling
    if kind == "longrope":
        return longrope(keys, original)
    raise UnsupportedModelError(
        f"{keys.header.name}: rotary positions are scaled by the rule {kind!r}, which is unknown."
    )


def longrope(keys: Keys, original: int) -> Config:
    """mlx-lm turns by the long factors always; where no sequence will be longer than the original context, those are
    the short ones here, as the model was trained.
    """
    short = keys.tensor("rope_factors_short.weight")
    stays_short = keys.max_model_len is not None and keys.max_model_len <= original
    return {
        "type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": short,
        "long_factor": short if stays_short else keys.tensor("rope_factors_long.weight"),
    }


def _frequency_factors(keys: Keys) -> str | None:
    """The tensor with a factor for each pair of rotary dimensions, where there is one."""
    return next((name for name in ("rope_freqs.weight", "blk.0.rope_freqs.weight") if keys.has(name)), None)


def llama3_frequencies(model: Any, keys: Keys) -> None:
    """Puts the frequency factors of `rope_freqs.weight` in place of those that mlx-lm computed."""
    name = _frequency_factors(keys)
    if not name:
        return
    import mlx.core as mx
    from mlx_lm.models.rope_utils import Llama3RoPE

    factors = np.array(keys.tensor(name), np.float32)
    base = keys.number("rope.freq_base", 10000.0)
    for _, module in model.named_modules():
        if isinstance(module, Llama3RoPE):
            exponents = np.arange(0, module.dims, 2, dtype=np.float32) / module.dims
            module._freqs = mx.array((base**exponents).astype(np.float32) * factors)


def partial_rotary(keys: Keys, config: Config) -> float:
    """The share of a head's dimensions that turn."""
    return keys.integer("rope.dimension_count", config["head_dim"]) / float(config["head_dim"])
