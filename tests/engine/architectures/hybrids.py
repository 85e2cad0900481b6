"""Tiny configurations of the models with recurrent layers."""

from tests.engine.architectures.parts import (
    FULL,
    GATED_DELTA,
    KDA,
    LINEAR,
    MLA,
    MOE,
    SLIDING,
    WINDOW,
    Config,
    merged,
)

GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.6,
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_proj_bias": True,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_conv_bias": True,
}  # fmt: skip

NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": True, "ssm_state_size": 16, "conv_kernel": 4,
    "n_groups": 2, "use_bias": True, "use_conv_bias": True,
}  # fmt: skip

HYBRIDS: dict[str, Config] = {
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2,
                    "num_swa_attention_heads": 4, "num_swa_key_value_heads": 1},
    "bailing_hybrid": merged(MOE, MLA, num_hidden_layers=4, layer_group_size=2, group_norm_size=2, use_qk_norm=True),
    "bailing_moe_linear": merged(MOE, num_hidden_layers=4, layer_group_size=2, group_norm_size=2, use_qk_norm=True,
                                 partial_rotary_factor=0.5),
    "bailing_moe_v3": merged(MOE, MLA, num_hidden_layers=4, layer_group_size=2,
                             moe_shared_expert_intermediate_size=48),
    "falcon_h1": {"mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_n_groups": 2,
                  "mamba_n_heads": 4, "mamba_rms_norm": True, "lm_head_multiplier": 0.5, "mamba_proj_bias": True,
                  "projectors_bias": True},
    "gear": {"num_hidden_layers": 4, "layer_types": ["conv_mixer", SLIDING, FULL, "conv_mixer"], "sliding_window": WINDOW,
             "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    "granitemoehybrid": merged(MOE, GRANITE, position_embedding_type="nope"),
    "jamba": merged(MOE, attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2,
                    mamba_d_conv=4, mamba_d_state=8, mamba_expand=2, mamba_proj_bias=True),
    "kimi_k3": {"text_config": merged(MOE, MLA, linear_attn_config=KDA, hidden_act="situ", activation_situ_beta=2.0,
                                      attn_res_block_size=2, mla_use_output_gate=True)},
    "kimi_linear": merged(MOE, MLA, linear_attn_config=KDA, model_max_length=4096),
    "lfm2": {"norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 16,
             "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 96,
             "layer_types": ["conv", FULL, "conv"]},
    "lfm2-vl": {"text_config": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 96,
        "full_attn_idxs": [1]}},
    "lfm2_moe": merged(MOE, use_expert_bias=True, num_dense_layers=1, norm_eps=1e-5, conv_bias=True, conv_L_cache=3,
                       layer_types=["conv", FULL, "conv"]),
    "longcat_flash_ngram": merged(MOE, MLA, ffn_hidden_size=96, moe_topk=2, expert_ffn_hidden_size=48,
                                  zero_expert_num=2, num_layers=2, mla_scale_q_lora=True, mla_scale_kv_lora=True,
                                  ngram_vocab_size_ratio=4, emb_neighbor_num=3, emb_split_num=2),
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": True, "use_conv_bias": True, "time_step_rank": 8,
              "use_bcdt_rms": True},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "conv_kernel": 4, "n_groups": 2, "use_bias": True,
               "use_conv_bias": True, "time_step_limit": (0.001, 100.0), "time_step_rank": 8},
    "nemotron_h": merged(NEMOTRON, hybrid_override_pattern="M*-M"),
    "olmo_hybrid": merged(GATED_DELTA, linear_allow_neg_eigval=True, layer_types=[LINEAR, FULL, LINEAR, FULL]),
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_num_heads": 4,
               "mamba_step": 2, "num_hidden_layers": 4},
    "prism_hadamard_qwen35": {
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512}],
        "text_config": merged(GATED_DELTA, intermediate_size=512)},
    "qwen3_5": {"text_config": merged(GATED_DELTA, tie_word_embeddings=True)},
    "qwen3_5_moe": {"text_config": merged(MOE, GATED_DELTA)},
    "qwen3_next": merged(MOE, GATED_DELTA),
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 5.0, "attention_window_size": WINDOW,
                        "block_types": ["recurrent", "attention", "recurrent"], "num_key_value_heads": 1},
    "rwkv7": {"norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
              "decay_low_rank_dim": 8},
}  # fmt: skip
