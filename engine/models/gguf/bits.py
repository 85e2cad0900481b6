"""Moving bits in numpy, many at a time: how MLX's quantised matrices are laid out.

The bit-packed values of a row are one little-endian stream. Words of 16, 32 and 64 bits hold several values in lanes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_TWO_BITS = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)  # times 4 bytes below 4: all in the highest byte, in order


def lanes(value: int, width: int) -> np.uint64:
    """`value` in each lane of `width` bits."""
    return np.uint64(sum(value << start for start in range(0, 64, width)))


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Codes below 2**bits, [N, K] with K a multiple of 32 and bits 2, 4, 5 or 8: [N, K * bits / 8]."""
    if bits == 8:
        return codes
    codes = np.ascontiguousarray(codes)
    if bits == 2:
        return (codes.view(np.uint32) * _TWO_BITS >> np.uint32(24)).astype(np.uint8)
    if bits == 4:
        pairs = codes.view(np.uint16)
        return (pairs | pairs >> np.uint16(4)).astype(np.uint8)
    words = codes.view(np.uint64)
    words = words & lanes(0x1F, 16) | words >> np.uint64(3) & lanes(0x3E0, 16)
    return pack_tens(words).reshape(len(codes), -1)


def pack_tens(words: Words) -> Bytes:
    """Words that hold 10 bits in each lane of 16, [..., 4 n], without the gaps: uint8 [..., 20 n]."""
    words = words & lanes(0x3FF, 32) | words >> np.uint64(6) & lanes(0xFFC00, 32)
    words = words & np.uint64(0xFFFFF) | words >> np.uint64(12) & np.uint64(0xFFFFF00000)
    first, second, third, fourth = (words[..., index::4] for index in range(4))
    packed = np.empty((*first.shape, 5), np.uint32)
    packed[..., 0] = first
    packed[..., 1] = first >> np.uint64(32) | second << np.uint64(8)
    packed[..., 2] = second >> np.uint64(24) | third << np.uint64(16)
    packed[..., 3] = third >> np.uint64(16) | fourth << np.uint64(24)
    packed[..., 4] = fourth >> np.uint64(8)
    return packed.view(np.uint8).reshape(*words.shape[:-1], -1)


def spread_bits(packed: Bytes) -> Bytes:
    """Bits [N, K / 8], K a multiple of 32, as the codes 0 and 1 of two bits: [N, K / 4]."""
    words = np.ascontiguousarray(packed).view(np.uint32).astype(np.uint64)
    for shift, width in ((16, 32), (8, 16), (4, 8), (2, 4), (1, 2)):
        words |= words << np.uint64(shift)
        words &= lanes((1 << shift) - 1, width)
    return words.view(np.uint8)


def interleave(parts: Sequence[npt.NDArray[Any]], run: int) -> Bytes:
    """`run` items of each part [N, K], and again: uint8 [N, bytes of all parts]."""
    shape = (len(parts[0]), -1, run)
    first = parts[0].reshape(shape)
    result = np.empty((*first.shape[:2], len(parts), run), first.dtype)
    for index, part in enumerate(parts):
        for item in range(run):  # numpy is slow with short inner loops, so this is the outer one
            result[:, :, index, item] = part.reshape(shape)[:, :, item]
    return result.view(np.uint8).reshape(len(first), -1)


def split_halves(packed: Bytes, run: int) -> Bytes:
    """Bytes [N, K / 2] whose low halves are `run` values and whose high halves are the next, as nibbles in order."""
    pairs = np.ascontiguousarray(packed).view(np.uint16)
    mask = np.uint16(15)
    halves = [pairs >> np.uint16(4 * half) & mask | pairs >> np.uint16(4 + 4 * half) & mask << 4 for half in range(2)]
    return interleave([half.astype(np.uint8).view(np.uint64) for half in halves], run // 16)


def split_quarters(packed: Bytes) -> Bytes:
    """Bytes [N, K / 4] whose fields of two bits are runs of 32 values, one after the other, as nibbles in order."""
    pairs = np.ascontiguousarray(packed).view(np.uint16)
    mask = np.uint16(3)
    fields = [pairs >> np.uint16(2 * field) for field in range(4)]
    return interleave([(field & mask | field >> 4 & mask << 4).astype(np.uint8).view(np.uint64) for field in fields], 2)
