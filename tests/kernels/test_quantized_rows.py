"""Products with 4-bit matrices: the CUDA body on the emulator."""

import mlx.core as mx
import pytest

from metalctl.kernels import dispatch
from metalctl.kernels.quantized_rows import applies, quantized_rows, reference
from tests.kernels.attention_cases import distance
from tests.kernels.emulation import emulated


def inputs(rows=1, width=256, columns=32, dtype=mx.bfloat16, group_size=64, bits=4):
    mx.random.seed(rows)
    quantised = mx.quantize(mx.random.normal((columns, width)).astype(dtype), group_size, bits)
    return (mx.random.normal((rows, width)).astype(dtype), *quantised), {"group_size": group_size, "bits": bits}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rows": 5, "dtype": mx.float16},
        {"rows": 8, "width": 2304, "group_size": 128},
        {"rows": 19, "group_size": 32, "width": 320},  # no whole chunk at the end
        {"rows": 32, "columns": 24},  # nor a whole tile
    ],
    ids=str,
)
def test_the_cuda_body_is_at_most_twice_as_far_from_the_reference_as_plain_mlx(changed):
    arrays, options = inputs(**changed)
    x, weight, scales, biases = arrays
    with emulated("cuda", "quantized_rows"):
        output = quantized_rows(*arrays, **options)
    exact = reference(x.astype(mx.float32), weight, scales, biases, **options)
    plain = x @ mx.dequantize(weight, scales, biases, **options).T
    assert output.dtype == x.dtype
    assert distance(output, exact) <= 2 * distance(plain, exact)


def test_leading_dimensions_stay():
    (x, *rest), options = inputs(rows=6)
    with emulated("cuda", "quantized_rows"):
        output = quantized_rows(x.reshape(2, 3, -1), *rest, **options)
        assert (output.reshape(6, -1) == quantized_rows(x, *rest, **options)).all()


@pytest.mark.parametrize(
    "changed", [{"rows": 33}, {"bits": 8}, {"dtype": mx.float32}], ids=lambda changed: next(iter(changed))
)
def test_what_the_kernel_does_not_compute_goes_to_mlx(changed):
    arrays, options = inputs(**changed)
    assert not applies(*arrays, **options)
    with dispatch.forced("quantized_rows", "cuda"):
        output = quantized_rows(*arrays, **options)
    assert (output == mx.quantized_matmul(*arrays, transpose=True, **options)).all()
