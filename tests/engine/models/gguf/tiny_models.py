"""Tiny models of every architecture, with the metadata that llama.cpp's converter writes for them."""

import math
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from tests.engine.models.gguf.tiny_configs import CONFIGS, CTX, FF, HEADS, KV, LONG, D, H, L, V
from tests.engine.models.gguf.writer import tiny_model, write_gguf

SAME_ARCHITECTURE = {
    "mixtral": "llama",
    "granitehybrid-dense": "granitehybrid",
    "olmo3": "olmo2",
    "stablelm-qk": "stablelm",
    "exaone4-global": "exaone4",
    "deepseek3": "deepseek2",
    "gemma4-experts": "gemma4",
    "phi3-long": "phi3",
}

BASE: dict[str, Any] = {
    "context_length": CTX,
    "embedding_length": H,
    "block_count": L,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV,
    "attention.key_length": D,
    "attention.value_length": D,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": V,
}
LAYER_NORM: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "attention.layer_norm_rms_epsilon"},
    "attention.layer_norm_epsilon": 1e-5,
}
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
GRANITE: dict[str, Any] = {
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
    "rope.dimension_count": D,
}
MAMBA2: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
}
MAMBA2_GROUPED: dict[str, Any] = {**MAMBA2, "ssm.group_count": 2}
HALF: dict[str, Any] = {"rope.dimension_count": D // 2}

DELTA_NET: dict[str, Any] = {
    **BASE,
    "block_count": 4,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "full_attention_interval": 4,
}

METADATA: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "rope.dimension_count": D},
    "mixtral": {**BASE, "rope.dimension_count": D, "expert_count": 4, "expert_used_count": 2},
    "mistral3": {
        **BASE,
        "rope.dimension_count": D,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1,
    },
    "qwen2": BASE,
    "qwen3": BASE,
    "qwen2moe": {**BASE, **EXPERTS, "expert_shared_feed_forward_length": 64},
    "qwen3moe": {**BASE, **EXPERTS},
    "gemma": BASE,
    "gemma2": {
        **BASE,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention.sliding_window": 4096,
    },
    "gemma3": {**BASE, "block_count": 6, "attention.sliding_window": 8, "rope.freq_base_swa": 5000.0},
    "phi2": {**LAYER_NORM, **HALF, "attention.head_count_kv": HEADS},
    "phi3": {
        **BASE,
        "rope.dimension_count": D,
        "rope.scaling.original_context_length": CTX,
        "attention.sliding_window": 0,
    },
    "granite": {**BASE, **GRANITE},
    "granitemoe": {**BASE, **GRANITE, "expert_count": 4, "expert_used_count": 2},
    "granitehybrid": {
        **BASE,
        **GRANITE,
        **MAMBA2,
        "attention.head_count_kv": [0, KV, 0],
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": 64,
        "rope.scaling.finetuned": False,
    },
    "granitehybrid-dense": {
        **BASE,
        **GRANITE,
        **MAMBA2,
        "attention.head_count_kv": [0, KV, 0],
        "rope.scaling.finetuned": True,
    },
    "lfm2": {**BASE, "attention.head_count_kv": [0, KV, 0], "shortconv.l_cache": 3},
    "nemotron_h": {
        **BASE,
        **MAMBA2_GROUPED,
        "attention.head_count_kv": [0, KV, 0],
        "feed_forward_length": [0, 0, FF],
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": D,
    },
    "olmo2": BASE,
    "olmo3": {
        **BASE,
        "block_count": 4,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, True, False],
    },
    "stablelm": {**LAYER_NORM, **HALF, "use_parallel_residual": False},
    "stablelm-qk": {**LAYER_NORM, **HALF, "use_parallel_residual": True},
    "starcoder2": LAYER_NORM,
    "smollm3": {**BASE, "block_count": 4, "rope.dimension_count": D},
    "deepseek2": {
        **BASE,
        "attention.head_count_kv": 1,
        "attention.key_length": 32 + 16,
        "attention.value_length": 32,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 16,
        "attention.kv_lora_rank": 32,
        "attention.q_lora_rank": 32,
        "rope.dimension_count": 16,
        **EXPERTS,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    },
    "glm4": {**BASE, **HALF},
    "gpt-oss": {
        **BASE,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
        "attention.sliding_window": 8,
    },
    "exaone4": {
        **BASE,
        "block_count": 4,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, True, False],
    },
    "exaone4-global": BASE,
    "command-r": {**LAYER_NORM, "logit_scale": 0.25, "rope.scaling.type": "none"},
    "cohere2": {
        **LAYER_NORM,
        "block_count": 4,
        "logit_scale": 0.25,
        "attention.sliding_window": 8,
        "rope.dimension_count": D,
    },
    "qwen35": DELTA_NET,
    "qwen35moe": {**DELTA_NET, **EXPERTS, "expert_shared_feed_forward_length": 64},
    "qwen3next": {**DELTA_NET, **EXPERTS, "expert_shared_feed_forward_length": 64},
    "seed_oss": BASE,
    "hunyuan-dense": {**BASE, "rope.freq_base": 1000.0 * 50.0 ** (16 / 14), "rope.scaling.type": "none"},
    "ernie4_5": BASE,
    "olmoe": {**BASE, "attention.head_count_kv": HEADS, "expert_count": 4, "expert_used_count": 2},
    "glm4moe": {
        **BASE,
        **HALF,
        **EXPERTS,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
    },
    "lfm2moe": {
        **BASE,
        **EXPERTS,
        "attention.head_count_kv": [0, KV, 0],
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
    },
}
METADATA["deepseek3"] = {
    **METADATA["deepseek2"],
    "expert_gating_func": 2,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_log_multiplier": 0.1,
}
GEMMA4: dict[str, Any] = {
    **BASE,
    "block_count": 6,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "final_logit_softcapping": 30.0,
    "rope.freq_base_swa": 5000.0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
}
METADATA["gemma4"] = {
    **GEMMA4,
    "attention.shared_kv_layers": 3,
    "embedding_length_per_layer_input": 32,
    "feed_forward_length": [FF, FF, FF, 2 * FF, 2 * FF, 2 * FF],
}
METADATA["gemma4-experts"] = {
    **GEMMA4,
    **EXPERTS,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "attention.head_count_kv": [2, 2, 1] * 2,
}
METADATA["nemotron_h_moe"] = {
    **METADATA["nemotron_h"],
    **EXPERTS,
    "feed_forward_length": [0, 0, 32],
    "expert_shared_feed_forward_length": 64,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_group_count": 1,
}
METADATA["phi3-long"] = {
    **METADATA["phi3"],
    "rope.scaling.original_context_length": 128,
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(CTX / 128) / math.log(128)),
}
EXTRA = {
    case: {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)} for case in ("gemma4", "gemma4-experts")
}
EXTRA["phi3-long"] = {
    "rope_factors_long.weight": np.array(LONG, np.float32),
    "rope_factors_short.weight": np.ones(8, np.float32),
}

CASES = sorted(METADATA)


def write(case: str, path: Path, seed: int = 0, **options: Any) -> nn.Module:
    """Writes the case's file, and gives the model that it was made from."""
    model = tiny_model(CONFIGS[case], seed)
    options.setdefault("extra", EXTRA.get(case))
    write_gguf(path, SAME_ARCHITECTURE.get(case, case), CONFIGS[case], model, METADATA[case], **options)
    return model
