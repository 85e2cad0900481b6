"""A layer whose past only the model's own kind of cache can hold."""

from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from metalctl.engine.cache.forward import Forward
from metalctl.engine.cache.layout import OwnLayer


class OwnCache:
    """One layer's cache objects of all sequences, one for each slot that is in use."""

    def __init__(self, layer: OwnLayer):
        self.layer = layer
        self._caches: dict[int, Any] = {}
        self._slot: int | None = None

    @property
    def view(self) -> Any:
        """What the model is handed: the object of the sequence in this forward."""
        assert self._slot is not None
        return self._caches[self._slot]

    @property
    def pools(self) -> list[mx.array]:
        states = (dict(tree_flatten(cache.state)) for cache in self._caches.values())
        return [array for state in states for array in state.values() if isinstance(array, mx.array)]

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._caches.values())

    def begin(self, forward: Forward | None) -> None:
        """Serve this forward, of one sequence."""
        self._slot = None
        if forward is None:
            return
        assert forward.batch_size == 1 and forward.slots is not None
        self._slot = int(forward.slots)
        if forward.fresh:
            self._caches[self._slot] = deepcopy(self.layer.blank)

    def keep(self, slots: set[int]) -> None:
        """Let go of the objects of all slots but these."""
        self._caches = {slot: cache for slot, cache in self._caches.items() if slot in slots}

    def clear(self) -> None:
        self._caches.clear()
