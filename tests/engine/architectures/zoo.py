"""A tiny model of every architecture that mlx-lm has, built from the configurations beside this file."""

import importlib
import pkgutil
import sys
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models

from tests.engine import tiny
from tests.engine.architectures.attention import ATTENTION
from tests.engine.architectures.experts import EXPERTS
from tests.engine.architectures.hybrids import HYBRIDS
from tests.engine.architectures.parts import BASE, Config, merged

# By the module's name; what follows a colon tells variants of one module apart.
CONFIGS: dict[str, Config] = merged(ATTENTION, EXPERTS, HYBRIDS)


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


def _module(name: str) -> ModuleType:
    # mlx-lm's OLMo leaves the interpreter where this is missing, and uses nothing of it.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{name}")
