"""Whether the paged forward computes what the model computes by itself, and if not, which layer is the first to differ.

Prompts are read in chunks into scattered blocks and then continued together, through the cache objects that the engine
uses; the model does the same one prompt after the other, with mlx-lm's own cache. Every layer's output for every token
is compared. How far rounding alone carries a layer is measured on the model itself, which reads the prompts once more,
cut at other places.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from metalctl.engine import attention
from metalctl.engine.cache import forward
from metalctl.engine.cache.batching import batch_mask_axes
from metalctl.engine.cache.block_manager import BlockTable
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.cache.layout import CacheLayout, read_layout
from metalctl.kernels.cpu import library

BLOCK = 16  # tokens
CHUNK = 21  # fits no block
OTHER_CHUNK = 13  # the yardstick's
STEPS = 4  # tokens that continue each prompt
ROUNDING = 4  # times the yardstick is rounding still
MOST = 0.4  # and this is not, whatever the yardstick says
FLOORS = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}  # by the dtype of a layer's output
EIGHT_BITS = 1e-2  # of layers that round what comes in to 8 bits, as the CPU kernels do for quantised weights


@dataclass(frozen=True, slots=True)
class Difference:
    """The first layer whose output differs. `layer` None: only the logits do. `token`: position in its prompt, counted
    from 0; `relative` and `allowed` as in `Parity`."""

    layer: int | None
    kind: str
    prompt: int
    token: int
    relative: float
    allowed: float


@dataclass(frozen=True, slots=True)
class Parity:
    """`relative`: the largest distance of a token's logits from the model's own, over the length of those; `rounding`:
    the same of the model's own from itself; `allowed`: what that explains. `agreeing`: tokens behind which both find
    the same one the likeliest. `consistent` is False for a model whose own code brings something else when a prompt is
    cut elsewhere: then there is nothing to compare with."""

    layers: int
    tokens: int
    as_batch: bool
    agreeing: int
    relative: float
    rounding: float
    allowed: float
    consistent: bool
    difference: Difference | None


@dataclass(slots=True)
class _Trace:
    """One prompt and what continues it: for each call of a layer, and for the logits at the end, `[tokens, ...]`."""

    parts: list[list[mx.array]]
    continuation: list[int]

    @property
    def outputs(self) -> list[mx.array]:
        return [mx.concatenate(list(part)) for part in zip(*self.parts, strict=True)]


def check(model: nn.Module, prompts: Many[Many[int]]) -> Parity:
    """Run the self-test on a loaded model, which is left as it was.

    Raises UnsupportedModelError for a model that the engine would refuse.
    """
    attention.install()
    layout = read_layout(model)
    axes = batch_mask_axes(model, layout)
    with _Listener(model) as listener:
        own = [_alone(model, listener, prompt, CHUNK, []) for prompt in prompts]
        answers = [trace.continuation for trace in own]
        again = [
            _alone(model, listener, prompt, OTHER_CHUNK, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        paged = _Paged(model, layout, listener, prompts, axes).run(answers)
    return _compare(own, again, paged, listener, axes is not None, EIGHT_BITS if library.loaded() else 0.0)


# -- listening to layers


class _Listener:
    """Hears the outputs of a model's layers while it is entered, by standing in front of their classes."""

    def __init__(self, model: nn.Module):
        listed = getattr(model, "layers", None) or []
        self.layers = list({id(layer): layer for layer in listed if isinstance(layer, nn.Module)}.values())
        self.names = [type(layer).__name__ for layer in self.layers]
        self.order: list[int] = []  # of the layers, as they are called in one forward
        self._heard: list[tuple[int, mx.array]] = []

    def __enter__(self) -> "_Listener":
        for index, layer in enumerate(self.layers):
            layer.__class__ = _heard_class(type(layer), index, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.__class__ = type(layer).__mro__[1]

    def take(self, logits: mx.array, *others: mx.array) -> list[mx.array]:
        """What was heard since the last time, with the logits behind it: `[B, L, ...]` each, evaluated."""
        arrays = [*(_tokens_first(array, logits.shape[:2]) for _, array in self._heard), logits]
        self.order = [index for index, _ in self._heard]
        self._heard.clear()
        mx.eval(*arrays, *others)
        return arrays


def _tokens_first(output: mx.array, tokens: Many[int]) -> mx.array:
    """With the axes of batch and tokens in front, where a layer has several streams."""
    where = next(axis for axis in range(output.ndim - 1) if list(output.shape[axis : axis + 2]) == list(tokens))
    return mx.moveaxis(mx.moveaxis(output, where, 0), where + 1, 1)


def _heard_class(kind: type, index: int, heard: list[tuple[int, mx.array]]) -> type:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        result = kind.__call__(self, *arguments, **named)
        # Some layers return what they need no further beside the hidden states, which come first.
        heard.append((index, result if isinstance(result, mx.array) else result[0]))
        return result

    return type(kind.__name__, (kind,), {"__call__": call})


# -- the model by itself


def _alone(model: nn.Module, listener: _Listener, prompt: Many[int], chunk: int, answer: Many[int]) -> _Trace:
    """Read the prompt and continue it with `answer`, or where that is empty with the likeliest tokens."""
    cache = make_prompt_cache(model)
    trace = _Trace([], [])

    def call(tokens: Many[int]) -> None:
        outputs = listener.take(model(mx.array([tokens], mx.int32), cache=cache))
        trace.parts.append([output[0] for output in outputs])

    for start in range(0, len(prompt), chunk):
        call(prompt[start : start + chunk])
    for step in range(STEPS):
        trace.continuation.append(answer[step] if answer else _likeliest(trace.parts[-1][-1])[-1])
        call(trace.continuation[-1:])
    return trace


# -- the paged forward


class _Paged:
    """The prompts as sequences of one cache: blocks dealt out in turn, so that those of a sequence lie apart."""

    def __init__(
        self,
        model: nn.Module,
        layout: CacheLayout,
        listener: _Listener,
        prompts: Many[Many[int]],
        mask_axes: int | None,
    ):
        self._model, self._layout, self._listener, self._prompts = model, layout, listener, prompts
        self._as_batch = mask_axes is not None
        count = len(prompts)
        most = -(-(max(map(len, prompts)) + STEPS) // BLOCK)
        self._tables = [BlockTable(0, [1 + row + count * i for i in range(most)]) for row in range(count)]
        self._caches = CacheSet(layout, BLOCK)
        for cache in self._caches.kv:
            cache.resize(1 + count * most)
        for state in self._caches.states:
            state.resize(1 + count)
        if mask_axes is not None:
            self._caches.use_mask_axes(mask_axes)

    def run(self, answers: Many[Many[int]]) -> list[_Trace]:
        traces = [_Trace([], list(answer)) for answer in answers]
        for row, prompt in enumerate(self._prompts):
            for start in range(0, len(prompt), CHUNK):
                self._one(traces[row], row, start, prompt[start : start + CHUNK])
        for step in range(STEPS):
            if self._as_batch:
                self._all(traces, step)
            else:
                for row, prompt in enumerate(self._prompts):
                    self._one(traces[row], row, len(prompt) + step, answers[row][step : step + 1])
        return traces

    def _one(self, trace: _Trace, row: int, offset: int, tokens: Many[int]) -> None:
        groups = self._layout.groups
        slot = row + 1 if self._layout.has_states else None
        step = forward.single(groups, [self._tables[row]] * len(groups), BLOCK, offset, len(tokens), slot)
        trace.parts.append([output[0] for output in self._call([tokens], step)])

    def _all(self, traces: Many[_Trace], step: int) -> None:
        groups = self._layout.groups
        slots = list(range(1, 1 + len(traces))) if self._layout.has_states else None
        offsets = [len(prompt) + step for prompt in self._prompts]
        batch = forward.batch(groups, [[table] * len(groups) for table in self._tables], BLOCK, offsets, slots)
        outputs = self._call([trace.continuation[step : step + 1] for trace in traces], batch)
        for row, trace in enumerate(traces):
            trace.parts.append([output[row] for output in outputs])

    def _call(self, tokens: Many[Many[int]], step: forward.Forward) -> list[mx.array]:
        logits = self._caches.call(self._model, mx.array([list(row) for row in tokens], mx.int32), step)
        return self._listener.take(logits, *self._caches.arrays)


# -- comparing


def _compare(
    own: Many[_Trace], again: Many[_Trace], paged: Many[_Trace], listener: _Listener, as_batch: bool, floor: float
) -> Parity:
    """Layer by layer, and for each over all prompts; the logits come last."""
    columns = [list(zip(*(trace.outputs for trace in traces), strict=True)) for traces in (own, again, paged)]
    first, relative, allowed, yardstick, most = None, 0.0, 0.0, 0.0, 0.0
    for place, (expected, other, got) in enumerate(zip(*columns, strict=True)):
        yardstick, _, _ = _furthest(other, expected)
        most = max(most, yardstick)
        allowed = min(MOST, max(floor, FLOORS.get(expected[0].dtype, FLOORS[mx.float32]), ROUNDING * yardstick))
        relative, prompt, token = _furthest(got, expected)
        if first is None and not relative <= allowed:
            layer = listener.order[place] if place < len(listener.order) else None
            kind = "logits" if layer is None else listener.names[layer]
            first = Difference(layer, kind, prompt, token, relative, allowed)
    expected, got = (mx.concatenate([trace.outputs[-1] for trace in traces]) for traces in (own, paged))
    agreeing = sum(one == other for one, other in zip(_likeliest(expected), _likeliest(got), strict=True))
    return Parity(
        layers=len(listener.layers),
        tokens=expected.shape[0],
        as_batch=as_batch,
        agreeing=agreeing,
        relative=relative,
        rounding=yardstick,
        allowed=allowed,
        consistent=most <= MOST,
        difference=first if most <= MOST else None,
    )


def _furthest(got: Many[mx.array], expected: Many[mx.array]) -> tuple[float, int, int]:
    """The largest distance of a token's vector from the expected one, over the length of that; its prompt and token."""
    found = []
    for prompt, (one, other) in enumerate(zip(got, expected, strict=True)):
        distance = np.array(_distances(one, other))
        token = int(distance.argmax())
        found.append((float(distance[token]), prompt, token))
    return max(found)


def _likeliest(logits: mx.array) -> list[int]:
    """The likeliest token behind each of `logits` `[tokens, V]`."""
    return [int(token) for token in np.array(mx.argmax(logits, axis=-1))]


def _distances(got: mx.array, expected: mx.array) -> mx.array:
    """For each token, `[tokens]`; infinite where only one of the two vectors is finite in a place."""
    got, expected = (array.reshape(array.shape[0], -1).astype(mx.float32) for array in (got, expected))
    finite = mx.isfinite(expected)
    same = mx.all(mx.isfinite(got) == finite, axis=-1)
    difference = mx.where(finite & mx.isfinite(got), got - expected, 0)
    length = mx.linalg.norm(mx.where(finite, expected, 0), axis=-1)
    return mx.where(same, mx.linalg.norm(difference, axis=-1) / mx.maximum(length, 1e-20), mx.inf)
