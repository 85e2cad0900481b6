"""Gemma 4: two kinds of layers, each with its head size, shared keys and values, embeddings a layer, experts."""

from metalctl.engine.models.gguf.dense import layer_types
from metalctl.engine.models.gguf.mapping import Architecture, Config, Keys, Names, halves, to
from metalctl.engine.models.gguf.transformer import ATTENTION, GATED, OUTSIDE, QK_NORM, rms

TURNING = 1e29  # factors of dimensions that turn are below that


def gemma4(keys: Keys) -> Config:
    config = rms(keys, "gemma4_text")
    kinds = layer_types(keys, every=6)
    heads = dict(zip(kinds, keys.each_layer("attention.head_count_kv"), strict=True))
    sizes = keys.each_layer("feed_forward_length")
    experts = keys.integer("expert_count", 0)
    share = keys.integer("attention.shared_kv_layers", 0)
    return {
        **config,
        "rope_scaling": None,
        "head_dim": keys.integer("attention.key_length_swa"),
        "global_head_dim": keys.integer("attention.key_length"),
        "num_key_value_heads": heads.get("sliding_attention", config["num_key_value_heads"]),
        "num_global_key_value_heads": heads.get("full_attention"),
        "attention_k_eq_v": _keys_are_values(keys, kinds),
        "num_kv_shared_layers": share,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": share > 0 and sizes[-1] == 2 * sizes[0],
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": kinds,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "rope_parameters": _rope(keys, config),
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": keys.integer("expert_used_count", 0) or None,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", 0) or None,
    }


def _keys_are_values(keys: Keys, kinds: list[str]) -> bool:
    whole = kinds.index("full_attention") if "full_attention" in kinds else 0
    return not keys.has(f"blk.{whole}.attn_v.weight")


def _rope(keys: Keys, config: Config) -> Config:
    """Of a global layer's dimensions only the first turn; the file marks the others by enormous factors."""
    factors = keys.tensor("rope_freqs.weight")
    turning = sum(factor < TURNING for factor in factors) / len(factors)
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": turning,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)},
    }


def _unused(layer: int, tensor: str, config: Config) -> bool:
    """Keys and values of layers that use those of a layer before."""
    shared = layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    return shared and tensor.startswith(("attn_k.", "attn_v.", "attn_k_norm."))


OUTSIDE_GEMMA4: Names = {
    **OUTSIDE,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

LAYERS: Names = {
    **ATTENTION,
    **GATED,
    **QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "layer_output_scale": to("layer_scalar", whole=True),
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": to("router.scale", whole=True),
    "ffn_down_exps.scale": to("router.per_expert_scale", whole=True),
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_up_exps": to("experts.switch_glu.gate_proj", "experts.switch_glu.up_proj", rows=halves),
    "ffn_gate_exps": "experts.switch_glu.gate_proj",
    "ffn_up_exps": "experts.switch_glu.up_proj",
    "ffn_down_exps": "experts.switch_glu.down_proj",
}

GEMMA4 = {"gemma4": Architecture(gemma4, OUTSIDE_GEMMA4, LAYERS, unused=_unused, wide_range=True)}
