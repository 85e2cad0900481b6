"""The states of recurrent layers: one slot a sequence, gathered for a step and put back after it."""

from collections.abc import Sequence as Many

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from metalctl.engine.cache.block_manager import StateCopy
from metalctl.engine.cache.forward import Forward
from metalctl.engine.cache.layout import StateLayer


class RecurrentState:
    """One recurrent layer's states of all sequences: for each entry a pool `[num_slots, ...]`; slot 0 is for padding.

    The model is handed a plain `ArraysCache` that holds the rows of the sequences in the step; entries that the model
    leaves None stay None.
    """

    def __init__(self, layer: StateLayer):
        self.layer = layer
        self._pools: list[mx.array | None] = []
        self.clear()
        self.view = ArraysCache(len(layer.entries))
        self._forward: Forward | None = None

    @property
    def pools(self) -> list[mx.array]:
        return [pool for pool in self._pools if pool is not None]

    @property
    def nbytes(self) -> int:
        return sum(int(pool.nbytes) for pool in self.pools)

    def begin(self, forward: Forward | None) -> None:
        """Gather the rows of this forward's sequences; a sequence without a past starts from the model's own start."""
        self._forward = forward
        self.view.state = [None] * len(self.layer.entries), None, None
        if forward is None or forward.fresh:
            return
        for index, pool in enumerate(self._pools):
            if pool is not None:
                self.view[index] = pool[forward.slots]

    def end(self) -> None:
        """Put the rows that the model left in the view back into the pools."""
        assert self._forward is not None
        for index, pool in enumerate(self._pools):
            if pool is not None and self.view[index] is not None:
                pool[self._forward.slots] = _settled(self.view[index], pool).astype(pool.dtype)

    def bind(self, pools: list[mx.array]) -> None:
        rest = iter(pools)
        self._pools = [None if pool is None else next(rest) for pool in self._pools]

    def clear(self) -> None:
        """Give the pools back."""
        self._pools = [None if entry is None else mx.zeros((0, *entry[0]), entry[1]) for entry in self.layer.entries]

    def resize(self, num_slots: int) -> None:
        for index, pool in enumerate(self._pools):
            if pool is not None and pool.shape[0] < num_slots:
                more = mx.zeros((num_slots - pool.shape[0], *pool.shape[1:]), pool.dtype)
                self._pools[index] = mx.concatenate([pool, more])

    def copy(self, copies: Many[StateCopy]) -> None:
        """All copies at once: every source is read before any target is written."""
        sources = mx.array([copy.source for copy in copies], mx.int32)
        targets = mx.array([copy.target for copy in copies], mx.int32)
        for pool in self.pools:
            pool[targets] = pool[sources]


def _settled(state: mx.array, pool: mx.array) -> mx.array:
    """A state that is still shorter than it will be (a sequence of fewer tokens than it looks back) with zeros for
    what is missing at its start."""
    missing = [full - now for full, now in zip(pool.shape[1:], state.shape[1:], strict=True)]
    return mx.pad(state, [(0, 0), *((count, 0) for count in missing)]) if any(missing) else state
