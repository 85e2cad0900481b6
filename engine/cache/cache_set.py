"""All cache objects of a model together, as the list that its forward takes."""

from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from metalctl.engine.cache.block_manager import BlockManager, StateCopy
from metalctl.engine.cache.forward import Forward
from metalctl.engine.cache.layout import CacheLayout, KVLayer, Layer, ListLayer, NoLayer, OwnLayer
from metalctl.engine.cache.own_cache import OwnCache
from metalctl.engine.cache.paged_kv import PagedKVCache
from metalctl.engine.cache.recurrent_state import RecurrentState


class CacheSet:
    """The pools of every layer. `call` is one forward of the model over them."""

    def __init__(self, layout: CacheLayout, block_size: int):
        self.block_size = block_size
        self.kv: list[PagedKVCache] = []
        self.states: list[RecurrentState] = []
        self.own: list[OwnCache] = []
        self._views = [self._view(layer) for layer in layout.layers]
        self._all: list[PagedKVCache | RecurrentState | OwnCache] = [*self.kv, *self.states, *self.own]
        self._capacities: list[int] = []  # of the pools, as they were grown last

    @property
    def arrays(self) -> list[mx.array]:
        """Every pool. Whoever evaluates anything must evaluate these with it, or graphs grow without bound."""
        return [pool for cache in self._all for pool in cache.pools]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._all)

    def use_mask_axes(self, axes: int) -> None:
        """Give the mask of a batch so many axes (see `batching`)."""
        for cache in self.kv:
            cache.mask_axes = axes

    def call(self, model: nn.Module, tokens: mx.array, step: Forward) -> mx.array:
        """`model(tokens)` with each layer's past: logits `[B, L or 1, V]`, lazy. `tokens` is int32 `[B, L]`."""
        for cache in self._all:
            cache.begin(step)
        views = [view.view if isinstance(view, OwnCache) else view for view in self._views]
        logits: mx.array = model(tokens, cache=views)
        for state in self.states:
            state.end()
        for cache in self._all:
            cache.begin(None)
        return logits

    def bind(self, arrays: Many[mx.array]) -> None:
        """Go on with these pools, in the order of `arrays`."""
        rest = iter(arrays)
        paged: list[PagedKVCache | RecurrentState] = [*self.kv, *self.states]
        for cache in paged:
            cache.bind([next(rest) for _ in cache.pools])

    def grow(self, blocks: BlockManager) -> None:
        """Give every pool the entries that its owner counts on."""
        for own in self.own:
            own.keep(blocks.slots)
        capacities = blocks.capacities
        if capacities == self._capacities:
            return
        for cache in self.kv:
            cache.resize(blocks.pools[cache.layer.group].capacity)
        if blocks.states is not None:
            for state in self.states:
                state.resize(blocks.states.capacity)
        self._capacities = capacities

    def copy(self, copies: Many[StateCopy]) -> None:
        if copies:
            for state in self.states:
                state.copy(copies)

    def clear(self) -> None:
        """Give all memory back, and with it everything that was kept."""
        self._capacities = []
        for cache in self._all:
            cache.begin(None)
            cache.clear()

    def _view(self, layer: Layer) -> Any:
        if isinstance(layer, KVLayer):
            self.kv.append(PagedKVCache(layer, self.block_size))
            return self.kv[-1]
        if isinstance(layer, OwnLayer):
            self.own.append(OwnCache(layer))
            return self.own[-1]
        if isinstance(layer, ListLayer):
            return CacheList(*(self._view(part) for part in layer.parts))
        if isinstance(layer, NoLayer):
            return KVCache() if layer.given else None
        self.states.append(RecurrentState(layer))
        return self.states[-1].view
