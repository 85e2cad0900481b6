"""Drawing tokens from what temperature, top-k, top-p and min-p leave of the logits."""

from functools import cache

import mlx.core as mx

from metalctl.kernels import dispatch
from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Operation

_NEVER = -float("inf")


def draw(
    logits: mx.array,
    temperature: mx.array,
    top_k: mx.array,
    top_p: mx.array,
    min_p: mx.array,
    uniform: mx.array,
    *,
    keeps_all: bool,
) -> mx.array:
    """One token a row, integers `[N]`.

    logits        [N, V]  float32; -inf is never drawn
    the others    [N, 1]  float32. temperature above 0; top_k from 1 to V; of what top_k keeps, top_p keeps the
                  likeliest until they have that share, and min_p those that have at least that share of the
                  likeliest. Ties with the last that is kept are kept
    uniform       [N, 1]  in [0, 1): where the cumulative distribution is cut, in the order of token ids
    keeps_all     whether no row filters anything
    """
    arguments = (logits, temperature, top_k, top_p, min_p, uniform)
    if dispatch.body("draw") == "cpu" and library.loaded():
        return _operation()(logits, mx.concatenate(list(arguments[1:]), axis=1))
    return reference(*arguments, keeps_all=keeps_all)


def reference(
    logits: mx.array,
    temperature: mx.array,
    top_k: mx.array,
    top_p: mx.array,
    min_p: mx.array,
    uniform: mx.array,
    *,
    keeps_all: bool,
) -> mx.array:
    """What `draw` means, in plain MLX operations. Normative."""
    scaled = logits / temperature
    if not keeps_all:
        scaled = mx.where(scaled >= _threshold(scaled, top_k, top_p, min_p), scaled, _NEVER)
    probabilities = mx.softmax(scaled, axis=-1)
    cumulative = mx.cumsum(probabilities, axis=-1)
    # Below the total whatever the rounding, and never a token without probability where a parallel sum is uneven.
    target = uniform * cumulative[:, -1:] * (1 - 1e-6)
    return mx.argmax((cumulative > target) & (probabilities > 0), axis=-1)


def _threshold(scaled: mx.array, top_k: mx.array, top_p: mx.array, min_p: mx.array) -> mx.array:
    """The least of `scaled` `[N, V]` that is kept in each row, `[N, 1]`."""
    ordered = -mx.sort(-scaled, axis=-1)
    rank = mx.arange(ordered.shape[-1])[None]
    probabilities = mx.softmax(mx.where(rank < top_k, ordered, _NEVER), axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    likely = probabilities >= min_p * probabilities[:, :1]
    kept = ((before < top_p) | (top_p >= 1)) & (rank < top_k) & likely | (rank == 0)
    last = mx.where(kept, rank, 0).max(axis=-1, keepdims=True)
    return mx.take_along_axis(ordered, last, axis=-1)


@cache
def _operation() -> Operation:
    return library.draw()
