"""The one place where layers of a loaded model are replaced: on a CPU and on CUDA, by layers on this program's kernels.

Nothing happens on Metal. The replacements are per model: other models, and mlx-lm's own code, stay as they are.
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from metalctl.engine import cuda_layers, decoder_layers
from metalctl.engine import native_layers as native
from metalctl.engine.replacing import difference, direct_children, kind, norm_factor, with_call_of
from metalctl.engine.rotary import inverse_frequencies
from metalctl.engine.siblings import Siblings
from metalctl.kernels import dispatch
from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.build import BuildError, build
from metalctl.kernels.cpu.library import Gate, LibraryError, Turns

CLOSE = 1e-4  # of the largest value; the same formula computed otherwise differs by less
_FLOATS = (mx.float16, mx.bfloat16, mx.float32)


_reason = "not prepared"  # why there are no kernels


def prepare(cache: Path, notice: Callable[[str], None]) -> None:
    """Load the CPU kernels, compiling them if need be. Does nothing on a Mac, or where MLX computes on a GPU.

    `notice` is called before something that takes long, and with the reason when there will be no kernels.
    """
    global _reason
    if mx.default_device() != mx.cpu:
        _reason = "MLX's own: this machine computes on its GPU"
        return
    if sys.platform == "darwin":
        _reason = "MLX's own"
        return
    # MLX would otherwise run the system's compiler during the first step, or fail where there is none.
    mx.disable_compile()
    if library.loaded():
        return
    try:
        library.load(build(cache, notice).library)
    except (BuildError, LibraryError) as error:
        _reason = f"MLX's own, which are slow on a CPU: {error}"
        notice(f"The CPU kernels cannot be used, so models will run slowly: {error}.")


def status() -> str:
    """What computes here, in a few words: the instruction set and threads of our kernels, or why not they."""
    return library.description() if library.loaded() else _reason


def accelerate(model: nn.Module, ready: Iterable[nn.Module] | None = None) -> list[str]:
    """Replace the layers of `model` that the loaded kernels can compute; returns what was done, for people.

    `ready` yields the model's parts as their weights come; None: all are there. Frees the weights as they were, one
    layer at a time. Replaces nothing where no kernels are loaded.
    """
    if dispatch.platform() == "cuda":
        _await(ready)
        return cuda_layers.accelerate(model)
    if not library.loaded():
        _await(ready)
        return []
    replaced: Counter[str] = Counter()
    siblings: dict[int, Siblings] = {}
    for parent in model.modules():
        shared = native.siblings()
        siblings |= {id(module): shared for module in direct_children(parent)}
    for module in chain(ready or (), model.modules()):
        if type(module) in _LEAVES:
            replaced[_LEAVES[type(module)](module, siblings[id(module)])] += 1
    activations: dict[Hashable, Gate | None] = {}
    for module in model.modules():
        replaced[_composite(module, activations)] += 1
    proofs: dict[Hashable, bool] = {}
    for module in model.modules():
        replaced["decoder layers"] += decoder_layers.fuse(module, proofs)
    mx.clear_cache()
    counts = [f"{count} {name}" for name, count in replaced.items() if name and count]
    return [f"CPU kernels ({library.description()}): {', '.join(counts)}"] if counts else []


def _await(ready: Iterable[nn.Module] | None) -> None:
    for _ in ready or ():
        pass


# -- one row a kind of layer: what replaces it, and what that is called; "" where it stays


def _linear(module: Any, siblings: Siblings) -> str:
    if not _packable(module):
        return ""
    module.__class__ = native.QuantizedLinear if isinstance(module, nn.QuantizedLinear) else native.Linear
    module.adopt(siblings)
    return "linear layers"


def _embedding(module: Any, siblings: Siblings) -> str:
    if not _packable(module):
        return ""
    module.__class__ = native.QuantizedEmbedding if isinstance(module, nn.QuantizedEmbedding) else native.Embedding
    module.adopt()
    return "embeddings"


def _experts(module: Any, siblings: Siblings) -> str:
    if not _packable(module):
        return ""
    module.__class__ = native.QuantizedExperts if isinstance(module, QuantizedSwitchLinear) else native.Experts
    module.adopt()
    return "expert layers"


def _norm(module: Any, siblings: Siblings) -> str:
    module.__class__ = native.RMSNorm
    module.adopt(module["weight"])
    return "norms"


def _rope(module: Any, siblings: Siblings) -> str:
    rotation = inverse_frequencies(module)
    if rotation is None:
        return ""
    module.__class__ = with_call_of(native.RoPE, type(module))
    module.adopt(Turns(rotation.inverse_frequencies.tolist(), rotation.traditional, rotation.scale))  # type: ignore[arg-type]
    return "ropes"


_LEAVES: dict[type, Callable[[Any, Siblings], str]] = {
    nn.Linear: _linear,
    nn.QuantizedLinear: _linear,
    nn.Embedding: _embedding,
    nn.QuantizedEmbedding: _embedding,
    SwitchLinear: _experts,
    QuantizedSwitchLinear: _experts,
    nn.RMSNorm: _norm,
    nn.RoPE: _rope,
    Llama3RoPE: _rope,
    YarnRoPE: _rope,
}


def _packable(module: Any) -> bool:
    if "scales" in module:
        return "biases" in module and library.can_pack(module.bits, module.group_size, module.mode)
    return module["weight"].dtype in _FLOATS


# -- modules that are recognised by what they compute


def _composite(module: Any, activations: dict[Hashable, Gate | None]) -> str:
    if type(module) is SwitchGLU and type(module.activation) is SwiGLU:
        if not all(isinstance(p, native.NativeExperts) for p in (module.gate_proj, module.up_proj, module.down_proj)):
            return ""
        module.__class__ = native.GatedExperts
        module.adopt()
        return "expert MLPs"
    if set(module.children()) == {"gate_proj", "up_proj", "down_proj"} and not isinstance(module, SwitchGLU):
        return _gated_mlp(module, activations)
    if type(module).__name__.endswith("RMSNorm") and set(module) == {"weight"} and hasattr(module, "eps"):
        return _unknown_norm(module)
    return ""


def _gated_mlp(module: Any, activations: dict[Hashable, Gate | None]) -> str:
    """An MLP whose gate is one of those we know. `activations` has what was found for kinds of MLPs."""
    if not all(isinstance(part, native.NativeLinear) for part in module.children().values()):
        return ""
    sort = kind(module)
    if sort not in activations:
        activations[sort] = _activation(module)
    activation = activations[sort]
    if activation is None:
        return ""
    module.__class__ = with_call_of(native.GatedMLP, type(module))
    module.activation = activation
    module.gated = native.gated(module.gate_proj, module.up_proj, activation)
    return "MLPs"


def _activation(module: Any) -> Gate | None:
    """The one that comes closest to the module's result on a random input, if it is the same but for rounding."""
    x = mx.random.normal((2, module.gate_proj.native.layout.k), key=mx.random.key(0))
    expected = module(x)

    def off(activation: Gate) -> float:
        hidden = native.gated(module.gate_proj, module.up_proj, activation)(x)
        return difference(expected, module.down_proj.operation(hidden))

    least, found = min((off(activation), activation) for activation in (Gate.SILU, Gate.GELU_TANH, Gate.GELU))
    return found if least <= CLOSE else None


def _unknown_norm(module: Any) -> str:
    factor = None if isinstance(module, native.RMSNorm) else norm_factor(module, CLOSE)
    if factor is None:
        return ""
    module.__class__ = native.RMSNorm
    module.adopt(factor)
    return "norms"
