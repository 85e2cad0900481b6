"""The IQ types in MLX's codes: the points of a lattice are looked up as the codes that they become.

A code of 4 bits stands for a half-integer times a step, so that of a negated value is the inverted code. Where groups
of 16 have scales of their own, two of them get one unit, `step` times the larger scale, and a point's codes depend on
the ratio of its scale to that one too. Few of all ratios differ in any code.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

from metalctl.engine.models.gguf import unpack
from metalctl.engine.models.gguf.bits import Bytes, pack_bits
from metalctl.engine.models.gguf.unpack import Floats, Integers

Packed = tuple[Bytes, Floats, Floats]

# Steps for lattices that are nearly even: 8, 25, 43, then 4, 12, 20 ... 62, then 7, 8, 9 on both sides of zero.
IQ2_STEP, IQ3_XXS_STEP, IQ1_M_STEP = 5.68, 8.1, 1.2


def iq2_xxs(blocks: Bytes) -> Packed:
    points, signs, scales = unpack.iq2_xxs_parts(blocks)
    return _signed(_codes(quants.IQ2_XXS, IQ2_STEP).take(points), signs), *_around_zero(scales, IQ2_STEP)


def iq3_xxs(blocks: Bytes) -> Packed:
    points, signs, scales = unpack.iq3_xxs_parts(blocks)
    return _signed(_codes(quants.IQ3_XXS, IQ3_XXS_STEP).take(points), signs), *_around_zero(scales, IQ3_XXS_STEP)


def iq3_s(blocks: Bytes) -> Packed:
    """Nothing is rounded: the lattice has odd values up to 15 only."""
    points, signs, scales = unpack.iq3_s_parts(blocks)
    return _signed(_codes(quants.IQ3_S, 2).take(points), signs), *_around_zero(scales, 2)


def iq2_xs(blocks: Bytes) -> Packed:
    points, signs, pairs, unit = unpack.iq2_xs_parts(blocks)
    codes, places, larger = _pair_tables(quants.IQ2_XS)
    return _signed(_in_pairs(codes, places, points, pairs), signs), *_around_zero(unit * larger.take(pairs), IQ2_STEP)


def iq2_s(blocks: Bytes) -> Packed:
    points, signs, pairs, unit = unpack.iq2_s_parts(blocks)
    codes, places, larger = _pair_tables(quants.IQ2_S)
    return _signed(_in_pairs(codes, places, points, pairs), signs), *_around_zero(unit * larger.take(pairs), IQ2_STEP)


def iq1_m(blocks: Bytes) -> Packed:
    points, pairs, unit = unpack.iq1_m_parts(blocks)
    codes, places, larger = _iq1_m_tables()
    packed = _in_pairs(codes, places, points, pairs).view(np.uint8)
    return packed, *_around_zero(unit * larger.take(pairs), IQ1_M_STEP)


def iq1_s(blocks: Bytes) -> Packed:
    """Nothing is rounded: the lattice has -1, 0 and 1, in 2 bits."""
    points, scales, offsets = unpack.iq1_s_parts(blocks)
    return _iq1_s_codes().take(points).view(np.uint8), scales, offsets


def _around_zero(scales: Floats, step: float) -> tuple[Floats, Floats]:
    """Units and offsets of codes around 7.5."""
    unit = scales * np.float32(step)
    return unit, np.float32(-7.5) * unit


def _in_pairs(codes: Integers, places: Integers, points: Integers, pairs: Bytes) -> Integers:
    """The codes of points [N, 4 n], two points to a group, with the pairs of their scales [N, n]."""
    return codes.take(points | places.take(pairs).view(np.uint16))


def _signed(codes: Integers, signs: Bytes) -> Bytes:
    """Codes of 4 bits [N, values], inverted where the bit in `signs` [N, values / 8] is set: [N, values / 2]."""
    return (codes.view(np.uint32) ^ _inversions().take(signs)).view(np.uint8)


@cache
def _inversions() -> npt.NDArray[np.uint32]:
    """For each byte of signs, eight nibbles that are 0 or 15."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return pack_bits(bits * np.uint8(15), 4).view(np.uint32).reshape(-1)


def _rounded(values: npt.NDArray[np.floating[Any]]) -> Bytes:
    """Codes of 4 bits, 7.5 for 0."""
    return np.clip(np.floor(values + 8), 0, 15).astype(np.uint8)


@cache
def _codes(kind: Any, step: float) -> Integers:
    """For each point of the lattice its codes of 4 bits, as one integer."""
    points = unpack.lattice(kind)
    return pack_bits(_rounded(points / step), 4).view(f"u{points.shape[1] // 2}").reshape(-1)


@cache
def _iq1_s_codes() -> Integers:
    return pack_bits((unpack.lattice(quants.IQ1_S) + np.int8(1)).view(np.uint8), 2).view(np.uint16).reshape(-1)


@cache
def _pair_tables(kind: Any) -> tuple[Integers, Integers, Integers]:
    return _tables(unpack.lattice(kind), IQ2_STEP, 4)


@cache
def _iq1_m_tables() -> tuple[Integers, Integers, Integers]:
    return _tables(unpack.iq1_m_lattice(), IQ1_M_STEP, 3)


def _tables(points: Integers, step: float, bits: int) -> tuple[Integers, Integers, Integers]:
    """For scales 2 s + 1, s of `bits` bits, which differ between groups of two points [P, 8].

    Returns the codes of each point at each ratio that matters, uint32 [ratios * P]; for a pair of scales where the
    codes of the four points begin in that, four uint16 in a uint64; and the larger of the two scales.
    """
    scales = 2 * np.arange(1 << bits) + 1
    larger = np.maximum(scales[:, None], scales)
    ratios = (scales / larger).reshape(-1)  # [second group, first group]
    possible = _rounded(ratios[:, None] * np.unique(points) / step)
    _, chosen, which = np.unique(possible, axis=0, return_index=True, return_inverse=True)
    codes = pack_bits(_rounded(ratios[chosen, None, None] * points / step).reshape(-1, 8), 4)
    begin = (which * len(points)).astype(np.uint16).reshape(larger.shape)
    places = np.stack([begin, begin, begin.T, begin.T], axis=-1)
    return codes.view(np.uint32).reshape(-1), places.view(np.uint64).reshape(-1), larger.reshape(-1).astype(np.uint8)
