"""What a model keeps between steps, read off the model itself: the table from mlx-lm's cache kinds to ours."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
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
class OwnLayer:
    """A layer whose past only the model's own kind of cache can hold: each sequence has such an object of its own.

    No prefixes are shared and sequences are stepped one by one. Its bytes grow with the sequence; they are charged as
    full-attention blocks, and what does not grow as a slot.
    """

    group: int
    blank: Any = field(compare=False)  # an unused one, to be copied
    bytes_per_token: int
    bytes_per_slot: int


@dataclass(frozen=True, slots=True)
class ListLayer:
    """A layer with several caches."""

    parts: tuple["Layer", ...]


@dataclass(frozen=True, slots=True)
class NoLayer:
    """A layer without a past: the model gives it no cache (`given` False), or one that it never uses."""

    given: bool


Leaf = KVLayer | StateLayer | OwnLayer
Layer = Leaf | ListLayer | NoLayer


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]

    def block_bytes(self, group: int, block_size: int) -> int:
        """Bytes of one block of a group, over all its layers."""
        layers = (layer for layer in self.leaves if not isinstance(layer, StateLayer) and layer.group == group)
        return sum(layer.bytes_per_token for layer in layers) * block_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent-state slot, over all layers."""
        return sum(layer.bytes_per_slot for layer in self.leaves if not isinstance(layer, KVLayer))

    @property
    def has_states(self) -> bool:
        """Whether a sequence needs a slot."""
        return any(not isinstance(layer, KVLayer) for layer in self.leaves)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence can begin with what another has computed."""
        return not any(isinstance(layer, OwnLayer) for layer in self.leaves)

    @property
    def leaves(self) -> list[Leaf]:
        found: list[Leaf] = []

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
    """The cache layout of an mlx-lm model, from its own `make_cache` and steps that are built but never computed.

    Raises UnsupportedModelError where the model's code does not run on this device at all.
    """
    blanks, caches = make_prompt_cache(model), make_prompt_cache(model)
    asked: list[tuple[int, int]] = []
    for cache in caches:
        if type(cache) is RotatingKVCache:
            _listen(cache, asked)
    try:
        _step(model, caches, _SETTLED)
        before = [_shapes(cache) for cache in caches]
        _step(model, caches, 1)
        grows = [_shapes(cache) != shapes for cache, shapes in zip(caches, before, strict=True)]
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise UnsupportedModelError(
            f"mlx-lm's code for {architecture(model)} does not run here: {error}",
            "This architecture cannot be run on this device.",
        ) from error
    _widen(caches, asked)
    groups: list[Group] = []
    layers = [_translate(cache, groups, kv_dtype) for cache in caches]
    for index, layer in enumerate(layers):
        if layer is None or grows[index]:
            layers[index] = _own(model, index, blanks[index], groups)
    return CacheLayout(tuple(groups), tuple(layer for layer in layers if layer is not None))


def architecture(model: nn.Module) -> str:
    """The name of a model's architecture, for messages."""
    return str(getattr(model, "model_type", None) or type(model).__name__)


_SETTLED = 16  # tokens after which a state of fixed size has that size


def _step(model: nn.Module, caches: list[Any], length: int) -> None:
    model(mx.zeros((1, length), mx.int32), cache=caches)


def _shapes(cache: Any) -> list[tuple[int, ...] | None]:
    """Of what is meant to keep its size: the states in a cache."""
    if isinstance(cache, CacheList):
        return [shape for part in cache.caches for shape in _shapes(part)]
    return [None if a is None else a.shape for a in cache.cache] if isinstance(cache, ArraysCache) else []


def _listen(cache: RotatingKVCache, heard: list[tuple[int, int]]) -> None:
    """From now on, note the size of the cache and the window of each mask that the model asks this cache for."""
    make_mask = cache.make_mask

    def listening(N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        heard.append((cache.max_size, window_size or 0))
        return make_mask(N, window_size=window_size, return_array=return_array)

    cache.make_mask = listening


def _widen(caches: list[Any], asked: list[tuple[int, int]]) -> None:
    """Count on the window of the masks where that is more than the cache would keep: what a prompt read in one go
    sees is what a model was trained with."""
    for cache in caches:
        if type(cache) is RotatingKVCache:
            cache.max_size = max(cache.max_size, *(window for size, window in asked if size == cache.max_size), 0)


# -- the table: one row a cache kind; None where only the model's own object will do


def _kv(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    return _kv_layer(cache, Group(), groups, kv_dtype)


def _rotating(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    if cache.keep:
        return None
    return _kv_layer(cache, Group(window=cache.max_size), groups, kv_dtype)


def _chunked(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    return _kv_layer(cache, Group(window=cache.chunk_size), groups, kv_dtype)


def _arrays(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    return StateLayer(tuple(None if a is None else (tuple(a.shape[1:]), a.dtype) for a in cache.cache))


def _list(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    parts = [_translate(part, groups, kv_dtype) for part in cache.caches]
    known = tuple(part for part in parts if part is not None)
    return ListLayer(known) if len(known) == len(parts) else None


def _none(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    return NoLayer(given=False)


Row = Callable[[Any, list[Group], mx.Dtype | None], Layer | None]

TABLE: dict[type, Row] = {
    KVCache: _kv,
    ConcatenateKVCache: _kv,
    RotatingKVCache: _rotating,
    ChunkedKVCache: _chunked,
    ArraysCache: _arrays,
    CacheList: _list,
    type(None): _none,
}


def _translate(cache: Any, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer | None:
    row = TABLE.get(type(cache))
    return None if row is None else row(cache, groups, kv_dtype)


def _own(model: nn.Module, index: int, blank: Any, groups: list[Group]) -> OwnLayer:
    if not all(hasattr(type(blank), name) for name in ("state", "nbytes")):
        raise UnsupportedModelError(
            f"{architecture(model)} keeps its past in a {type(blank).__name__}, which neither the paged cache knows "
            "nor says how large it is.",
            "This version cannot run this architecture.",
        )
    caches = make_prompt_cache(model)
    sizes = []
    for length in (_LONG - 1, _LONG):  # what waits for a whole group of tokens is there at its largest
        _step(model, caches, length)
        sizes.append(int(caches[index].nbytes))
    rate = -(-(sizes[1] - sizes[0]) // _LONG)
    group = _index(Group(), groups)
    return OwnLayer(group, deepcopy(blank), rate, max(0, sizes[0] - rate * (_LONG - 1)))


_LONG = 1024  # tokens; caches grow in steps of 256


def _index(group: Group, groups: list[Group]) -> int:
    if group not in groups:
        groups.append(group)
    return groups.index(group)


def _kv_layer(cache: Any, group: Group, groups: list[Group], kv_dtype: mx.Dtype | None) -> Layer:
    if cache.keys is None:  # the model made it and does not use it
        return NoLayer(given=True)
    keys, values = cache.keys, cache.values
    return KVLayer(
        group=_index(group, groups),
        key_shape=(keys.shape[1], keys.shape[3]),
        value_shape=(values.shape[1], values.shape[3]),
        dtype=kv_dtype or keys.dtype,
    )
