"""From the vectors of a text's tokens to one vector."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from metalctl.engine.embedding.recipe import DenseStage
from metalctl.engine.embedding.weights import read_arrays
from metalctl.engine.errors import CheckpointError, UnsupportedModelError

Vector = npt.NDArray[np.float32]

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "SiLU": nn.silu,
    "Sigmoid": mx.sigmoid,
}


def pool(hidden: mx.array, modes: Sequence[str], starts: mx.array, lengths: mx.array) -> mx.array:
    """`[B, L, H]` to `[B, H * len(modes)]` in float32, over the tokens from `starts` to before `lengths` (int32 `[B]`).

    `modes` are values of metalctl.engine.embedding.recipe.POOLINGS.
    """
    hidden = hidden.astype(mx.float32)
    positions = mx.arange(hidden.shape[1])[None, :]
    pooled = (positions >= starts[:, None]) & (positions < lengths[:, None])
    weights = pooled.astype(mx.float32)[..., None]
    parts = [_POOLS[mode](hidden, pooled, weights, starts, lengths) for mode in modes]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _at(hidden: mx.array, positions: mx.array) -> mx.array:
    return mx.take_along_axis(hidden, positions[:, None, None], axis=1)[:, 0]


def _sum(hidden: mx.array, weights: mx.array) -> mx.array:
    return (weights.swapaxes(1, 2) @ hidden)[:, 0]


def _weighted_mean(hidden: mx.array, weights: mx.array) -> mx.array:
    rising = weights * mx.arange(1, hidden.shape[1] + 1, dtype=mx.float32)[None, :, None]
    return _sum(hidden, rising) / rising.sum(axis=1)


_POOLS: dict[str, Callable[..., mx.array]] = {
    "cls": lambda hidden, pooled, weights, starts, lengths: _at(hidden, starts),
    "max": lambda hidden, pooled, *_: mx.where(pooled[..., None], hidden, -mx.inf).max(axis=1),
    "mean": lambda hidden, pooled, weights, *_: _sum(hidden, weights) / weights.sum(axis=1),
    "mean_sqrt_len_tokens": lambda hidden, pooled, weights, *_: _sum(hidden, weights) / mx.sqrt(weights.sum(axis=1)),
    "weightedmean": lambda hidden, pooled, weights, *_: _weighted_mean(hidden, weights),
    "lasttoken": lambda hidden, pooled, weights, starts, lengths: _at(hidden, lengths - 1),
}


class Dense(nn.Module):
    """A layer that pooled vectors go through, read from a checkpoint's own folder for it."""

    def __init__(self, stage: DenseStage):
        super().__init__()
        if stage.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(f"The activation {stage.activation!r} in {stage.folder.name} is not known.")
        self.activation = _ACTIVATIONS[stage.activation]
        self.linear = nn.Linear(stage.in_features, stage.out_features, bias=stage.bias)
        arrays = read_arrays(sorted(stage.folder.glob("*.safetensors")), str(stage.folder))
        try:
            self.load_weights(list(arrays.items()), strict=True)
        except ValueError as error:
            raise CheckpointError(f"{stage.folder} does not hold what its config.json says: {error}") from error
        self.set_dtype(mx.float32)
        mx.eval(self.parameters())

    def __call__(self, x: mx.array) -> mx.array:
        return self.activation(self.linear(x))


def shorten(vector: Vector, dimensions: int | None, normalize: bool) -> Vector:
    """The first `dimensions` of a vector, brought to length one if asked; a vector that is cut always is."""
    if dimensions is not None and dimensions < len(vector):
        vector, normalize = vector[:dimensions], True
    if not normalize:
        return vector
    norm: Any = np.linalg.norm(vector)
    return vector / max(norm, np.float32(1e-12))
