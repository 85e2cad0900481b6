"""Whether a model's code can step several sequences of different lengths at once: tried out, not assumed.

Some models compute attention by hand and broadcast the mask of a batch along the wrong axis, need the position as one
number, or take positions from the length of the keys, which in a batch includes padding. They are stepped row by row.
"""

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.cache import forward
from metalctl.engine.cache.block_manager import BlockTable, StateCopy
from metalctl.engine.cache.block_pool import NULL
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.cache.layout import CacheLayout, KVLayer

_BLOCK = 8  # tokens in a block here
_PADDING = 48  # blocks, in front of nothing
_PROMPTS = ([1, 2, 3], [4])
_ROUNDING = 0.05  # of the largest logit: what a narrow dtype may differ by; a wrong position differs by more


def decodes_as_batch(model: nn.Module, layout: CacheLayout) -> bool:
    """Whether a step of a batch builds, and a padded row of one brings what the row alone does."""
    if not layout.shares_prefixes:
        return False
    if any(isinstance(leaf, KVLayer) and leaf.value_shape[1] == 0 for leaf in layout.leaves):
        return False  # keys without values: an index over blocks of keys, cut and placed by the padded length
    return _builds(model, layout) and _agrees(model, layout)


def _builds(model: nn.Module, layout: CacheLayout) -> bool:
    """With a batch size that divides, and is divided by, no count of heads, so that nothing broadcasts by accident."""
    heads = {leaf.key_shape[0] for leaf in layout.leaves if isinstance(leaf, KVLayer)} - {1}
    batch = next(size for size in (7, 11, 13, 17, 19) if all(size % count and count % size for count in heads))
    caches = _caches(layout, 1)
    rows = [[BlockTable(0, [NULL]) for _ in layout.groups] for _ in range(batch)]
    step = forward.batch(layout.groups, rows, _BLOCK, [5] * batch, [NULL] * batch if layout.has_states else None)
    try:
        logits = caches.call(model, mx.zeros((batch, 1), mx.int32), step)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
        return False
    return logits.shape[:2] == (batch, 1)


def _agrees(model: nn.Module, layout: CacheLayout) -> bool:
    """Read two short prompts, then step both as a batch with much padding, and each by itself from the same state."""
    caches = _caches(layout, 1 + 2 * len(_PROMPTS))
    count = len(_PROMPTS)
    lengths = [len(prompt) for prompt in _PROMPTS]
    slots = list(range(1, count + 1)) if layout.has_states else None
    for row, prompt in enumerate(_PROMPTS):
        _single(model, layout, caches, row, row, 0, prompt)
    caches.copy([StateCopy(row + 1, count + row + 1) for row in range(count)])
    tables = [[BlockTable(0, [row + 1] + [NULL] * _PADDING) for _ in layout.groups] for row in range(count)]
    step = forward.batch(layout.groups, tables, _BLOCK, lengths, slots)
    together = caches.call(model, mx.array([[5]] * count, mx.int32), step)[:, -1]
    mx.eval(together, *caches.arrays)
    alone = [_single(model, layout, caches, row, count + row, lengths[row], [5]) for row in range(count)]
    return _close(together, mx.concatenate(alone))


def _single(
    model: nn.Module, layout: CacheLayout, caches: CacheSet, row: int, slot: int, offset: int, tokens: list[int]
) -> mx.array:
    tables = [BlockTable(0, [row + 1]) for _ in layout.groups]
    state = slot + 1 if layout.has_states else None
    step = forward.single(layout.groups, tables, _BLOCK, offset, len(tokens), state)
    logits = caches.call(model, mx.array([tokens], mx.int32), step)[:, -1]
    mx.eval(logits, *caches.arrays)
    return logits


def _close(one: mx.array, other: mx.array) -> bool:
    finite = mx.isfinite(other)
    if not mx.array_equal(mx.isfinite(one), finite):
        return False
    difference = mx.where(finite, mx.abs(one - other), 0).max()
    return bool((difference <= _ROUNDING * mx.where(finite, mx.abs(other), 0).max()).item())


def _caches(layout: CacheLayout, entries: int) -> CacheSet:
    caches = CacheSet(layout, _BLOCK)
    for cache in (*caches.kv, *caches.states):
        cache.resize(entries)
    return caches
