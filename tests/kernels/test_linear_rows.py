"""Products of few rows with 16-bit matrices: the CUDA body on the emulator."""

import mlx.core as mx
import pytest

from metalctl.kernels import dispatch
from metalctl.kernels.linear_rows import applies, linear_rows, reference
from tests.kernels.attention_cases import distance
from tests.kernels.emulation import emulated


def inputs(rows=1, width=256, columns=(32,), dtype=mx.bfloat16):
    mx.random.seed(rows)
    x = mx.random.normal((rows, width)).astype(dtype)
    return x, [mx.random.normal((n, width)).astype(dtype) for n in columns]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rows": 5, "dtype": mx.float16},
        {"rows": 9, "width": 2304},
        {"rows": 19, "width": 328, "columns": (48, 16)},  # no whole chunk at the end
        {"rows": 32, "columns": (24, 8, 40)},  # nor whole tiles
        {"rows": 8, "width": 40, "columns": (200,)},  # fewer elements than a block has lanes for
    ],
    ids=str,
)
def test_the_cuda_body_is_at_most_twice_as_far_from_exact_as_plain_mlx(changed):
    x, weights = inputs(**changed)
    with emulated("cuda", "linear_rows"):
        outputs = linear_rows(x, weights)
    exact = reference(x.astype(mx.float32), [weight.astype(mx.float32) for weight in weights])
    for output, plain, wanted in zip(outputs, reference(x, weights), exact, strict=True):
        assert output.dtype == x.dtype
        assert output.shape == wanted.shape
        assert distance(output, wanted) <= 2 * distance(plain, wanted)


def test_leading_dimensions_stay():
    x, weights = inputs(rows=6)
    with emulated("cuda", "linear_rows"):
        (output,) = linear_rows(x.reshape(2, 3, -1), weights)
        (flat,) = linear_rows(x, weights)
    assert (output.reshape(6, -1) == flat).all()


def test_what_is_not_a_number_stays_in_its_row():
    x, weights = inputs(rows=3, width=40)
    x[1, 39] = mx.inf
    with emulated("cuda", "linear_rows"):
        (output,) = linear_rows(x, weights)
    assert mx.isfinite(output).all(axis=-1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "changed", [{"rows": 33}, {"width": 36}, {"dtype": mx.float32}], ids=lambda changed: next(iter(changed))
)
def test_what_the_kernel_does_not_compute_goes_to_mlx(changed):
    x, weights = inputs(**changed)
    assert not applies(x, weights)
    with dispatch.forced("linear_rows", "cuda"):
        (output,) = linear_rows(x, weights)
    assert (output == x @ weights[0].T).all()
