"""The compiled library: loading it, and its functions on MLX arrays.

An operation is made once, with its weights, and then called: each call adds one node to MLX's lazy graph. Inputs may
have any strides and be float16, bfloat16 or float32; results are float32.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import mlx.core as mx

from metalctl.kernels.cores import usable_cores

_objects = ctypes.py_object
_pointer = ctypes.c_void_p


class LibraryError(Exception):
    """The compiled library does not go with this Python, MLX or processor."""


class Format(IntEnum):
    """How the values of a packed matrix are stored."""

    Q4 = 4
    Q5 = 5
    Q6 = 6
    Q8 = 8
    F16 = 16
    BF16 = 17
    F32 = 32


class Gate(IntEnum):
    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3


_FLOATS = {mx.float16: Format.F16, mx.bfloat16: Format.BF16, mx.float32: Format.F32}
_SIGNATURES = {
    "failure": (ctypes.c_char_p, []),
    "best": (ctypes.c_char_p, []),
    "start": (ctypes.c_bool, [_objects, _objects, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]),
    "threads": (ctypes.c_int, []),
    "packing": (_pointer, [ctypes.c_int] * 6),
    "weight": (_pointer, [_objects, *[ctypes.c_int] * 6]),
    "release_weight": (None, [_pointer]),
    "linear": (
        _pointer,
        [ctypes.c_int, _pointer, _pointer, ctypes.c_int, _objects, ctypes.c_float, ctypes.c_int],
    ),
    "embedding": (_pointer, [_pointer]),
    "rms_norm": (_pointer, [_objects, ctypes.c_float]),
    "glu": (_pointer, [ctypes.c_int]),
    "turns": (_pointer, [ctypes.c_int, _pointer, ctypes.c_float]),
    "release_turns": (None, [_pointer]),
    "rope": (_pointer, [_pointer, ctypes.c_int]),
    "layer": (_pointer, [_pointer, ctypes.c_float, ctypes.c_float, *[_pointer] * 5]),
    "attention": (_pointer, [ctypes.c_float, ctypes.c_float, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "both_ways": (_pointer, [ctypes.c_float, ctypes.c_int]),
    "draw": (_pointer, []),
    "release": (None, [_pointer]),
    "apply": (ctypes.c_bool, [_pointer, *[_objects] * 5]),
    "apply_many": (ctypes.c_bool, [_pointer, ctypes.c_int, _pointer, _objects]),
}

_library: ctypes.PyDLL | None = None
_isa = ""


def load(path: Path, isa: str | None = None, threads: int | None = None) -> None:
    """Use the library at `path`, with the best instruction set that this processor has unless one is named.

    The number of threads is fixed by the first call. Raises LibraryError.
    """
    global _library, _isa
    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path.name} cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"metalctl_{name}")
        function.restype, function.argtypes = result, arguments
    best = library.metalctl_best().decode()
    sample = mx.array([7, 8], mx.int32)
    wanted = isa or best
    size = mx.array.__basicsize__
    header = object.__basicsize__
    if not library.metalctl_start(sample, None, header, size, wanted.encode(), threads or usable_cores()):
        raise LibraryError(library.metalctl_failure().decode())
    _library, _isa = library, wanted


def unload() -> None:
    """Use no library from now on. Operations that were made go on working."""
    global _library
    _library = None


def loaded() -> bool:
    return _library is not None


def description() -> str:
    """The instruction set and the number of threads, as `avx512-vnni, 2 threads`."""
    count = _get().metalctl_threads()
    return f"{_isa}, {count} thread{'s' if count != 1 else ''}"


def _get() -> ctypes.PyDLL:
    if _library is None:
        raise LibraryError("the CPU kernels have not been loaded")
    return _library


class Operation:
    """A node to be added to the graph, again and again. Raises ValueError where shapes do not go together."""

    def __init__(self, handle: int, results: int = 1):
        library = _get()
        self._handle = handle
        self._results = results
        self._apply = library.metalctl_apply
        self._apply_many = library.metalctl_apply_many
        self._failure = library.metalctl_failure
        self._release = library.metalctl_release

    def __call__(self, x: mx.array, second: mx.array | None = None) -> mx.array:
        out = mx.array(0)
        if not self._apply(self._handle, x, second, out, None, None):
            raise ValueError(self._failure().decode())
        return out

    def all(self, x: mx.array) -> list[mx.array]:
        """The results of an operation that has two or three."""
        outs = [mx.array(0) if i < self._results else None for i in range(3)]
        if not self._apply(self._handle, x, None, *outs):
            raise ValueError(self._failure().decode())
        return [out for out in outs if out is not None]

    def of(self, *inputs: mx.array | None) -> mx.array:
        """The result for any number of inputs; None stands for one that is left out."""
        out = mx.array(0)
        array = (_objects * len(inputs))(*inputs)  # type: ignore[misc]
        if not self._apply_many(self._handle, len(inputs), array, out):
            raise ValueError(self._failure().decode())
        return out

    def __del__(self) -> None:
        self._release(self._handle)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and storage of packed matrices: `count` of `[n, k]` each, quantised in groups of `group` along k."""

    format: Format
    count: int
    n: int
    k: int
    group: int = 32
    wide_scales: bool = False  # float32 scales and offsets instead of float16

    @property
    def numbers(self) -> tuple[int, ...]:
        return (int(self.format), self.count, self.n, self.k, self.group, int(self.wide_scales))


class Weight:
    """Matrices in the layout that the kernels read; `data` is uint8 and evaluated."""

    def __init__(self, data: mx.array, layout: Layout):
        self.data = data
        self.layout = layout
        self._release = _get().metalctl_release_weight
        self.handle = _get().metalctl_weight(data, *layout.numbers)

    def __del__(self) -> None:
        self._release(self.handle)


def can_pack(bits: int, group_size: int, mode: str = "affine") -> bool:
    return mode == "affine" and bits in (4, 5, 6, 8) and group_size in (32, 64, 128)


def pack_quantized(codes: mx.array, scales: mx.array, offsets: mx.array, bits: int, group_size: int) -> Weight:
    """MLX's affine layout `[n, k * bits / 32]` uint32 with `[n, k / group_size]`, or the same with a leading axis.

    Scales keep their values: they are stored in float16 where that is exact for all, else in float32.
    """
    exact = _fits_float16(scales) and _fits_float16(offsets)
    width = mx.float16 if exact else mx.float32
    *lead, n, groups = scales.shape
    layout = Layout(Format(bits), lead[0] if lead else 1, n, groups * group_size, group_size, not exact)
    return _pack(layout, codes, scales.astype(width), offsets.astype(width))


def _fits_float16(numbers: mx.array) -> bool:
    """Whether float16 keeps them all. The first few mostly tell."""
    if numbers.dtype == mx.float16:
        return True
    numbers = numbers.reshape(-1)
    return all(bool(mx.all(some.astype(mx.float16) == some)) for some in (numbers[:256], numbers))


def pack_floating(weight: mx.array) -> Weight:
    """`[n, k]` or `[count, n, k]` in float16, bfloat16 or float32."""
    *lead, n, k = weight.shape
    return _pack(Layout(_FLOATS[weight.dtype], lead[0] if lead else 1, n, k), weight)


def _pack(layout: Layout, *parts: mx.array) -> Weight:
    data = Operation(_get().metalctl_packing(*layout.numbers)).of(*(mx.contiguous(part) for part in parts))
    mx.eval(data)
    return Weight(data, layout)


# -- operations


def linear(
    weights: Sequence[Weight],
    biases: Sequence[mx.array | None] | None = None,
    gate: Gate = Gate.NONE,
    norm: tuple[mx.array, float] | None = None,
) -> Operation:
    """x `[..., k]` times each weight, plus its bias (float32); with a gate `gate(x . w0 + b0) * (x . w1 + b1)`.

    `norm` (weight, eps) is an RMS norm that x goes through first. A second input is added to the (one) result.
    """
    return _linear(weights, biases, gate, norm, experts=False)


def experts(
    weights: Sequence[Weight], biases: Sequence[mx.array | None] | None = None, gate: Gate = Gate.NONE
) -> Operation:
    """x `[..., 1, k]` and int32 experts `[...]`, broadcast against each other: each row times its expert's matrix."""
    return _linear(weights, biases, gate, None, experts=True)


def _linear(
    weights: Sequence[Weight],
    biases: Sequence[mx.array | None] | None,
    gate: Gate,
    norm: tuple[mx.array, float] | None,
    experts: bool,
) -> Operation:
    count = len(weights)
    added = (_objects * count)(*(biases or [None] * count))  # type: ignore[misc]
    handles = (_pointer * count)(*(weight.handle for weight in weights))
    norm_weight, eps = norm or (None, 0.0)
    handle = _get().metalctl_linear(count, handles, added, int(gate), norm_weight, eps, int(experts))
    return Operation(handle, 1 if gate else count)


def embedding(weight: Weight) -> Operation:
    """ids (int32 or uint32, any shape) to `[..., k]`."""
    return Operation(_get().metalctl_embedding(weight.handle))


def rms_norm(weight: mx.array, eps: float) -> Operation:
    """x `[..., k]` with a float32 weight `[k]`."""
    return Operation(_get().metalctl_rms_norm(weight, eps))


def glu(kind: Gate) -> Operation:
    """`kind(x) * second`."""
    return Operation(_get().metalctl_glu(int(kind)))


class Turns:
    """Rotary positions: an angle of `position * scale * inverse_frequencies[i]` for the i-th pair."""

    def __init__(self, inverse_frequencies: Sequence[float], traditional: bool, scale: float):
        count = len(inverse_frequencies)
        values = (ctypes.c_float * count)(*inverse_frequencies)
        self.inverse_frequencies = tuple(inverse_frequencies)
        self.traditional = traditional
        self.scale = scale
        self._release = _get().metalctl_release_turns
        self.handle = _get().metalctl_turns(count, values, scale)

    def __del__(self) -> None:
        self._release(self.handle)


def rope(turns: Turns) -> Operation:
    """x `[B, ..., L, D]` turned from a position on that the second input says: int32, a scalar or `[B]`."""
    return Operation(_get().metalctl_rope(turns.handle, int(turns.traditional)))


def attention(scale: float, softcap: float | None, window: int | None, sinks: bool, starts: bool) -> Operation:
    """The body of `metalctl.kernels.paged_attention`: inputs in its order, then sinks (float32) and starts."""
    return Operation(_get().metalctl_attention(scale, softcap or 0.0, window or 0, int(sinks), int(starts)))


def both_ways(scale: float, window: int | None) -> Operation:
    """Attention of texts whose tokens see both ways, at most `window` tokens far; None: all.

    Queries, keys and values `[B, H, L, D]` and lengths (int32 `[B]`) to `[B, H, L, D]`, with zeros beyond the lengths.
    """
    return Operation(_get().metalctl_both_ways(scale, -1 if window is None else window))


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer.

    `linears`: weights and biases of q, k, v, o, gate, up, down. `norms`: (weight, eps), or None, before attention, of
    each head of q, of k, after attention, before the MLP, after it. With `gate` NONE it ends after attention.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float
    softcap: float | None
    turns: Turns | None
    gate: Gate
    linears: Sequence[tuple[Weight, mx.array | None]]
    norms: Sequence[tuple[mx.array, float] | None]


def decoder_layer(layer: Layer, window: int | None, block_size: int) -> Operation:
    """x after the layer, of x `[B, L, hidden]`, the pools of keys and values `[blocks * block_size, Hkv, D]`, and int32
    slots `[B * L]`, tables `[B, n]`, lengths `[B]` and first positions `[B]`.

    Writes keys and values into the pools' slots in place, which only the owner of the pools may ask for.
    """
    turns = layer.turns
    traditional = turns is not None and turns.traditional
    numbers = (layer.heads, layer.kv_heads, layer.width, window or 0, int(traditional))
    handle = _get().metalctl_layer(
        (ctypes.c_int * 7)(*numbers, int(layer.gate), block_size),
        layer.scale,
        layer.softcap or 0.0,
        turns.handle if turns else None,
        (_pointer * 7)(*(weight.handle for weight, _ in layer.linears)),
        (_objects * 7)(*(bias for _, bias in layer.linears)),  # type: ignore[misc]
        (_objects * 6)(*(norm and norm[0] for norm in layer.norms)),  # type: ignore[misc]
        (ctypes.c_float * 6)(*(norm[1] if norm else 0.0 for norm in layer.norms)),
    )
    return Operation(handle)


def draw() -> Operation:
    """Tokens int32 `[N]` of logits `[N, V]` and settings `[N, 5]`, float32: temperature (above 0), top_k (V keeps all),
    top_p (1 keeps all), min_p (0 keeps all), and a uniform number in [0, 1) that decides."""
    return Operation(_get().metalctl_draw())
