"""Whole decoder layers as one operation each, for models whose layers have the usual form.

A layer is attention with rotary positions, then a gated MLP, each behind an RMS norm and added to what goes around it;
with or without norms of queries and keys, biases, and norms after attention and MLP. Whether a layer is of that form
is read off its parts and then proven: its own result on random inputs must be the operation's.
"""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from metalctl.engine import native_layers as native
from metalctl.engine.cache.paged_kv import PagedKVCache
from metalctl.engine.replacing import difference, kind, with_call_of
from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Gate, Layer, Operation, Turns

CLOSE = 1e-3  # of the largest change to the input: a rounding that tips over moves results by up to 5e-5
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PLAIN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_SANDWICH = _PLAIN | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # a norm on both sides

Norm = tuple[mx.array, float] | None


class DecoderLayer(nn.Module):
    """A layer that is one operation where it is handed a paged cache, and what it was otherwise."""

    layer: Layer
    operations: dict[tuple[int | None, int], Operation]  # by window and block size

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        window = cache.window_of(mask) if isinstance(cache, PagedKVCache) and x.dtype == mx.float32 else None
        if window is None:
            return super().__call__(x, mask, cache)
        return self.operation(window[0], cache.block_size).of(x, *cache.in_place)

    def operation(self, window: int | None, block_size: int) -> Operation:
        key = (window, block_size)
        if key not in self.operations:
            self.operations[key] = library.decoder_layer(self.layer, window, block_size)
        return self.operations[key]


def fuse(module: Any, proofs: dict[Hashable, bool]) -> bool:
    """Make `module` a DecoderLayer if it computes what one does. `proofs` has what was found for kinds of layers."""
    layer = _read(module)
    if layer is None:
        return False
    sort = kind(module)
    if sort not in proofs:
        proofs[sort] = _proven(module, layer)
    if not proofs[sort]:
        return False
    module.__class__ = with_call_of(DecoderLayer, type(module))
    module.layer = layer
    object.__setattr__(module, "operations", {})
    return True


def _read(module: Any) -> Layer | None:
    """The layer that `module` seems to be."""
    parts = module.children()
    if set(parts) not in (_PLAIN, _SANDWICH) or not isinstance(module.mlp, native.GatedMLP):
        return None
    if list(inspect.signature(type(module).__call__).parameters)[1:] != ["x", "mask", "cache"]:
        return None
    attention = module.self_attn
    inner = attention.children()
    if not set(_PROJECTIONS) <= set(inner) or set(inner) - {*_PROJECTIONS, "rope", "q_norm", "k_norm"}:
        return None
    linears = [*(inner[name] for name in _PROJECTIONS), module.mlp.gate_proj, module.mlp.up_proj, module.mlp.down_proj]
    norms = [part for name, part in (*parts.items(), *inner.items()) if name.endswith("norm")]
    if not all(isinstance(linear, native.NativeLinear) for linear in linears):
        return None
    if not all(isinstance(norm, native.RMSNorm) for norm in norms):
        return None
    heads, kv_heads = (getattr(attention, name, None) for name in ("n_heads", "n_kv_heads"))
    scale = getattr(attention, "scale", None)
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(scale, float)):
        return None
    return Layer(
        heads=heads,
        kv_heads=kv_heads,
        width=linears[0].native.layout.n // heads,
        scale=scale,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        turns=_turns(inner.get("rope")),
        gate=module.mlp.activation,
        linears=[(linear.native, linear.native_bias) for linear in linears],
        norms=_norms(parts, inner),
    )


def _turns(rope: Any) -> Turns | None:
    return rope.turns if isinstance(rope, native.RoPE) else None


def _norms(parts: dict[str, Any], inner: dict[str, Any]) -> list[Norm]:
    """Before attention, of q, of k, after attention, before the MLP, after it."""
    sandwich = "pre_feedforward_layernorm" in parts
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    order = (
        parts["input_layernorm"],
        inner.get("q_norm"),
        inner.get("k_norm"),
        parts[after] if sandwich else None,
        parts[before if sandwich else after],
        parts.get("post_feedforward_layernorm"),
    )
    return [None if norm is None else (norm.native_weight, norm.eps) for norm in order]


def _proven(module: Any, layer: Layer) -> bool:
    """Whether reading five tokens and then one more gives what the module gives: its attention, and all of it."""
    if layer.norms[1] is not None and layer.norms[1][0].size != layer.width:
        return False
    sandwich = module.post_attention_layernorm if layer.norms[3] is not None else _same
    attention = replace(layer, gate=Gate.NONE)
    return _same_changes(attention, lambda x, *rest: sandwich(module.self_attn(module.input_layernorm(x), *rest))) and (
        _same_changes(layer, lambda x, *rest: module(x, *rest) - x)
    )


def _same_changes(layer: Layer, change: Callable[..., mx.array]) -> bool:
    """Whether the layer adds `change(x, mask, cache)` to x."""
    operation = library.decoder_layer(layer, None, 4)
    hidden = layer.linears[0][0].layout.k
    prompt, token = (mx.random.normal((1, n, hidden), key=mx.random.key(n)) for n in (5, 1))
    pools = [mx.zeros((8, layer.kv_heads, layer.width)) for _ in range(2)]
    mx.eval(prompt, token, pools)
    table, cache = mx.array([[1, 0]], mx.int32), KVCache()
    for x, mask, offset in ((prompt, create_causal_mask(5), 0), (token, create_causal_mask(1, 5), 5)):
        slots = mx.array([4, 5, 6, 7, 0, 1][offset : offset + x.shape[1]], mx.int32)
        length, position = mx.array([offset + x.shape[1]], mx.int32), mx.array([offset], mx.int32)
        ours = operation.of(x, *pools, slots, table, length, position)
        if not difference(change(x, mask, cache), ours - x) <= CLOSE:
            return False
    return True


def _same(x: mx.array) -> mx.array:
    return x
