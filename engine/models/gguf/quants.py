"""From GGML's block types to the layouts that MLX computes with.

MLX's affine layout holds groups of 32, 64 or 128 values of 2, 3, 4, 5, 6 or 8 bits, each with a scale and an offset.
Most block types are such groups in another order: they are repacked, and no value changes. Types with groups of 16 have
two scales where MLX has one, and some have values at uneven distances: these are rounded, in steps so fine that the
error is small beside that of the type itself. With precision "exact" they take more bits, or become floating-point.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from metalctl.engine.config import Precision
from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.gguf import unpack
from metalctl.engine.models.gguf.unpack import Bytes, Floats, Integers, Unpacked

VALUES_AT_ONCE = 1 << 18  # a chunk's integers and floats stay in the processor's cache

Type = GGMLQuantizationType


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
    """A matrix in MLX's quantised layout: uint32 [..., K * bits / 32], scales and biases [..., K / group_size]."""

    weight: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    biases: Floats | None


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Codes below 2**bits, [N, K] with K a multiple of 8, as one little-endian stream of bits: [N, K * bits / 8]."""
    if bits == 8:
        return codes
    words = np.ascontiguousarray(codes).view(np.uint64)
    for width, lanes in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        used = bits * width // 8
        low, high = words & np.uint64(lanes), (words >> np.uint64(width)) & np.uint64(lanes)
        words = low | high << np.uint64(used)
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(codes), -1, 8)[:, :, :bits]).reshape(len(codes), -1)


def _affine(unpacker: Callable[[Bytes], Unpacked], bits: int, blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    q, scales, offsets = unpacker(blocks)
    if q.dtype == np.int8:
        q, offsets = q.view(np.uint8) ^ np.uint8(128), offsets - 128 * scales
    return pack_bits(q, bits), scales, offsets


def regroup_nibbles(packed: Bytes, run: int) -> Bytes:
    """Bytes whose low halves are `run` values and whose high halves are the next, as pairs of neighbours in a byte."""
    pairs = np.ascontiguousarray(packed).view(np.uint16)
    low = (pairs & np.uint16(0x0F) | pairs >> 4 & np.uint16(0xF0)).astype(np.uint8)
    high = (pairs >> 4 & np.uint16(0x0F) | pairs >> 8 & np.uint16(0xF0)).astype(np.uint8)
    halves = [half.view(np.uint64).reshape(len(packed), -1, run // 16) for half in (low, high)]
    return np.stack(halves, axis=2).view(np.uint8).reshape(len(packed), -1)


def _regrouped(
    scales: Callable[[Bytes], tuple[Floats, Floats]], start: int, run: int, blocks: Bytes
) -> tuple[Bytes, Floats, Floats]:
    return regroup_nibbles(blocks[:, start:], run), *scales(blocks)


def _merge_groups(
    unpacker: Callable[[Bytes], Unpacked], step: float, centre: float, bits: int, blocks: Bytes
) -> tuple[Bytes, Floats, Floats]:
    """Integers around zero in groups of 16 (or 32), two groups in one unit: `step` times the larger scale."""
    q, scales, _ = unpacker(blocks)
    pairs = np.repeat(scales, 2, axis=1) if 32 * scales.size == q.size else scales
    pairs = pairs.reshape(-1, 2)
    larger = np.where(np.abs(pairs[:, 0]) >= np.abs(pairs[:, 1]), pairs[:, 0], pairs[:, 1])[:, None]
    unit = larger * np.float32(step)
    starts = np.full_like(pairs, centre)
    return _recoded(q, bits, _ratio(pairs, unit), starts, unit, np.float32(-centre) * unit, len(blocks))


def _refit_groups(
    unpacker: Callable[[Bytes], Unpacked], top: int, bits: int, blocks: Bytes
) -> tuple[Bytes, Floats, Floats]:
    """Integers up to `top` in groups of 16 with offsets, two groups in equal steps over all values they can have."""
    q, scales, offsets = unpacker(blocks)
    pairs, starts = scales.reshape(-1, 2), offsets.reshape(-1, 2)
    stops = starts + np.float32(top) * pairs
    least, most = np.minimum(starts, stops), np.maximum(starts, stops)
    offset = np.minimum(least[:, 0], least[:, 1])[:, None]
    unit = (np.maximum(most[:, 0], most[:, 1])[:, None] - offset) / np.float32((1 << bits) - 1)
    return _recoded(q, bits, _ratio(pairs, unit), _ratio(starts - offset, unit), unit, offset, len(blocks))


def _ratio(values: Floats, unit: Floats) -> Floats:
    """values / unit, zero where the unit is."""
    return values * np.divide(np.float32(1), unit, out=np.zeros_like(unit), where=unit != 0)


def _recoded(
    q: Integers, bits: int, ratios: Floats, starts: Floats, unit: Floats, offset: Floats, blocks: int
) -> tuple[Bytes, Floats, Floats]:
    """Pairs of groups of 16 in one unit: the codes are q * ratio + start, rounded."""
    codes = q.reshape(-1).astype(np.float32)
    codes *= np.repeat(ratios.reshape(-1), 16)
    codes += np.repeat(starts.reshape(-1) + np.float32(0.5), 16)
    np.clip(codes, 0, (1 << bits) - 1, out=codes)
    whole: Bytes = codes.astype(np.uint8).reshape(blocks, -1)
    return pack_bits(whole, bits), unit.reshape(blocks, -1), offset.reshape(blocks, -1)


def _mxfp4(blocks: Bytes) -> tuple[Bytes, Bytes, None]:
    return pack_bits(unpack.nibbles(blocks[:, 1:], 16), 4), blocks[:, :1], None


def _nvfp4(blocks: Bytes) -> tuple[Bytes, Bytes, None]:
    scales = blocks[:, :4] & np.uint8(0x7F)
    scales[scales == 0x7F] = 0
    return pack_bits(unpack.nibbles(blocks[:, 4:], 8), 4), scales, None


def _exact(unpacker: Callable[[Bytes], Unpacked], bits: int, group_size: int = 32) -> Format:
    return Format(partial(_affine, unpacker, bits), bits, group_size)


def _merged(unpacker: Callable[[Bytes], Unpacked], step: float, centre: float, bits: int) -> Format:
    return Format(partial(_merge_groups, unpacker, step, centre, bits), bits, exact=False)


FORMATS: dict[GGMLQuantizationType, Format] = {
    Type.Q4_0: Format(partial(_regrouped, unpack.q4_0_scales, 2, 16), 4),
    Type.Q4_1: Format(partial(_regrouped, unpack.q4_1_scales, 4, 16), 4),
    Type.Q5_0: _exact(unpack.q5_0, 5),
    Type.Q5_1: _exact(unpack.q5_1, 5),
    Type.Q8_0: _exact(unpack.q8_0, 8),
    Type.Q4_K: Format(partial(_regrouped, unpack.q4_k_scales, 16, 32), 4),
    Type.Q5_K: _exact(unpack.q5_k, 5),
    Type.Q1_0: _exact(unpack.q1_0, 2, 128),
    Type.TQ1_0: _exact(unpack.tq1_0, 2, 128),
    Type.TQ2_0: _exact(unpack.tq2_0, 2, 128),
    Type.IQ4_NL: _exact(unpack.iq4_nl, 8),
    Type.IQ4_XS: _exact(unpack.iq4_xs, 8),
    Type.IQ3_S: _exact(unpack.iq3_s, 4),
    Type.IQ1_S: _exact(unpack.iq1_s, 2),
    Type.Q6_K: _merged(unpack.q6_k, 1 / 4, 128, 8),
    Type.Q3_K: _merged(unpack.q3_k, 1 / 4, 16, 5),
    Type.Q2_K: Format(partial(_refit_groups, unpack.q2_k, 3, 4), 4, exact=False),
    # Lattices that are nearly even: 4, 12, 20 ... 62, then 8, 25, 43, then 7, 8, 9 on both sides of zero.
    Type.IQ3_XXS: _merged(unpack.iq3_xxs, 8.1, 7.5, 4),
    Type.IQ2_XXS: _merged(unpack.iq2_xxs, 5.68, 7.5, 4),
    Type.IQ2_XS: _merged(unpack.iq2_xs, 5.68, 7.5, 4),
    Type.IQ2_S: _merged(unpack.iq2_s, 5.68, 7.5, 4),
    Type.IQ1_M: _merged(unpack.iq1_m, 1.2, 7.5, 4),
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


def pack(tensor: str, rows: Bytes, kind: GGMLQuantizationType, chosen: Format) -> Packed:
    """Repacks rows of blocks, uint8 [..., bytes of a row]. Raises CheckpointError where a scale is not finite."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, block_bytes)
    count = len(blocks)
    weight = np.empty((count, block * chosen.bits // 8), np.uint8)
    groups = block // chosen.group_size
    floats = chosen.mode == "affine"
    scales = np.empty((count, groups), np.float32 if floats else np.uint8)
    biases = np.empty((count, groups), np.float32) if floats else None

    def work(part: slice) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            weight[part], scales[part], offsets = chosen.pack(blocks[part])
        if biases is not None:
            biases[part] = offsets
            _check_finite(tensor, scales[part], biases[part])

    _in_chunks(work, count, block)
    leading = rows.shape[:-1]
    return Packed(
        weight.reshape(*leading, -1).view(np.uint32),
        scales.reshape(*leading, -1),
        None if biases is None else biases.reshape(*leading, -1),
    )


def dequantize(tensor: str, rows: Bytes, kind: GGMLQuantizationType) -> Floats:
    """Rows of blocks, uint8 [..., bytes of a row], as float32 [..., values of a row]."""
    if kind in FLOATS:
        stored = np.ascontiguousarray(rows).view(FLOATS[kind])
        wide = (stored.astype(np.uint32) << 16).view(np.float32) if kind is Type.BF16 else stored
        values: Floats = wide.astype(np.float32)
        return values
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, block_bytes)
    unpacker = getattr(unpack, kind.name.lower(), None)
    result = np.empty((len(blocks), block), np.float32)

    def work(part: slice) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            if unpacker is None:
                result[part] = gguf.dequantize(np.ascontiguousarray(blocks[part]), kind)
            else:
                result[part] = dequantize_blocks(unpacker(blocks[part]))
        _check_finite(tensor, result[part])

    _in_chunks(work, len(blocks), block)
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


def _in_chunks(work: Callable[[slice], None], blocks: int, block: int) -> None:
    """Calls `work` for slices that cover `blocks` blocks of `block` values, on all processors: numpy frees the lock."""
    step = max(VALUES_AT_ONCE // block, 1)
    if blocks <= step:
        work(slice(0, blocks))
        return
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for _ in pool.map(work, _slices(blocks, step)):
            pass


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
