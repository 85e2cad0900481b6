"""A new token's norms, rotations and places in the pools: the CUDA body on the emulator."""

import mlx.core as mx
import pytest

from metalctl.kernels.append_rows import append_rows, reference
from tests.kernels.attention_cases import distance
from tests.kernels.emulation import emulated


def inputs(rows=3, heads=4, kv_heads=2, head_dim=32, rotated=32, dtype=mx.bfloat16, norms=True):
    mx.random.seed(0)
    x = [mx.random.normal((rows, n * head_dim)).astype(dtype) for n in (heads, kv_heads, kv_heads)]
    pools = [mx.random.normal((40, kv_heads, head_dim)).astype(dtype) for _ in range(2)]
    slots, positions = mx.array([7, 39, 0, 1, 0][:rows], mx.int32), mx.array([0, 3, 1000, 17, 5][:rows], mx.int32)
    frequencies = 1 / 1000 ** (mx.arange(rotated // 2) / (rotated // 2))
    weights = (mx.random.normal((head_dim,)), mx.random.normal((head_dim,)), mx.array([1e-3])) if norms else None
    arrays = [*x, *pools, slots, positions, frequencies]
    mx.eval(arrays)
    return arrays, weights


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rows": 5, "norms": False, "dtype": mx.float16},
        {"head_dim": 80, "rotated": 24},  # part of a head is rotated
        {"heads": 6, "kv_heads": 1, "head_dim": 256, "rotated": 256},
    ],
    ids=str,
)
def test_the_cuda_body_gives_the_reference_and_writes_nothing_else(changed, traditional):
    arrays, norms = inputs(**changed)
    expected = reference(*arrays, traditional=traditional, norms=norms)
    exact = reference(*(a.astype(mx.float32) for a in arrays[:5]), *arrays[5:], traditional=traditional, norms=norms)
    mx.eval(expected, exact)
    with emulated("cuda", "append_rows"):
        queries = append_rows(*arrays, traditional=traditional, norms=norms)
    for ours, plain, wanted in zip((queries, *arrays[3:5]), expected, exact, strict=True):
        assert ours.shape == plain.shape
        assert distance(ours, wanted) <= 2 * distance(plain, wanted)
    others = [i for i in range(40) if i not in arrays[5].tolist()]
    for ours, plain in zip(arrays[3:5], expected[1:], strict=True):
        assert (ours[mx.array(others)] == plain[mx.array(others)]).all()


def test_rows_may_lie_apart():
    (queries, keys, values, *rest), norms = inputs()
    joined = mx.concatenate([queries, keys, values], axis=1)
    parts = mx.split(joined, [128, 192], axis=1)
    expected = reference(*parts, *rest, traditional=False, norms=norms)
    mx.eval(expected)
    with emulated("cuda", "append_rows"):
        output = append_rows(*parts, *rest, traditional=False, norms=norms)
    assert distance(output, expected[0].astype(mx.float32)) < 0.05
