"""The block formats of GGML, unpacked to integers and scales.

Each function takes blocks, uint8 [N, bytes of a block], and returns `(q, scales, offsets)`: q uint8 or int8
[N, values of a block], scales and offsets float32 [N, groups]; the values are `scales * q + offsets`, group by group,
with the same number of consecutive values in each group. Formats: ggml-common.h and ggml-quants.c of ggml. The lattices
of the IQ types are taken from the gguf package.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]
Floats = npt.NDArray[np.floating[Any]]  # float32
Unpacked = tuple[Integers, Floats, Floats]


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _fields(packed: Bytes, width: int, run: int) -> Bytes:
    """Splits bytes into fields of `width` bits, lowest first; `run` bytes give 8 / width runs of that many values."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, run) >> shifts
    parts &= np.uint8((1 << width) - 1)
    return parts.reshape(len(packed), -1)


def nibbles(packed: Bytes, run: int) -> Bytes:
    """The 4-bit fields of `run` bytes after `run` bytes: all low ones, then all high ones."""
    return _fields(packed, 4, run)


def q4_0_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    d = _half(blocks, 0)
    return d, -8 * d


def q4_0(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 2:], 4, 16), *q4_0_scales(blocks)


def q4_1_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    return _half(blocks, 0), _half(blocks, 2)


def q4_1(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 4:], 4, 16), *q4_1_scales(blocks)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def q5_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2), d, -16 * d


def q5_1(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def q8_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), d, -128 * d


def q1_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), 2 * d, -d


def q2_k(blocks: Bytes) -> Unpacked:
    scales = blocks[:, :16]
    return (
        _fields(blocks[:, 16:80], 2, 32),
        _half(blocks, 80) * (scales & 15),
        -_half(blocks, 82) * (scales >> 4),
    )


def q3_k(blocks: Bytes) -> Unpacked:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    q = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return q.view(np.int8) - np.int8(4), _half(blocks, 108) * scales, np.zeros(scales.shape, np.float32)


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and minima in the 12 bytes that Q4_K and Q5_K keep them in."""
    scales, minima, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.hstack([scales & 63, (both & 15) | (scales >> 6) << 4]),
        np.hstack([minima & 63, (both >> 4) | (minima >> 6) << 4]),
    )


def q4_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def q4_k(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 16:], 4, 32), *q4_k_scales(blocks)


def q5_k(blocks: Bytes) -> Unpacked:
    q = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return q, *q4_k_scales(blocks)


def q6_k(blocks: Bytes) -> Unpacked:
    scales = blocks[:, 192:208].view(np.int8)
    q = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return q.view(np.int8) - np.int8(32), _half(blocks, 208) * scales, np.zeros(scales.shape, np.float32)


def _ternary(q: Bytes, d: Floats) -> Unpacked:
    """Values -d, 0, d in two groups of 128."""
    d = np.repeat(d, 2, axis=1)
    return q, d, -d


def tq1_0(blocks: Bytes) -> Unpacked:
    """Five base-3 digits a byte: the first is the highest, read off by multiplying modulo 256."""

    def digits(packed: Bytes, count: int) -> Bytes:
        powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
        shifted = packed[:, None, :] * powers
        return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)

    q = np.hstack([digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)])
    return _ternary(q, _half(blocks, 52))


def tq2_0(blocks: Bytes) -> Unpacked:
    return _ternary(_fields(blocks[:, :64], 2, 32), _half(blocks, 64))


_IQ4 = np.array(quants.IQ4_NL.kvalues, np.int8)


def iq4_nl(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _IQ4[_fields(blocks[:, 2:], 4, 16)], d, np.zeros_like(d)


def iq4_xs(blocks: Bytes) -> Unpacked:
    low = _fields(blocks[:, 4:8], 4, 1)
    high = _fields(blocks[:, 2:4], 2, 1)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    d = _half(blocks, 0) * scales
    return _IQ4[_fields(blocks[:, 8:], 4, 16)], d, np.zeros_like(d)


@cache
def _lattice(kind: Any) -> Integers:
    """The points of an IQ type's lattice, each as one integer of 4 or 8 signed bytes."""
    kind.init_grid()
    points: Integers = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    return points.view(f"u{points.shape[1]}").reshape(-1)


def _points(kind: Any, indices: Integers) -> Integers:
    """int8 [N, values], from the points' numbers [N, points] (or more axes)."""
    return _lattice(kind)[indices].reshape(len(indices), -1).view(np.int8)


@cache
def _negations() -> npt.NDArray[np.uint64]:
    """For each byte of signs, eight bytes that are 0 or 255."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(255)).view(np.uint64).reshape(-1)


def _signed(q: Integers, signs: Bytes) -> Integers:
    """`q` [N, values], negated where the bit in `signs` [N, values / 8] is set."""
    negative = _negations()[signs].reshape(len(q), -1)
    return (q.view(np.uint64) ^ negative).view(np.int8) - negative.view(np.int8)


_SIGNS = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)  # 7 bits, and the eighth that makes their number even


def _words(blocks: Bytes, start: int, stop: int, dtype: Any) -> npt.NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _seven_bit_signs(words: npt.NDArray[np.uint32]) -> Bytes:
    """Four sign bytes of each uint32, uint8 [N, 4 * words]."""
    indices = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    signs: Bytes = _SIGNS[indices].reshape(len(words), -1)
    return signs


def iq2_xxs(blocks: Bytes) -> Unpacked:
    words = _words(blocks, 2, 66, np.uint32).reshape(-1, 8, 2)
    points = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    q = _points(quants.IQ2_XXS, points)
    scales = _half(blocks, 0) * (0.5 + (words[:, :, 1] >> 28).astype(np.float32)) * 0.25
    return _signed(q, _seven_bit_signs(words[:, :, 1])), scales, np.zeros_like(scales)


def iq3_xxs(blocks: Bytes) -> Unpacked:
    words = _words(blocks, 66, 98, np.uint32)
    q = _points(quants.IQ3_XXS, blocks[:, 2:66])
    scales = _half(blocks, 0) * (0.5 + (words >> 28).astype(np.float32)) * 0.5
    return _signed(q, _seven_bit_signs(words)), scales, np.zeros_like(scales)


def iq2_xs(blocks: Bytes) -> Unpacked:
    words = _words(blocks, 2, 66, np.uint16)
    q = _points(quants.IQ2_XS, words & 511)
    scales = _half(blocks, 0) * (0.5 + _fields(blocks[:, 66:74], 4, 1)) * 0.25
    return _signed(q, _SIGNS[words >> 9]), scales.astype(np.float32), np.zeros(scales.shape, np.float32)


def iq2_s(blocks: Bytes) -> Unpacked:
    points = blocks[:, 2:34].astype(np.uint16) | _fields(blocks[:, 66:74], 2, 1).astype(np.uint16) << 8
    q = _points(quants.IQ2_S, points)
    scales = _half(blocks, 0) * (0.5 + _fields(blocks[:, 74:82], 4, 1)) * 0.25
    return _signed(q, blocks[:, 34:66]), scales.astype(np.float32), np.zeros(scales.shape, np.float32)


def iq3_s(blocks: Bytes) -> Unpacked:
    """The lattice has odd values up to 15 only: q counts them from -15 in steps of 2, which fits 4 bits."""
    points = blocks[:, 2:66].astype(np.uint16) | _fields(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    q = _signed(_points(quants.IQ3_S, points), blocks[:, 74:106])
    scales = _half(blocks, 0) * (1 + 2 * _fields(blocks[:, 106:110], 4, 1).astype(np.float32))
    return (q + np.int8(15)).view(np.uint8) >> 1, 2 * scales, -15 * scales


def iq1_s(blocks: Bytes) -> Unpacked:
    high = _words(blocks, 34, 50, np.uint16)
    points = blocks[:, 2:34].reshape(-1, 8, 4) | (high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7) << 8
    q = _points(quants.IQ1_S, points) + np.int8(1)
    scales = _half(blocks, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    shift = np.where(high & 0x8000, np.float32(-1.125), np.float32(-0.875))
    return q.view(np.uint8), scales, scales * shift


def iq1_m(blocks: Bytes) -> Unpacked:
    """Eighths: q is 8 g + 1 or 8 g - 1 for the lattice's values g."""
    words = _words(blocks, 48, 56, np.uint16)
    d = words[:, 0] >> 12 | words[:, 1] >> 8 & 0x00F0 | words[:, 2] >> 4 & 0x0F00 | words[:, 3] & 0xF000
    fields = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    scales = d.view(np.float16).astype(np.float32)[:, None] * (2 * fields + 1).astype(np.float32) / 8
    high = _fields(blocks[:, 32:48], 4, 1)
    points = blocks[:, :32].astype(np.uint16) | (high & 7).astype(np.uint16) << 8
    sign = np.where(high & 8, np.int8(-1), np.int8(1))[:, :, None]
    q = _points(quants.IQ1_S, points).reshape(len(blocks), -1, 8) * np.int8(8) + sign
    return q.reshape(len(blocks), -1), scales, np.zeros_like(scales)
