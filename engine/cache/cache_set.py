"""All cache objects of a model together, as the list that its forward takes."""

from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from metalctl.engine.cache import forward
from metalctl.engine.cache.block_manager import BlockManager, BlockTable, StateCopy
from metalctl.engine.cache.forward import Forward
from metalctl.engine.cache.layout import CacheLayout, KVLayer, Layer, ListLayer, NoLayer
from metalctl.engine.cache.paged_kv import PagedKVCache
from metalctl.engine.cache.recurrent_state import RecurrentState


class CacheSet:
    """The pools of every layer. `call` is one forward of the model over them."""

    def __init__(self, layout: CacheLayout, block_size: int):
        self.block_size = block_size
        self.kv: list[PagedKVCache] = []
        self.states: list[RecurrentState] = []
        self._views = [self._view(layer) for layer in layout.layers]

    @property
    def arrays(self) -> list[mx.array]:
        """Every pool. Whoever evaluates anything must evaluate these with it, or graphs grow without bound."""
        return [pool for cache in (*self.kv, *self.states) for pool in cache.pools]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in (*self.kv, *self.states))

    def call(self, model: nn.Module, tokens: mx.array, step: Forward) -> mx.array:
        """`model(tokens)` with each layer's past: logits `[B, L or 1, V]`, lazy. `tokens` is int32 `[B, L]`."""
        for cache in (*self.kv, *self.states):
            cache.begin(step)
        logits: mx.array = model(tokens, cache=self._views)
        for state in self.states:
            state.end()
        for cache in (*self.kv, *self.states):
            cache.begin(None)
        return logits

    def grow(self, blocks: BlockManager) -> None:
        """Give every pool the entries that its owner counts on."""
        for cache in self.kv:
            cache.resize(blocks.pools[cache.layer.group].capacity)
        if blocks.states is not None:
            for state in self.states:
                state.resize(blocks.states.capacity)

    def copy(self, copies: Many[StateCopy]) -> None:
        if copies:
            for state in self.states:
                state.copy(copies)

    def clear(self) -> None:
        """Give all memory back, and with it everything that was kept."""
        for cache in (*self.kv, *self.states):
            cache.begin(None)
            cache.clear()

    def _view(self, layer: Layer) -> Any:
        if isinstance(layer, KVLayer):
            self.kv.append(PagedKVCache(layer, self.block_size))
            return self.kv[-1]
        if isinstance(layer, ListLayer):
            return CacheList(*(self._view(part) for part in layer.parts))
        if isinstance(layer, NoLayer):
            return KVCache() if layer.given else None
        self.states.append(RecurrentState(layer))
        return self.states[-1].view


def decodes_as_batch(model: nn.Module, layout: CacheLayout) -> bool:
    """Whether the model's code can step several sequences of different lengths at once.

    Some models compute attention by hand and broadcast the mask of a batch along the wrong axis, or need the position
    as one number. Their step of a batch does not build, if the batch is no divisor or multiple of anything else in the
    model; it is built here and never computed.
    """
    heads = {shape[0] for leaf in layout.leaves if isinstance(leaf, KVLayer) for shape in (leaf.key_shape,)}
    batch = next(size for size in (7, 11, 13, 17) if not any(size % count == 0 or count % size == 0 for count in heads
                                                            if count > 1))  # fmt: skip
    caches = CacheSet(layout, block_size=8)
    for kv in caches.kv:
        kv.resize(1)
    for state in caches.states:
        state.resize(1)
    rows = [[BlockTable(0, [0]) for _ in layout.groups] for _ in range(batch)]
    step = forward.batch(layout.groups, rows, 8, [5] * batch, [0] * batch if layout.has_states else None)
    try:
        logits = caches.call(model, mx.zeros((batch, 1), mx.int32), step)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
        return False
    return logits.shape[:2] == (batch, 1)
