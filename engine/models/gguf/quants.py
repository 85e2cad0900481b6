"""From GGML's block types to the layouts that MLX computes with.

MLX's affine layout holds groups of 32, 64 or 128 values of 2, 3, 4, 5, 6 or 8 bits, each with a scale and an offset.
Most block types are such groups in another order: they are repacked, and no value changes. Types with groups of 16 have
two scales where MLX has one, and some have values at uneven distances: these are rounded, in steps so fine that the
error is small beside that of the type itself. With precision "exact" they take more bits, or become floating-point.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from metalctl.engine.config import Precision
from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.gguf import lattice, sixteens, unpack
from metalctl.engine.models.gguf.bits import Bytes, pack_bits, split_halves, spread_bits
from metalctl.engine.models.gguf.unpack import Floats, Integers, Unpacked

VALUES_AT_ONCE = 1 << 20  # few enough for the processor's cache, and enough to keep threads out of each other's way
MOST_AHEAD = 12  # parts that are packed before they are asked for

Type = GGMLQuantizationType
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Format:
    """How MLX holds a block type. `pack` turns blocks [N, bytes] into bit-packed values, scales and biases.

    Biases are None where the mode has none. `exact`: no value changes but by rounding of float arithmetic.
    """

    pack: Callable[[Bytes], tuple[Bytes, npt.NDArray[Any], Floats | None]]
    bits: int
    group_size: int = 32
    mode: Literal["affine", "mxfp4", "nvfp4"] = "affine"
    exact: bool = True

    @property
    def parameters(self) -> dict[str, Any]:
        """As nn.quantize takes them."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows in MLX's quantised layout: uint32 [N, K * bits / 32], scales and biases [N, K / group_size]."""

    weight: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    biases: Floats | None


def _affine(unpacker: Callable[[Bytes], Unpacked], bits: int, blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    q, scales, offsets = unpacker(blocks)
    if q.dtype == np.int8:
        q, offsets = q.view(np.uint8) ^ np.uint8(128), offsets - 128 * scales
    return pack_bits(q, bits), scales, offsets


def _nibbles(
    scales: Callable[[Bytes], tuple[Floats, Floats]], start: int, run: int, blocks: Bytes
) -> tuple[Bytes, Floats, Floats]:
    return split_halves(blocks[:, start:], run), *scales(blocks)


def _q1_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return spread_bits(blocks[:, 2:]), *unpack.q1_0_scales(blocks)


def _tq1_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return np.hstack([pack_bits(run, 2) for run in unpack.tq1_0_digits(blocks)]), *unpack.tq1_0_scales(blocks)


def _mxfp4(blocks: Bytes) -> tuple[Bytes, Bytes, None]:
    return split_halves(blocks[:, 1:], 16), blocks[:, :1], None


def _nvfp4(blocks: Bytes) -> tuple[Bytes, Bytes, None]:
    scales = blocks[:, :4] & np.uint8(0x7F)
    scales[scales == 0x7F] = 0
    return pack_bits(unpack.nibbles(blocks[:, 4:], 8), 4), scales, None


def _exact(unpacker: Callable[[Bytes], Unpacked], bits: int, group_size: int = 32) -> Format:
    return Format(partial(_affine, unpacker, bits), bits, group_size)


def _rounded(pack: Callable[[Bytes], tuple[Bytes, Floats, Floats]], bits: int) -> Format:
    return Format(pack, bits, exact=False)


FORMATS: dict[GGMLQuantizationType, Format] = {
    Type.Q4_0: Format(partial(_nibbles, unpack.q4_0_scales, 2, 16), 4),
    Type.Q4_1: Format(partial(_nibbles, unpack.q4_1_scales, 4, 16), 4),
    Type.Q5_0: _exact(unpack.q5_0, 5),
    Type.Q5_1: _exact(unpack.q5_1, 5),
    Type.Q8_0: _exact(unpack.q8_0, 8),
    Type.Q4_K: Format(partial(_nibbles, unpack.q4_k_scales, 16, 32), 4),
    Type.Q5_K: _exact(unpack.q5_k, 5),
    Type.Q1_0: Format(_q1_0, 2, 128),
    Type.TQ1_0: Format(_tq1_0, 2, 128),
    Type.TQ2_0: _exact(unpack.tq2_0, 2, 128),
    Type.IQ4_NL: _exact(unpack.iq4_nl, 8),
    Type.IQ4_XS: _exact(unpack.iq4_xs, 8),
    Type.IQ3_S: Format(lattice.iq3_s, 4),
    Type.IQ1_S: Format(lattice.iq1_s, 2),
    Type.Q6_K: _rounded(sixteens.q6_k, 8),
    Type.Q3_K: _rounded(sixteens.q3_k, 5),
    Type.Q2_K: _rounded(sixteens.q2_k, 4),
    Type.IQ3_XXS: _rounded(lattice.iq3_xxs, 4),
    Type.IQ2_XXS: _rounded(lattice.iq2_xxs, 4),
    Type.IQ2_XS: _rounded(lattice.iq2_xs, 4),
    Type.IQ2_S: _rounded(lattice.iq2_s, 4),
    Type.IQ1_M: _rounded(lattice.iq1_m, 4),
    Type.MXFP4: Format(_mxfp4, 4, mode="mxfp4"),
    Type.NVFP4: Format(_nvfp4, 4, 16, mode="nvfp4"),
}

# What precision "exact" takes instead; of other types that FORMATS rounds it makes floating-point numbers.
EXACT_FORMATS: dict[GGMLQuantizationType, Format] = {
    Type.IQ3_XXS: _exact(unpack.iq3_xxs, 8),
    Type.IQ2_XXS: _exact(unpack.iq2_xxs, 8),
}

FLOATS: dict[GGMLQuantizationType, Any] = {
    Type.F64: np.float64,
    Type.F32: np.float32,
    Type.F16: np.float16,
    Type.BF16: np.uint16,
}

HALVES: dict[GGMLQuantizationType, str] = {Type.F16: "float16", Type.BF16: "bfloat16"}


def check_type(tensor: str, kind: GGMLQuantizationType) -> None:
    """Raises UnsupportedModelError when tensors of this type cannot be loaded."""
    if kind not in FORMATS and kind not in FLOATS:
        raise UnsupportedModelError(
            f"Tensor {tensor!r} is stored as {kind.name}, which is not a type for weights.",
            "Take another quantisation of the model: " + ", ".join(sorted(kind.name for kind in FORMATS)) + ".",
        )


def quantised_format(kind: GGMLQuantizationType, precision: Precision) -> Format | None:
    """How a matrix of this type is held; None: as floating-point numbers."""
    chosen = FORMATS.get(kind)
    if precision == "size" or chosen is None or chosen.exact:
        return chosen
    return EXACT_FORMATS.get(kind)


def explain(kind: GGMLQuantizationType, precision: Precision = "size") -> str:
    """How matrices of this type are loaded, in words for a person."""
    if kind not in FORMATS:
        return "floating point" if kind in FLOATS else "cannot be loaded"
    chosen = quantised_format(kind, precision)
    if chosen is None:
        return "dequantised to floating point"
    if chosen.mode != "affine":
        return f"{chosen.mode}, as stored"
    how = "repacked exactly" if chosen.exact else "rounded to"
    return f"{how}{' as' if chosen.exact else ''} {chosen.bits} bits in groups of {chosen.group_size}"


def pack(tensor: str, rows: Bytes, kind: GGMLQuantizationType, chosen: Format, pool: Executor) -> Iterator[Packed]:
    """Repacks rows of blocks, uint8 [N, bytes of a row], some rows after the other. The first are begun at once.

    Raises CheckpointError where a scale is not finite.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]

    def work(some: Bytes) -> Packed:
        with np.errstate(all="ignore"):
            weight, scales, biases = chosen.pack(some.reshape(-1, block_bytes))
        if biases is not None:
            _check_finite(tensor, scales, biases)
            biases = biases.reshape(len(some), -1)
        return Packed(weight.reshape(len(some), -1).view(np.uint32), scales.reshape(len(some), -1), biases)

    return _in_order(pool, work, rows, VALUES_AT_ONCE // (rows.shape[1] // block_bytes * block))


def dequantize(tensor: str, rows: Bytes, kind: GGMLQuantizationType, pool: Executor | None = None) -> Floats:
    """Rows of blocks, uint8 [..., bytes of a row], as float32 [..., values of a row]; without a pool in this thread."""
    if kind in FLOATS:
        stored = np.ascontiguousarray(rows).view(FLOATS[kind])
        wide = (stored.astype(np.uint32) << 16).view(np.float32) if kind is Type.BF16 else stored
        values: Floats = wide.astype(np.float32)
        return values
    block, block_bytes = GGML_QUANT_SIZES[kind]
    unpacker = getattr(unpack, kind.name.lower(), None)

    def work(blocks: Bytes) -> Floats:
        with np.errstate(all="ignore"):
            if unpacker is None:
                some: Floats = gguf.dequantize(np.ascontiguousarray(blocks), kind)
            else:
                some = dequantize_blocks(unpacker(blocks))
        _check_finite(tensor, some)
        return some

    blocks = rows.reshape(-1, block_bytes)
    result, done = np.empty((len(blocks), block), np.float32), 0
    for some in _in_order(pool, work, blocks, VALUES_AT_ONCE // block):
        result[done : done + len(some)] = some
        done += len(some)
    return result.reshape(*rows.shape[:-1], -1)


def dequantize_blocks(unpacked: Unpacked) -> Floats:
    """float32 [N, values of a block]."""
    q, scales, offsets = unpacked
    values = q.reshape(*scales.shape, -1).astype(np.float32)
    values *= scales[:, :, None]
    values += offsets[:, :, None]
    return values.reshape(q.shape)


def _check_finite(tensor: str, *arrays: Integers) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise CheckpointError(
            f"Tensor {tensor!r} has values that are not finite numbers.", "The file is damaged: download it again."
        )


def _in_order(pool: Executor | None, work: Callable[[Bytes], Result], rows: Bytes, step: int) -> Iterator[Result]:
    """The results of `work` for `step` rows after the other, each begun MOST_AHEAD before it is asked for."""
    step = max(step, 1)
    parts = iter([rows[start : start + step] for start in range(0, len(rows), step)])
    if pool is None:
        return map(work, parts)
    ahead = deque(pool.submit(work, part) for part in islice(parts, MOST_AHEAD))

    def results() -> Iterator[Result]:
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(work, part) for part in islice(parts, 1))
            yield result

    return results()
