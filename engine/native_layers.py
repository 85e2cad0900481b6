"""Layers of a loaded model on the CPU kernels.

Each takes the place of one of MLX's own, keeps its attributes, and holds its weights packed. Everything between layers
is float32, whatever the checkpoint's type.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from metalctl.engine.siblings import Siblings
from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Gate, Operation, Turns, Weight


def siblings() -> Siblings:
    """For the linear layers of one module."""
    return Siblings(
        lambda members: library.linear([m.native for m in members], [m.native_bias for m in members]).all,
        lambda member, x: member.operation(x),
    )


class NativeLinear(nn.Module):
    """What our two kinds of linear layer have in common."""

    native: Weight
    native_bias: mx.array | None
    operation: Operation
    siblings: Siblings | None

    def adopt(self, siblings: Siblings) -> None:
        """Pack the weights, and let go of them as they were."""
        self.native = _packed(self)
        self["packed"] = self.native.data
        bias = self.pop("bias", None)
        object.__setattr__(self, "native_bias", None if bias is None else _float32(bias))
        if self.native_bias is not None:
            self["bias"] = self.native_bias
        self.operation = library.linear([self.native], [self.native_bias])
        self.siblings = siblings

    def __call__(self, x: mx.array) -> mx.array:
        return self.siblings(self, x) if self.siblings is not None else self.operation(x)

    @property
    def weight(self) -> mx.array:
        """As floats `[n, k]`; made anew for whoever asks."""
        return _unpacked(self.native)

    def __setattr__(self, key: str, value: Any) -> None:
        if key != "weight":
            return super().__setattr__(key, value)
        # A model that changes its weights as it runs: from now on this is an ordinary layer.
        self.pop("packed")
        layer: Any = self
        layer.__class__ = nn.Linear
        layer.weight = value
        return None


class Linear(NativeLinear, nn.Linear):  # type: ignore[override]
    pass


class QuantizedLinear(NativeLinear, nn.QuantizedLinear):  # type: ignore[override]
    pass


class NativeEmbedding(nn.Module):
    native: Weight
    lookup: Operation
    operation: Operation

    def adopt(self) -> None:
        self.native = _packed(self)
        self["packed"] = self.native.data
        self.lookup = library.embedding(self.native)
        self.operation = library.linear([self.native])

    def __call__(self, ids: mx.array) -> mx.array:
        return self.lookup(ids if ids.dtype in (mx.int32, mx.uint32) else ids.astype(mx.int32))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.operation(x)

    @property
    def weight(self) -> mx.array:
        """As floats `[n, k]`; made anew for whoever asks."""
        return _unpacked(self.native)


class Embedding(NativeEmbedding, nn.Embedding):  # type: ignore[override]
    pass


class QuantizedEmbedding(NativeEmbedding, nn.QuantizedEmbedding):  # type: ignore[override]
    pass


class NativeExperts(nn.Module):
    native: Weight
    native_bias: mx.array | None
    operation: Operation

    def adopt(self) -> None:
        self.native = _packed(self)
        self["packed"] = self.native.data
        bias = self.pop("bias", None)
        object.__setattr__(self, "native_bias", None if bias is None else _float32(bias))
        if self.native_bias is not None:
            self["bias"] = self.native_bias
        self.operation = library.experts([self.native], [self.native_bias])

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return self.operation(x, indices.astype(mx.int32))

    @property
    def input_dims(self) -> int:
        return self.native.layout.k

    @property
    def output_dims(self) -> int:
        return self.native.layout.n

    @property
    def num_experts(self) -> int:
        return self.native.layout.count


class Experts(NativeExperts, SwitchLinear):  # type: ignore[misc]
    pass


class QuantizedExperts(NativeExperts, QuantizedSwitchLinear):  # type: ignore[misc]
    pass


class GatedExperts(SwitchGLU):  # type: ignore[misc]
    """`SwitchGLU` with SwiGLU: gate, up and the product between them are one operation."""

    def adopt(self) -> None:
        parts = (self.gate_proj, self.up_proj)
        self.gated = library.experts([p.native for p in parts], [p.native_bias for p in parts], Gate.SILU)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        indices = indices.astype(mx.int32)
        hidden = self.gated(mx.expand_dims(x, (-2, -3)), indices)
        output: mx.array = self.down_proj.operation(hidden, indices)
        return output.squeeze(-2)


def gated(gate: NativeLinear, up: NativeLinear, activation: Gate) -> Operation:
    """`activation(gate(x)) * up(x)`"""
    return library.linear([gate.native, up.native], [gate.native_bias, up.native_bias], activation)


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: gate, up and the product between them are one operation."""

    gated: Operation
    activation: Gate

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.down_proj.operation(self.gated(x))
        return output


class RMSNorm(nn.Module):
    operation: Operation
    native_weight: mx.array

    def adopt(self, factor: mx.array) -> None:
        """Multiply by `factor`, which may be another than the module's weight."""
        weight = _float32(factor)
        object.__setattr__(self, "native_weight", weight)
        self.operation = library.rms_norm(weight, self.eps)

    def __call__(self, x: mx.array) -> mx.array:
        return self.operation(x)


class Positions:
    """The last offset as an array: all layers of a step ask for the same."""

    _last: tuple[int, mx.array] | None = None

    @classmethod
    def of(cls, offset: int | mx.array) -> mx.array:
        if not isinstance(offset, int):
            return offset if offset.dtype == mx.int32 else offset.astype(mx.int32)
        if cls._last is None or cls._last[0] != offset:
            cls._last = (offset, mx.array(offset, mx.int32))
        return cls._last[1]


class RoPE(nn.Module):
    turns: Turns
    operation: Operation

    def adopt(self, turns: Turns) -> None:
        self.turns = turns
        self.operation = library.rope(turns)

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **rest: Any) -> mx.array:
        if rest or x.ndim < 3:
            return super().__call__(x, offset=offset, **rest)
        return self.operation(x, Positions.of(offset))


def _packed(module: Any) -> Weight:
    weight, scales, offsets = module.pop("weight"), module.pop("scales", None), module.pop("biases", None)
    if scales is None:
        return library.pack_floating(weight)
    return library.pack_quantized(weight, scales, offsets, module.bits, module.group_size)


def _unpacked(weight: Weight) -> mx.array:
    return library.embedding(weight)(mx.arange(weight.layout.n, dtype=mx.int32))


def _float32(array: mx.array) -> mx.array:
    result = mx.contiguous(array.astype(mx.float32))
    mx.eval(result)
    return result
