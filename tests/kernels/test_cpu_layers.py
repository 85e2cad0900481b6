"""Norms, rotary positions, attention and whole layers of the CPU kernels against plain MLX."""

import itertools
import random
from collections.abc import Iterator

import mlx.core as mx
import pytest

from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Turns
from metalctl.kernels.cpu.paged import paged_attention
from metalctl.kernels.paged_attention import reference
from tests.kernels.cpu_library import ISAS, each_isa


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from each_isa(request.param)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("width", [576, 80, 7])
def test_rms_norm(isa: str, width: int) -> None:
    weight = normal(width, seed=1)
    mx.eval(weight)
    for x in (normal(3, 40, width) * 5, normal(3, width, 40).transpose(0, 2, 1)):
        expected = mx.fast.rms_norm(x, weight, 1e-5)
        assert mx.abs(library.rms_norm(weight, 1e-5)(x) - expected).max() < 1e-5


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("rotated", [64, 24])
def test_rope_turns_as_mlx_does(isa: str, traditional: bool, rotated: int) -> None:
    half = rotated // 2
    inverse = mx.exp(mx.arange(0, -half, -1).astype(mx.float32) * (mx.log(mx.array(10000.0)) / half)).tolist()
    rope = library.rope(Turns(inverse, traditional, 0.5))  # type: ignore[arg-type]
    x = normal(2, 37, 3, 64).transpose(0, 2, 1, 3)
    for offset in (mx.array(0, mx.int32), mx.array(1900, mx.int32), mx.array([3, 700], mx.int32)):
        expected = mx.fast.rope(x, rotated, traditional=traditional, base=10000.0, scale=0.5, offset=offset)
        assert mx.abs(rope(x, offset) - expected).max() < 3e-4  # an angle of 1000 is known to 6e-5


SHAPES = [  # batch, query heads, key heads, width, value width, queries, block size
    (1, 9, 3, 64, 64, 1, 16),
    (3, 8, 1, 80, 48, 1, 8),
    (2, 4, 4, 40, 40, 37, 16),
    (1, 9, 3, 64, 64, 130, 16),
    (2, 71, 1, 64, 64, 3, 32),
    (2, 6, 2, 5, 7, 2, 8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_attention_over_blocks_is_the_reference(isa: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    batch, heads, kv_heads, width, value_width, length, size = shape
    rng = random.Random(length)
    for window, softcap, sinks in itertools.product([None, 20], [None, 5.0], [False, True]):
        lengths = [rng.randint(length, length + 600) for _ in range(batch)]
        lengths[-1] = max(1, length - 1) if batch > 1 else lengths[-1]  # a row that is padded on the left
        blocks = -(-max(lengths) // size)
        table = rng.sample(range(batch * blocks + 3), batch * blocks)
        starts = None
        if window is not None:
            starts = mx.array([max(0, n - length - window) // size * size for n in lengths], mx.int32)
        arguments = (
            normal(batch, length, heads, width).transpose(0, 2, 1, 3),
            normal(len(table) + 3, size, kv_heads, width, seed=1).astype(dtype),
            normal(len(table) + 3, size, kv_heads, value_width, seed=2).astype(dtype),
            mx.array(table, mx.int32).reshape(batch, blocks),
            mx.array(lengths, mx.int32),
            0.3,
            window,
            softcap,
            normal(heads, seed=3) if sinks else None,
            starts,
        )
        assert mx.abs(paged_attention(*arguments) - reference(*arguments)).max() < 2e-5


def test_a_decoding_row_gets_the_same_bits_alone_and_in_a_batch(isa: str) -> None:
    queries, keys, values = normal(3, 6, 1, 64), normal(60, 16, 2, 64, seed=1), normal(60, 16, 2, 64, seed=2)
    tables, lengths = mx.arange(60, dtype=mx.int32).reshape(3, 20), mx.array([320, 5, 290], mx.int32)
    rest = (0.125, None, None, None, None)
    together = paged_attention(queries, keys, values, tables, lengths, *rest)
    for b in range(3):
        row = slice(b, b + 1)
        alone = paged_attention(queries[row], keys, values, tables[row], lengths[row], *rest)
        assert mx.array_equal(alone, together[row])
