"""Block types with groups of 16 values, in MLX's groups of 32: two groups in steps of one unit, rounded.

The codes are `q * ratio + start` in fixed point, computed in lanes of 16 bits: a lane is wide enough for each result,
and what passes it in between is cut off by arithmetic modulo 2**64.
"""

import numpy as np

from metalctl.engine.models.gguf import unpack
from metalctl.engine.models.gguf.bits import Bytes, Words, lanes, pack_tens, split_quarters
from metalctl.engine.models.gguf.unpack import Floats

ONES = lanes(1, 4)
EACH = lanes(1, 16)


def q2_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """4 bits: equal steps from the least to the greatest value that the two groups can have."""
    scales, starts = (_pairs(values) for values in unpack.q2_k_scales(blocks))
    stops = starts + np.float32(3) * scales
    least = np.minimum(starts, stops).min(axis=1)
    unit = (np.maximum(starts, stops).max(axis=1) - least) / np.float32(15)
    per_unit = _reciprocal(unit)[:, None]
    step = _fixed(scales * per_unit, 12)
    first = _fixed((starts - least[:, None]) * per_unit + np.float32(0.5), 12)
    codes = first * EACH + step * np.uint64(0x0003_0002_0001_0000) >> np.uint64(12) & lanes(15, 16)
    fields = split_quarters(blocks[:, 16:80]).view(np.uint64)
    return _choose(fields, codes.reshape(16, -1).T).view(np.uint8), unit.T, least.T


def _choose(fields: Words, codes: Words) -> Words:
    """For each nibble of `fields`, which is 0 to 3, that lane of 16 bits of `codes`: below 16."""
    first, second, third, fourth = (codes >> np.uint64(16 * value) & np.uint64(15) for value in range(4))
    low, high = fields & ONES, fields >> np.uint64(1) & ONES
    chosen = low & high
    chosen *= np.ascontiguousarray(first + fourth - second - third)
    chosen += low * np.ascontiguousarray(second - first)
    chosen += high * np.ascontiguousarray(third - first)
    chosen += np.ascontiguousarray(first * ONES)
    return chosen


def q3_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """5 bits around zero: the larger of the two scales is four steps."""
    unit, ratios = _quarters(unpack.q3_k_scales(blocks))
    steps = _fixed(ratios, 10)
    starts = np.uint64(16 << 10 | 1 << 9) - np.uint64(4) * steps
    low, high = _columns(blocks[:, 32:96]), _columns(blocks[:, :32])
    words = np.empty((2, 4, *high.shape), np.uint64)  # half, bits of a byte, place: 8 values in a word
    for half in range(2):
        for field in range(4):
            words[half, field] = high >> np.uint64(4 * half + field) & lanes(1, 8)
            words[half, field] <<= np.uint64(2)
            words[half, field] |= low[4 * half : 4 * half + 4] >> np.uint64(2 * field) & lanes(3, 8)
    words = words.reshape(16, 2, -1)
    even = _scaled(words & lanes(255, 16), steps, starts)
    odd = _scaled(words >> np.uint64(8) & lanes(255, 16), steps, starts)
    packed = pack_tens((even | odd << np.uint64(5)).reshape(32, -1).T)
    return packed, unit.T, np.float32(-16) * unit.T


def _scaled(fields: Words, steps: Words, starts: Words) -> Words:
    """`fields` [G, n, N] times `steps` [G, N] and added to `starts`, in lanes of 16 bits, 10 of them a fraction."""
    codes = fields.view(np.uint16)
    codes *= (steps * EACH).view(np.uint16)[:, None]
    codes += (starts * EACH).view(np.uint16)[:, None]
    codes >>= np.uint16(10)
    return np.minimum(codes, np.uint16(31), out=codes).view(np.uint64)


def q6_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """8 bits around zero: the larger of the two scales is four steps."""
    q, scales, _ = unpack.q6_k(blocks)
    unit, ratios = _quarters(scales)
    codes = q.astype(np.float32)
    codes *= np.repeat(ratios.T, 16, axis=1)
    codes += np.float32(128.5)
    return np.minimum(codes, np.float32(255), out=codes).astype(np.uint8), unit.T, np.float32(-128) * unit.T


def _quarters(scales: Floats) -> tuple[Floats, Floats]:
    """Of scales [N, G] a quarter of the larger of each two, [G / 2, N], and the scales in that unit, [G, N]."""
    pairs = _pairs(scales)
    unit = np.where(np.abs(pairs[:, 0]) >= np.abs(pairs[:, 1]), pairs[:, 0], pairs[:, 1]) / np.float32(4)
    return unit, (pairs * _reciprocal(unit)[:, None]).reshape(-1, len(scales))


def _pairs(values: Floats) -> Floats:
    """[N, G] as [G / 2, 2, N]: the layout in which numpy is fast."""
    return np.ascontiguousarray(values.T).reshape(-1, 2, len(values))


def _reciprocal(unit: Floats) -> Floats:
    """1 / unit, and something finite where the unit is zero."""
    return np.float32(1) / (unit + (unit == 0))


def _columns(packed: Bytes) -> Words:
    """[N, 8 * words] as [words, N]."""
    return np.ascontiguousarray(np.ascontiguousarray(packed).view(np.uint64).T)


def _fixed(values: Floats, fraction: int) -> Words:
    """Rounded to `fraction` bits after the point; negative values modulo 2**64."""
    return np.rint(values * np.float32(1 << fraction)).astype(np.int32).astype(np.int64).view(np.uint64)
