"""The decode step of a batch as one compiled function.

On a GPU a small model's step is bound by the Python and C++ that build its graph; compiled for a shape, the graph is
built once. So batches are padded to a few sizes and block tables to a few widths.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.cache.block_manager import BlockTable, Group
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.cache.forward import BatchArrays, BatchTables


class CompiledDecode:
    """Logits of a batch's next tokens, by a function that MLX has compiled for the padded shapes.

    The pools go through the function as arguments and results, so that a call rebinds them as an ordinary forward does.
    """

    def __init__(self, model: nn.Module, caches: CacheSet, groups: Many[Group]):
        self._caches = caches
        self._groups = tuple(groups)
        self._tables = BatchTables(groups, caches.block_size, padded_width, padded_rows)
        self._step: Callable[..., tuple[mx.array, list[mx.array]]] = mx.compile(self._traced)
        self._model = model
        mx.eval(held_arrays(model))

    def __call__(
        self, tokens: mx.array, tables: Many[Many[BlockTable]], offsets: Many[int], slots: Many[int] | None
    ) -> mx.array:
        """`tokens` int32 `[B]`, the rest as `forward.batch` takes it: logits `[B, V]`."""
        count = len(offsets)
        rows = padded_rows(count)
        if rows > count:
            tokens = mx.concatenate([tokens, mx.zeros((rows - count,), tokens.dtype)])
        arrays = self._tables.arrays(tables, offsets, slots)
        no_slots = mx.zeros((0,), mx.int32)
        logits, pools = self._step(
            tokens,
            arrays.offsets,
            no_slots if arrays.slots is None else arrays.slots,
            *(list(part) for part in (arrays.writes, arrays.blocks, arrays.starts)),
            self._caches.arrays,
        )
        self._caches.bind(pools)
        return logits[:count]

    def _traced(
        self,
        tokens: mx.array,
        offsets: mx.array,
        slots: mx.array,
        writes: list[mx.array],
        blocks: list[mx.array],
        starts: list[mx.array],
        pools: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        self._caches.bind(pools)
        arrays = BatchArrays(
            offsets, offsets, slots if slots.size else None, tuple(writes), tuple(blocks), tuple(starts)
        )
        step = arrays.forward(self._groups, self._caches.block_size)
        logits = self._caches.call(self._model, tokens[:, None], step)
        return logits[:, -1], self._caches.arrays


def held_arrays(model: nn.Module) -> list[mx.array]:
    """Every array of a model, also those that are no parameters, such as the frequencies of a rope. One that is still
    lazy when a function is compiled would become part of that function, and be lost to every other."""
    found: list[mx.array] = []
    for module in model.modules():
        held = (*module.values(), *vars(module).values())
        found.extend(value for value in held if isinstance(value, mx.array))
    return found


def padded_rows(count: int) -> int:
    """The next power of two. Rows of padding cost little: a step is bound by reading the weights."""
    return 1 << (count - 1).bit_length()


def padded_width(blocks: int) -> int:
    """The next power of two, at least 16. Kernels do not read entries past a row's length."""
    return max(16, 1 << (blocks - 1).bit_length())
