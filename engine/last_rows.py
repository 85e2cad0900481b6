"""Logits for the positions that are needed and no others.

mlx-lm's models compute logits for every token that they are given. While a prompt is read only the last one's matter,
and for a small model the output projection over a whole chunk costs more than all layers together. So the projection
is wrapped, in the loaded model, by one that looks at a switch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_HEADS = ("lm_head", "output", "head", "embed_out", "output_layer")


class LastRows:
    """Makes a model's output projection compute the last position only, while `active`."""

    def __init__(self, model: nn.Module):
        self.active = False
        for parent in model.modules():
            for name, child in list(parent.children().items()):
                if isinstance(child, _Head):  # of an engine before
                    child.watch(self)
                elif name in _HEADS and isinstance(child, (nn.Linear, nn.QuantizedLinear)):
                    setattr(parent, name, _Head(child, self))
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
                object.__setattr__(module, "as_linear", _Projection(module.as_linear, self))

    @contextmanager
    def only(self, active: bool) -> Iterator[None]:
        """Within the block the model computes the last position only, if `active`."""
        self.active = active
        try:
            yield
        finally:
            self.active = False

    def cut(self, hidden: mx.array) -> mx.array:
        return hidden[:, -1:] if self.active and hidden.ndim == 3 else hidden


class _Head(nn.Module):
    def __init__(self, inner: nn.Module, rows: LastRows):
        super().__init__()
        self.inner = inner
        self.watch(rows)

    def watch(self, rows: LastRows) -> None:
        object.__setattr__(self, "_rows", rows)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.inner(self._rows.cut(hidden))

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError:
            return getattr(super().__getattr__("inner"), key)


class _Projection:
    def __init__(self, inner: Any, rows: LastRows):
        self._inner = inner
        self._rows = rows

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._inner(self._rows.cut(hidden))
