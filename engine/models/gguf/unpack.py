"""The block formats of GGML, unpacked to integers and scales.

Each function takes blocks, uint8 [N, bytes of a block], and returns `(q, scales, offsets)`: q uint8 or int8
[N, values of a block], scales and offsets float32 [N, groups]; the values are `scales * q + offsets`, group by group,
with the same number of consecutive values in each group. Formats: ggml-common.h and ggml-quants.c of ggml. The lattices
of the IQ types are taken from the gguf package.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

from metalctl.engine.models.gguf.bits import Bytes, interleave, lanes

Integers = npt.NDArray[Any]
Floats = npt.NDArray[np.floating[Any]]  # float32
Unpacked = tuple[Integers, Floats, Floats]


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _fields(packed: Bytes, width: int, run: int) -> Bytes:
    """Splits bytes into fields of `width` bits, lowest first; `run` bytes give 8 / width runs of that many values."""
    kind = np.dtype(f"u{math.gcd(run, 8)}")
    words = np.ascontiguousarray(packed).view(kind)
    mask = lanes((1 << width) - 1, 8).astype(kind)
    return interleave([words >> kind.type(shift) & mask for shift in range(0, 8, width)], run // kind.itemsize)


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


def q1_0_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    d = _half(blocks, 0)
    return 2 * d, -d


def q1_0(blocks: Bytes) -> Unpacked:
    return np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), *q1_0_scales(blocks)


def q2_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    scales = blocks[:, :16]
    return _half(blocks, 80) * (scales & 15), -_half(blocks, 82) * (scales >> 4)


def q2_k(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, 16:80], 2, 32), *q2_k_scales(blocks)


def q3_k_scales(blocks: Bytes) -> Floats:
    scales = _fields(blocks[:, 96:104], 4, 8)
    scales |= _fields(blocks[:, 104:108], 2, 4) << 4
    return _half(blocks, 108) * (scales.view(np.int8) - np.int8(32))


def q3_k(blocks: Bytes) -> Unpacked:
    scales = q3_k_scales(blocks)
    q = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return q.view(np.int8) - np.int8(4), scales, np.zeros_like(scales)


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


def _ternary_scales(d: Floats) -> tuple[Floats, Floats]:
    """Values -d, 0, d in two groups of 128."""
    d = np.repeat(d, 2, axis=1)
    return d, -d


def tq1_0_digits(blocks: Bytes) -> list[Bytes]:
    """Runs of values, [N, length]. Five base-3 digits a byte: the first is the highest, read off by multiplying."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)
    parts = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    shifted = [np.ascontiguousarray(part) * power for part, count in parts for power in powers[:count]]
    return [(part > 85).view(np.uint8) + (part > 170) for part in shifted]


def tq1_0_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    return _ternary_scales(_half(blocks, 52))


def tq1_0(blocks: Bytes) -> Unpacked:
    return np.hstack(tq1_0_digits(blocks)), *tq1_0_scales(blocks)


def tq2_0(blocks: Bytes) -> Unpacked:
    return _fields(blocks[:, :64], 2, 32), *_ternary_scales(_half(blocks, 64))


_IQ4 = np.array(quants.IQ4_NL.kvalues, np.int8)
_IQ4_PAIRS = _IQ4[[[byte & 15, byte >> 4] for byte in range(256)]]  # low half, high half


@cache
def _iq4_values() -> tuple[Integers, Integers]:
    """For two bytes, the values of their low halves and of their high halves, two bytes each."""
    first, second = np.divmod(np.arange(1 << 16), 256)[::-1]
    halves = np.stack([_IQ4_PAIRS[first], _IQ4_PAIRS[second]], axis=1)
    low, high = (np.ascontiguousarray(halves[:, :, half]).view(np.uint16).reshape(-1) for half in range(2))
    return low, high


def _iq4(packed: Bytes) -> Integers:
    pairs = np.ascontiguousarray(packed).view(np.uint16)
    return interleave([values.take(pairs).view(np.uint64) for values in _iq4_values()], 2).view(np.int8)


def iq4_nl(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _iq4(blocks[:, 2:]), d, np.zeros_like(d)


def iq4_xs(blocks: Bytes) -> Unpacked:
    low = _fields(blocks[:, 4:8], 4, 1)
    high = _fields(blocks[:, 2:4], 2, 1)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    d = _half(blocks, 0) * scales
    return _iq4(blocks[:, 8:]), d, np.zeros_like(d)


@cache
def lattice(kind: Any) -> Integers:
    """The points of an IQ type's lattice, int8 [points, 4 or 8]."""
    kind.init_grid()
    points: Integers = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    return points


@cache
def iq1_m_lattice() -> Integers:
    """Eighths: 8 g + 1 for the values g of the lattice, and then 8 g - 1."""
    eighths = lattice(quants.IQ1_S) * np.int8(8)
    return np.concatenate([eighths + np.int8(1), eighths - np.int8(1)])


def _points(points: Integers, numbers: Integers) -> Integers:
    """int8 [N, values], from the points' numbers [N, points]."""
    whole = points.view(f"u{points.shape[1]}").reshape(-1)
    return whole.take(numbers).view(np.int8).reshape(len(numbers), -1)


@cache
def _negations() -> npt.NDArray[np.uint64]:
    """For each byte of signs, eight bytes that are 0 or 255."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(255)).view(np.uint64).reshape(-1)


def _signed(q: Integers, signs: Bytes) -> Integers:
    """`q` [N, values], negated where the bit in `signs` [N, values / 8] is set."""
    negative = _negations().take(signs).reshape(len(q), -1)
    return (q.view(np.uint64) ^ negative).view(np.int8) - negative.view(np.int8)


_SIGNS = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)  # 7 bits, and the eighth that makes their number even


def _words(blocks: Bytes, start: int, stop: int, dtype: Any) -> npt.NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _high_bits(low: Bytes, high: Bytes) -> npt.NDArray[np.uint16]:
    """Numbers of two bytes."""
    return interleave([low, high], 1).view(np.uint16)


def _four_signs(words: npt.NDArray[np.uint32]) -> Bytes:
    """Four sign bytes of the 28 low bits of each uint32, uint8 [N, 4 * words]."""
    return interleave([_SIGNS.take(words >> np.uint32(shift) & np.uint32(127)) for shift in (0, 7, 14, 21)], 1)


def iq2_xxs_parts(blocks: Bytes) -> tuple[Integers, Bytes, Floats]:
    """Numbers of points, signs, scales."""
    words = _words(blocks, 2, 66, np.uint32)
    points, rest = np.ascontiguousarray(words[:, ::2]).view(np.uint8), words[:, 1::2]
    return points, _four_signs(rest), _half(blocks, 0) * (np.float32(0.5) + (rest >> 28).astype(np.float32)) / 4


def iq2_xxs(blocks: Bytes) -> Unpacked:
    points, signs, scales = iq2_xxs_parts(blocks)
    return _signed(_points(lattice(quants.IQ2_XXS), points), signs), scales, np.zeros_like(scales)


def iq3_xxs_parts(blocks: Bytes) -> tuple[Integers, Bytes, Floats]:
    """Numbers of points, signs, scales."""
    words = _words(blocks, 66, 98, np.uint32)
    scales = _half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) / 2
    return blocks[:, 2:66], _four_signs(words), scales


def iq3_xxs(blocks: Bytes) -> Unpacked:
    points, signs, scales = iq3_xxs_parts(blocks)
    return _signed(_points(lattice(quants.IQ3_XXS), points), signs), scales, np.zeros_like(scales)


def iq3_s_parts(blocks: Bytes) -> tuple[Integers, Bytes, Floats]:
    """Numbers of points, signs, scales."""
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    scales = _half(blocks, 0) * (1 + 2 * _fields(blocks[:, 106:110], 4, 1))
    return _high_bits(blocks[:, 2:66], high), blocks[:, 74:106], scales


def iq3_s(blocks: Bytes) -> Unpacked:
    """The lattice has odd values up to 15 only: q counts them from -15 in steps of 2, which fits 4 bits."""
    points, signs, scales = iq3_s_parts(blocks)
    q = _signed(_points(lattice(quants.IQ3_S), points), signs)
    return (q + np.int8(15)).view(np.uint8) >> 1, 2 * scales, -15 * scales


def iq2_xs_parts(blocks: Bytes) -> tuple[Integers, Bytes, Bytes, Floats]:
    """Numbers of points, signs, pairs of scales in units: two of 4 bits in a byte, the unit of 2 s + 1."""
    words = _words(blocks, 2, 66, np.uint16)
    return words & np.uint16(511), _SIGNS.take(words >> np.uint16(9)), blocks[:, 66:74], _half(blocks, 0) / 8


def iq2_s_parts(blocks: Bytes) -> tuple[Integers, Bytes, Bytes, Floats]:
    """Numbers of points, signs, pairs of scales in units: two of 4 bits in a byte, the unit of 2 s + 1."""
    points = _high_bits(blocks[:, 2:34], _fields(blocks[:, 66:74], 2, 1))
    return points, blocks[:, 34:66], blocks[:, 74:82], _half(blocks, 0) / 8


def _iq2_pairs(kind: Any, points: Integers, signs: Bytes, pairs: Bytes, unit: Floats) -> Unpacked:
    scales = unit * (1 + 2 * _fields(pairs, 4, 1))
    return _signed(_points(lattice(kind), points), signs), scales, np.zeros_like(scales)


def iq2_xs(blocks: Bytes) -> Unpacked:
    return _iq2_pairs(quants.IQ2_XS, *iq2_xs_parts(blocks))


def iq2_s(blocks: Bytes) -> Unpacked:
    return _iq2_pairs(quants.IQ2_S, *iq2_s_parts(blocks))


def iq1_s_parts(blocks: Bytes) -> tuple[Integers, Floats, Floats]:
    """Numbers of points, scales, offsets of values that are one more than the lattice's."""
    high = _words(blocks, 34, 50, np.uint16)
    thirds = [(high >> np.uint16(shift)).astype(np.uint8) & np.uint8(7) for shift in (0, 3, 6, 9)]
    scales = _half(blocks, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    shift = np.where(high & 0x8000, np.float32(-1.125), np.float32(-0.875))
    return _high_bits(blocks[:, 2:34], interleave(thirds, 1)), scales, scales * shift


def iq1_s(blocks: Bytes) -> Unpacked:
    points, scales, offsets = iq1_s_parts(blocks)
    return (_points(lattice(quants.IQ1_S), points) + np.int8(1)).view(np.uint8), scales, offsets


def iq1_m_parts(blocks: Bytes) -> tuple[Integers, Bytes, Floats]:
    """Numbers of points, pairs of scales in units: two of 3 bits in a byte, the unit of 2 s + 1."""
    words = _words(blocks, 48, 56, np.uint16)
    d = words[:, 0] >> 12 | words[:, 1] >> 8 & 0x00F0 | words[:, 2] >> 4 & 0x0F00 | words[:, 3] & 0xF000
    pairs = interleave([(words >> np.uint16(shift)).astype(np.uint8) & np.uint8(63) for shift in (0, 6)], 1)
    points = _high_bits(blocks[:, :32], _fields(blocks[:, 32:48], 4, 1))
    return points, pairs, d.view(np.float16).astype(np.float32)[:, None] / 8


def iq1_m(blocks: Bytes) -> Unpacked:
    points, pairs, unit = iq1_m_parts(blocks)
    scales = unit * (1 + 2 * interleave([pairs & np.uint8(7), pairs >> np.uint8(3)], 1))
    return _points(iq1_m_lattice(), points), scales, np.zeros_like(scales)
