"""Encoders on the CPU kernels."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine import native_layers
from metalctl.engine.acceleration import accelerate
from metalctl.engine.embedding.encoder import MLP, Attention, Encoder, Seen
from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Gate, Operation

_GATES = {nn.gelu: Gate.GELU, nn.gelu_approx: Gate.GELU_TANH, nn.silu: Gate.SILU}


class NativeAttention(Attention):
    both_ways: Operation

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, seen: Seen) -> mx.array:
        return self.both_ways.of(queries, keys, values, seen.lengths)


class NativeMLP(MLP):
    """The activation is part of the first product."""

    activated: Operation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activated(x))


def accelerate_encoder(encoder: Encoder, ready: Iterable[nn.Module] | None = None) -> list[str]:
    """Replace the layers of `encoder` that the loaded kernels can compute; returns what was done, for people.

    `ready` yields its parts as their weights come; None: all are there. Replaces nothing where no kernels are loaded.
    """
    notes = accelerate(encoder, ready)
    if library.loaded():
        for layer in encoder.layers:
            _attention(layer.attention)
            _mlp(layer.mlp)
    return notes


def _attention(attention: Any) -> None:
    attention.__class__ = NativeAttention
    attention.both_ways = library.both_ways(attention.scale, attention.window)


def _mlp(mlp: Any) -> None:
    gate = _GATES.get(mlp.activation)
    if type(mlp) is not MLP or "gate_proj" in mlp or gate is None:
        return
    if isinstance(mlp.up_proj, native_layers.NativeLinear):
        mlp.__class__ = NativeMLP
        mlp.activated = library.linear([mlp.up_proj.native], [mlp.up_proj.native_bias], gate)
