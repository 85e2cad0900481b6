"""What a model keeps between steps, read off the model itself: the table from mlx-lm's cache kinds to ours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from metalctl.engine.cache.block_manager import Group
from metalctl.engine.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class KVLayer:
    """An attention layer: K and V of each token, `[num_kv_heads, head_dim]` each."""

    group: int  # index into CacheLayout.groups
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return (self.key_shape[0] * self.key_shape[1] + self.value_shape[0] * self.value_shape[1]) * self.dtype.size


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent layer: arrays of fixed size a sequence; an entry that the model leaves empty is None."""

    entries: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]  # (shape without the batch axis, dtype)

    @property
    def bytes_per_slot(self) -> int:
        total = 0
        for entry in self.entries:
            if entry is not None:
                shape, dtype = entry
                size = dtype.size
                for length in shape:
                    size *= length
                total += size
        return total


@dataclass(frozen=True, slots=True)
class ListLayer:
    """A layer with several caches."""

    parts: tuple["Layer", ...]


@dataclass(frozen=True, slots=True)
class NoLayer:
    """A layer without a past: the model gives it no cache (`given` False), or one that it never uses."""

    given: bool


Layer = KVLayer | StateLayer | ListLayer | NoLayer


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]

    def block_bytes(self, group: int, block_size: int) -> int:
        """Bytes of one block of a group, over all its layers."""
        layers = (layer for layer in self.leaves if isinstance(layer, KVLayer) and layer.group == group)
        return sum(layer.bytes_per_token for layer in layers) * block_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent-state slot, over all layers."""
        return sum(layer.bytes_per_slot for layer in self.leaves if isinstance(layer, StateLayer))

    @property
    def has_states(self) -> bool:
        return any(isinstance(layer, StateLayer) for layer in self.leaves)

    @property
    def leaves(self) -> list[KVLayer | StateLayer]:
        found: list[KVLayer | StateLayer] = []

        def visit(layer: Layer) -> None:
            if isinstance(layer, ListLayer):
                for part in layer.parts:
                    visit(part)
            elif not isinstance(layer, NoLayer):
                found.append(layer)

        for layer in self.layers:
            visit(layer)
        return found


def read_layout(model: nn.Module, kv_dtype: mx.Dtype | None = None) -> CacheLayout:
    """The cache layout of an mlx-lm model, from its own `make_cache` and one step that is built but never computed.

    Raises UnsupportedModelError for a kind of cache that is not in the table.
    """
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    groups: list[Group] = []
    layers = tuple(_translate(cache, groups, kv_dtype) for cache in caches)
    return CacheLayout(tuple(groups), layers)


# -- the table: one row a cache kind


def _kv(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    return _kv_layer(cache, Group(), groups, kv_dtype)


def _rotating(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    if cache.keep:
        raise UnsupportedModelError(
            f"this model keeps its first {cache.keep} tokens beside a window, which the paged cache cannot hold."
        )
    return _kv_layer(cache, Group(window=cache.max_size), groups, kv_dtype)


def _arrays(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    return StateLayer(tuple(None if a is None else (tuple(a.shape[1:]), a.dtype) for a in cache.cache))


def _list(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    return ListLayer(tuple(_translate(part, groups, kv_dtype) for part in cache.caches))


def _none(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    return NoLayer(given=False)


Row = Callable[[Any, list[Group], mx.Dtype | None], Layer]

TABLE: dict[type, Row] = {
    KVCache: _kv,
    ConcatenateKVCache: _kv,
    RotatingKVCache: _rotating,
    ArraysCache: _arrays,
    CacheList: _list,
    type(None): _none,
}


def _translate(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    row = TABLE.get(type(cache))
    if row is None:
        raise UnsupportedModelError(
            f"the model keeps its past in a {type(cache).__name__}, which the paged cache does not know.",
            "This version cannot run this architecture.",
        )
    return row(cache, groups, kv_dtype)


def _kv_layer(cache: Any, group: Group, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    if cache.keys is None:  # the model made it and does not use it
        return NoLayer(given=True)
    if group not in groups:
        groups.append(group)
    keys, values = cache.keys, cache.values
    return KVLayer(
        group=groups.index(group),
        key_shape=(keys.shape[1], keys.shape[3]),
        value_shape=(values.shape[1], values.shape[3]),
        dtype=kv_dtype or keys.dtype,
    )
