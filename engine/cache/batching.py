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
from metalctl.engine.cache.layout import CacheLayout, KVLayer, architecture
from metalctl.engine.cache.paged_kv import MASK_AXES, PagedKVCache
from metalctl.engine.cache.recurrent_state import RecurrentState
from metalctl.engine.errors import UnsupportedModelError

_BLOCK = 8  # tokens in a block here
_PADDING = 48  # blocks, behind those of the row
_PROMPTS = ([1], [4, 2])
_NEXT = 5
_OTHER = 7
_ROUNDING = 0.1  # of the largest logit: what other kernels in a narrow dtype may differ by; a wrong position does more
_SAME = 1e-3  # the same for the same kernels on the same row


def batch_mask_axes(model: nn.Module, layout: CacheLayout) -> int | None:
    """How many axes the mask of a batch has to have for this model; None if it cannot step several sequences of
    different lengths at once: if no step of a batch builds, or a padded row of one does not bring what the row alone
    does. Computes a handful of tokens.

    Raises UnsupportedModelError for a model whose tokens see later ones, so that it reads a prompt differently when it
    is cut, and for one that does not compute on this device.
    """
    try:
        trial = _Trial(model, layout)
        causal = _close(*trial.beginnings(), _SAME)
        axes = next((axes for axes in (MASK_AXES, MASK_AXES + 1) if _builds(model, layout, axes)), None)
        agrees = axes is not None and _close(trial.together(axes), trial.alone(), _ROUNDING)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"mlx-lm's code for {architecture(model)} does not compute here: {error}",
            "In another precision or quantisation it may.",
        ) from error
    if not causal:
        raise UnsupportedModelError(
            f"in mlx-lm's code for {architecture(model)} tokens see later ones: it reads a prompt differently when it "
            "is cut.",
            "This architecture cannot be run.",
        )
    return axes if agrees else None


def _builds(model: nn.Module, layout: CacheLayout, axes: int) -> bool:
    """With a batch size that divides, and is divided by, no count of heads, so that nothing broadcasts by accident."""
    kv = [leaf for leaf in layout.leaves if isinstance(leaf, KVLayer)]
    if not layout.shares_prefixes or any(leaf.value_shape[1] == 0 for leaf in kv):
        return False  # keys without values: an index over blocks of keys, cut and placed by the padded length
    heads = {leaf.key_shape[0] for leaf in kv} - {1}
    batch = next(size for size in (7, 11, 13, 17, 19) if all(size % count and count % size for count in heads))
    caches = _caches(layout, 1)
    caches.use_mask_axes(axes)
    rows = [[BlockTable(0, [NULL]) for _ in layout.groups] for _ in range(batch)]
    step = forward.batch(layout.groups, rows, _BLOCK, [0] * batch, [NULL] * batch if layout.has_states else None)
    try:
        logits = caches.call(model, mx.zeros((batch, 1), mx.int32), step)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
        return False
    return logits.shape[:2] == (batch, 1)


class _Trial:
    """Two short prompts, each read into a block and a slot of its own, to be stepped in several ways."""

    def __init__(self, model: nn.Module, layout: CacheLayout):
        self._model = model
        self._layout = layout
        self._caches = _caches(layout, 2 + 2 * len(_PROMPTS))
        for row, prompt in enumerate(_PROMPTS):
            self._read(row + 1, 0, prompt)

    def beginnings(self) -> tuple[mx.array, mx.array]:
        """Logits `[2, V]` of the first two tokens of two prompts that differ in the third; none of a model that brings
        those of the last token only."""
        place = 1 + 2 * len(_PROMPTS)
        one, other = (self._read(place, 0, [*_PROMPTS[1], last])[:-1] for last in (_NEXT, _OTHER))
        return one, other

    def together(self, axes: int) -> mx.array:
        """Logits `[B, V]` of the next token of both as a batch with much padding."""
        count, layout = len(_PROMPTS), self._layout
        self._caches.use_mask_axes(axes)
        self._caches.copy([StateCopy(row, count + row) for row in range(1, count + 1)])
        tables = [[BlockTable(0, [row] + [NULL] * _PADDING) for _ in layout.groups] for row in range(1, count + 1)]
        slots = [count + row for row in range(1, count + 1)] if layout.has_states else None
        step = forward.batch(layout.groups, tables, _BLOCK, list(map(len, _PROMPTS)), slots)
        logits = self._caches.call(self._model, mx.array([[_NEXT]] * count, mx.int32), step)[:, -1]
        mx.eval(logits, *self._caches.arrays)
        return logits

    def alone(self) -> mx.array:
        """Logits `[B, V]` of the next token of each by itself, which takes their states along."""
        return mx.concatenate([self._read(row + 1, len(prompt), [_NEXT]) for row, prompt in enumerate(_PROMPTS)])

    def _read(self, place: int, offset: int, tokens: list[int]) -> mx.array:
        """Logits `[L, V]` after each of these tokens of the sequence in the block and the slot of this number."""
        groups = self._layout.groups
        slot = place if self._layout.has_states else None
        step = forward.single(groups, [BlockTable(0, [place]) for _ in groups], _BLOCK, offset, len(tokens), slot)
        logits = self._caches.call(self._model, mx.array([tokens], mx.int32), step)[0]
        mx.eval(logits, *self._caches.arrays)
        return logits


def _close(one: mx.array, other: mx.array, share: float) -> bool:
    if not other.size:
        return True
    finite = mx.isfinite(other)
    if not mx.array_equal(mx.isfinite(one), finite):
        return False
    difference = mx.where(finite, mx.abs(one - other), 0).max()
    return bool((difference <= share * mx.where(finite, mx.abs(other), 0).max()).item())


def _caches(layout: CacheLayout, entries: int) -> CacheSet:
    caches = CacheSet(layout, _BLOCK)
    paged: list[PagedKVCache | RecurrentState] = [*caches.kv, *caches.states]
    for cache in paged:
        cache.resize(entries)
    return caches
