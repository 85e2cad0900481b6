"""What the places share that replace a loaded model's layers: finding them, and telling what they compute."""

from collections.abc import Hashable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.siblings import Siblings
from metalctl.kernels.cpu.library import Operation, Turns, Weight


def direct_children(parent: nn.Module) -> list[nn.Module]:
    """The modules that `parent` holds itself, also those in lists."""
    found: list[nn.Module] = []
    for child in parent.children().values():
        found.extend([child] if isinstance(child, nn.Module) else [])
        found.extend(m for m in child if isinstance(m, nn.Module)) if isinstance(child, list) else None
    return found


def with_call_of(ours: type, theirs: type) -> type:
    """The subclass of a module's own class, so that whoever asks still finds it, that is called as ours is."""
    key = (ours, theirs)
    if key not in _subclasses:
        _subclasses[key] = type(theirs.__name__, key, {})
    return _subclasses[key]


_subclasses: dict[tuple[type, type], type] = {}


def kind(value: Any) -> Hashable:
    """Equal for two modules that are the same function of the numbers in their arrays: the same classes and settings,
    and arrays of the same shapes and types. What was proven for one then holds for the other."""
    if isinstance(value, nn.Module):
        settings = {name: each for name, each in vars(value).items() if name not in ("_no_grad", "_training")}
        return type(value), kind(settings), kind(dict(value))
    if isinstance(value, dict):
        return tuple((name, kind(value[name])) for name in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return tuple(map(kind, value))
    if isinstance(value, mx.array):
        return value.shape, value.dtype
    if isinstance(value, Weight):
        return value.layout
    if isinstance(value, Turns):
        return value.inverse_frequencies, value.traditional, value.scale
    if isinstance(value, Operation | Siblings):
        return None  # made of the settings and arrays beside it
    return value if isinstance(value, Hashable) else id(value)


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
