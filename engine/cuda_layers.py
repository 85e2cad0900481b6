"""On CUDA, what mlx-lm and MLX compute slowly, by this program's kernels.

mlx-lm has kernels for its recurrences on Metal only: elsewhere it goes through a prompt in a Python loop, an operation
a token. MLX's product of a few rows with a 4-bit matrix reads the matrix once for every row, and one with a matrix of
16 bits takes the host longer to launch than a small matrix takes the device.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, ssm

from metalctl.engine import cuda_attention
from metalctl.engine.replacing import direct_children
from metalctl.engine.siblings import Siblings
from metalctl.kernels import linear_rows
from metalctl.kernels.quantized_rows import quantized_rows
from metalctl.kernels.recurrent import gated_delta as run_gated_delta
from metalctl.kernels.recurrent import state_space_step

MOST_ROWS = 64  # of a product with matrices laid end to end: beyond, its parts are large and would be copied

_ssm_attn = ssm.ssm_attn


class Linear(nn.Linear):
    siblings: Siblings

    def __call__(self, x: mx.array) -> mx.array:
        return self.siblings(self, x)


class QuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = quantized_rows(x, self.weight, self.scales, self.biases, group_size=self.group_size, bits=self.bits)
        return y + self.bias if "bias" in self else y


class QuantizedEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return quantized_rows(x, self.weight, self.scales, self.biases, group_size=self.group_size, bits=self.bits)


_QUANTISED: dict[type, type] = {nn.QuantizedLinear: QuantizedLinear, nn.QuantizedEmbedding: QuantizedEmbedding}


def accelerate(model: nn.Module) -> list[str]:
    """Replace what of `model` the kernels can compute; returns what was done, for people."""
    install()
    replaced: Counter[str] = Counter()
    for parent in model.modules():
        siblings = Siblings(_Join, lambda member, x: _biased(linear_rows.linear_rows(x, [member.weight]), [member])[0])
        for module in direct_children(parent):
            if type(module) in _QUANTISED and getattr(module, "mode", None) == "affine":
                module.__class__ = _QUANTISED[type(module)]
                replaced["quantised layers"] += 1
            elif type(module) is nn.Linear and module.weight.dtype in (mx.float16, mx.bfloat16):
                module.__class__ = Linear
                object.__setattr__(module, "siblings", siblings)
                replaced["linear layers"] += 1
    for module in model.modules():
        replaced["attentions"] += cuda_attention.fuse(module)
    counts = [f"{count} {name}" for name, count in replaced.items() if count]
    return [f"CUDA kernels: {', '.join(counts)}"] if counts else []


class _Join:
    """Some layers' products: of few rows in one operation. Large matrices are laid end to end for that."""

    def __init__(self, members: list[nn.Linear]):
        self._members = members
        self._joined: mx.array | None = None
        if not all(map(linear_rows.can_hold, self._weights)):
            self._bounds = list(itertools.accumulate(weight.shape[0] for weight in self._weights))[:-1]
            joined = mx.concatenate(self._weights)
            for member, weight in zip(members, mx.split(joined, self._bounds), strict=True):
                member.weight = weight  # a view
            self._joined = joined.T
            mx.eval(self._joined, *self._weights)

    @property
    def _weights(self) -> list[mx.array]:
        return [member.weight for member in self._members]

    def __call__(self, x: mx.array) -> list[mx.array]:
        if self._joined is not None and x.size <= MOST_ROWS * x.shape[-1]:
            products = list(mx.split(x @ self._joined, self._bounds, axis=-1))
        else:
            products = linear_rows.linear_rows(x, self._weights)
        return _biased(products, self._members)


def _biased(products: Sequence[mx.array], layers: list[nn.Linear]) -> list[mx.array]:
    return [y + layer.bias if "bias" in layer else y for y, layer in zip(products, layers, strict=True)]


def install() -> None:
    """Put the recurrences in the place of mlx-lm's. Idempotent."""
    gated_delta.gated_delta_ops = gated_delta_ops
    ssm.ssm_attn = ssm_attn


def gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's function of this name."""
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[3]), dtype=mx.float32)
    return run_gated_delta(q, k, v, g, beta, state, mask)


def ssm_attn(
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    **options: Any,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's function of this name: a single token by the kernel, anything else as it was."""
    if x.shape[1] == 1 and state is not None and mask is None and lengths is None:
        step = ssm.compute_dt(dt, dt_bias, time_step_limit)
        return state_space_step(x, A_log, B, C, D, step, state)
    arguments = (x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    return _ssm_attn(*arguments, **options)
