"""A tiny model of every architecture that mlx-lm has, built from the configurations beside this file."""

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from tests.engine import tiny
from tests.engine.architectures.attention import ATTENTION
from tests.engine.architectures.experts import EXPERTS
from tests.engine.architectures.hybrids import HYBRIDS
from tests.engine.architectures.parts import BASE, Config, merged

# By the module's name; what follows a colon tells variants of one module apart.
CONFIGS: dict[str, Config] = merged(ATTENTION, EXPERTS, HYBRIDS)

# What mlx-lm itself cannot run on a CPU, or not rightly, and why. The engine refuses them at load.
REFUSED = {
    "bitnet": "mlx-lm has its matrix product as a Metal kernel only (refused elsewhere)",
    "muse_spark": "mlx-lm has its norms and its routing as Metal kernels only (refused elsewhere)",
    "olmo": "mlx-lm adds the name of a mask to its scores, and fails on prompts of more than one token",
    "phi3small": "mlx-lm adds a boolean mask to its scores: tokens see later ones, and what a prompt brings depends on "
    "how it is cut",
}

# Where mlx-lm's code contradicts itself, so that the reference had to be repaired.
REPAIRED = {
    "plamo3": "mlx-lm's own cache keeps one token less than its masks let a prompt see; compared with one that has it",
}

RUNNABLE = sorted(CONFIGS.keys() - REFUSED.keys())


def modules() -> list[str]:
    """The modules of the installed mlx-lm that define an architecture."""
    names = [info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [name for name in names if hasattr(_module(name), "ModelArgs")]


def module_of(name: str) -> str:
    return name.partition(":")[0]


def build(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """The tiny model of this name, float32, evaluated, no weight at a neutral value."""
    module = _module(module_of(name))
    config = merged(BASE, {"model_type": module_of(name)}, CONFIGS[name])
    if "text_config" in config:
        inner = {"model_type": module_of(name)}
        config["text_config"] = merged(BASE, inner, config["text_config"], **changes)
    else:
        config |= changes
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    tiny.randomize(model, seed)
    return model


def make_cache(name: str, model: nn.Module) -> list[Any]:
    """mlx-lm's own caches for the model, as the reference."""
    caches = make_prompt_cache(model)
    if module_of(name) == "plamo3":
        return [RotatingKVCache(c.max_size + 1) if isinstance(c, RotatingKVCache) else c for c in caches]
    return caches


def _module(name: str) -> ModuleType:
    # mlx-lm's OLMo leaves the interpreter where this is missing, and uses nothing of it.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{name}")
