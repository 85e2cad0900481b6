"""What the places share that replace a loaded model's layers: finding them, and telling what they compute."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def direct_children(parent: nn.Module) -> list[nn.Module]:
    """The modules that `parent` holds itself, also those in lists."""
    found: list[nn.Module] = []
    for child in parent.children().values():
        found.extend([child] if isinstance(child, nn.Module) else [])
        found.extend(m for m in child if isinstance(m, nn.Module)) if isinstance(child, list) else None
    return found


def with_call_of(ours: type, theirs: type) -> type:
    """A subclass of a module's own class, so that whoever asks still finds it, that is called as ours is."""
    return type(theirs.__name__, (ours, theirs), {})


def norm_factor(norm: Any, close: float) -> mx.array | None:
    """What an RMS norm with a `weight` and an `eps` multiplies by, float32: its weight or one more than that, as its
    result on a random input shows; None where it is neither to within `close`."""
    weight = norm["weight"].astype(mx.float32)
    x = mx.random.normal((2, weight.size), key=mx.random.key(0))
    result = norm(x)
    for factor in (weight, weight + 1.0):
        if difference(result, mx.fast.rms_norm(x, factor, norm.eps)) <= close:
            return factor
    return None


def difference(a: mx.array, b: mx.array) -> float:
    """The largest, as a share of the largest value of `a`."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(a).max())
