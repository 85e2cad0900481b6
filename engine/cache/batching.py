"""What a model's code can do, tried out and not assumed: continue what was begun, and step a batch.

Some models need the position as one number, or take positions from the length of the keys, which in a batch includes
padding: they are stepped row by row. Some compute attention by hand with an axis for the queries that share a key, and
need an axis more in the mask of a batch.
"""

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.cache import forward
from metalctl.engine.cache.block_manager import BlockTable, StateCopy
from metalctl.engine.cache.block_pool import NULL
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.cache.layout import CacheLayout, KVLayer
from metalctl.engine.cache.paged_kv import MASK_AXES
from metalctl.engine.errors import UnsupportedModelError

_BLOCK = 8  # tokens in a block here
_PADDING = 48  # blocks, in front of nothing
_PROMPTS = ([1, 2, 3], [4])
_NEXT = 5
_ROUNDING = 0.05  # of the largest logit: what a narrow dtype may differ by; a wrong position differs by more


def batch_mask_axes(model: nn.Module, layout: CacheLayout) -> int | None:
    """How many axes the mask of a batch has to have for this model; None if it cannot step several sequences of
    different lengths at once: if no step of a batch builds, or a padded row of one does not bring what the row alone
    does.

    Raises UnsupportedModelError for a model that reads a prompt differently when it is cut: its tokens see later ones.
    """
    _check_causal(model, layout)
    if not layout.shares_prefixes:
        return None
    if any(isinstance(leaf, KVLayer) and leaf.value_shape[1] == 0 for leaf in layout.leaves):
        return None  # keys without values: an index over blocks of keys, cut and placed by the padded length
    tried = (
        axes for axes in (MASK_AXES, MASK_AXES + 1) if _builds(model, layout, axes) and _agrees(model, layout, axes)
    )
    return next(tried, None)


def _builds(model: nn.Module, layout: CacheLayout, axes: int) -> bool:
    """With a batch size that divides, and is divided by, no count of heads, so that nothing broadcasts by accident."""
    heads = {leaf.key_shape[0] for leaf in layout.leaves if isinstance(leaf, KVLayer)} - {1}
    batch = next(size for size in (7, 11, 13, 17, 19) if all(size % count and count % size for count in heads))
    caches = _caches(layout, 1)
    caches.use_mask_axes(axes)
    rows = [[BlockTable(0, [NULL]) for _ in layout.groups] for _ in range(batch)]
    step = forward.batch(layout.groups, rows, _BLOCK, [5] * batch, [NULL] * batch if layout.has_states else None)
    try:
        logits = caches.call(model, mx.zeros((batch, 1), mx.int32), step)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
        return False
    return logits.shape[:2] == (batch, 1)


def _agrees(model: nn.Module, layout: CacheLayout, axes: int) -> bool:
    """Read two short prompts, then step both as a batch with much padding, and each by itself from the same state."""
    count = len(_PROMPTS)
    caches = _caches(layout, 1 + 2 * count)
    caches.use_mask_axes(axes)
    for row, prompt in enumerate(_PROMPTS):
        _read(model, layout, caches, row + 1, 0, prompt)
    caches.copy([StateCopy(row + 1, count + row + 1) for row in range(count)])
    tables = [[BlockTable(0, [row + 1] + [NULL] * _PADDING) for _ in layout.groups] for row in range(count)]
    slots = list(range(1, count + 1)) if layout.has_states else None
    step = forward.batch(layout.groups, tables, _BLOCK, list(map(len, _PROMPTS)), slots)
    together = caches.call(model, mx.array([[_NEXT]] * count, mx.int32), step)[:, -1]
    mx.eval(together, *caches.arrays)
    alone = [
        _read(model, layout, caches, row + 1, len(prompt), [_NEXT], slot=count + row + 1)
        for row, prompt in enumerate(_PROMPTS)
    ]
    return _close(together, mx.concatenate(alone))


def _check_causal(model: nn.Module, layout: CacheLayout) -> None:
    caches = _caches(layout, 3)
    prompt = _PROMPTS[0]
    whole = _read(model, layout, caches, 1, 0, [*prompt, _NEXT])
    _read(model, layout, caches, 2, 0, prompt)
    if not _close(_read(model, layout, caches, 2, len(prompt), [_NEXT]), whole):
        raise UnsupportedModelError(
            "the model's code in mlx-lm reads a prompt differently when it is cut: its tokens see later ones.",
            "This architecture cannot be run on this device.",
        )


def _read(
    model: nn.Module,
    layout: CacheLayout,
    caches: CacheSet,
    block: int,
    offset: int,
    tokens: list[int],
    slot: int | None = None,
) -> mx.array:
    """Logits `[1, V]` after these tokens of a sequence that lies in one block and in the slot of the same number."""
    tables = [BlockTable(0, [block]) for _ in layout.groups]
    step = forward.single(
        layout.groups, tables, _BLOCK, offset, len(tokens), (slot or block) if layout.has_states else None
    )
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
