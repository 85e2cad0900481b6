"""What a rotary embedding of MLX or mlx-lm rotates by, whatever its class."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE


@dataclass(frozen=True, slots=True)
class Rotation:
    """Pair i of the first 2 n elements is turned by `position * scale * inverse_frequencies[i]`, float32 `[n]`. Pairs
    are neighbours if `traditional`, else n apart."""

    inverse_frequencies: mx.array
    traditional: bool
    scale: float


def inverse_frequencies(module: Any) -> Rotation | None:
    """The rotation that `module` is, or None where it is of another kind."""
    if type(module) is nn.RoPE and module.dims and module.dims % 2 == 0:
        half = module.dims // 2
        exponents = mx.arange(0, -half, -1).astype(mx.float32) * (mx.log(mx.array(float(module.base))) / half)
        return Rotation(mx.exp(exponents), module.traditional, module.scale)
    if type(module) is Llama3RoPE or (type(module) is YarnRoPE and module.mscale == 1.0):
        return Rotation(1 / module._freqs, module.traditional, 1.0)
    return None
