"""Matrix products of the CPU kernels against MLX's own arithmetic in float32."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Gate, Weight
from tests.kernels.cpu_library import ISAS, each_isa

N, K = 200, 576  # N fills no whole tile of rows
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from each_isa(request.param)


def quantized(bits: int, group: int, dtype: mx.Dtype, shape: tuple[int, ...] = (N, K)) -> tuple[Weight, mx.array]:
    weight = (mx.random.normal(shape, key=mx.random.key(bits)) * 0.1).astype(dtype)
    parts = mx.quantize(weight, group_size=group, bits=bits)
    codes, scales, offsets = parts
    exact = mx.dequantize(codes, scales.astype(mx.float32), offsets.astype(mx.float32), group_size=group, bits=bits)
    return library.pack_quantized(*parts, bits, group), exact


def floating(dtype: mx.Dtype, shape: tuple[int, ...] = (N, K)) -> tuple[Weight, mx.array]:
    weight = (mx.random.normal(shape, key=mx.random.key(3)) * 0.1).astype(dtype)
    return library.pack_floating(weight), weight.astype(mx.float32)


def activations(*shape: int, seed: int = 7) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


LARGEST = 127 * 256  # code of an activation


def sixteen_bits(x: mx.array, group: int) -> mx.array:
    """x as the kernels see it: whole multiples of the largest value of each group divided by the largest code."""
    grouped = x.reshape(*x.shape[:-1], -1, group)
    scale = mx.abs(grouped).max(axis=-1, keepdims=True) / LARGEST
    return (mx.round(grouped / scale) * scale).reshape(x.shape)


def close(ours: mx.array, theirs: mx.array, tolerance: float) -> bool:
    assert ours.shape == theirs.shape
    return bool(mx.abs(ours - theirs).max() <= tolerance * mx.abs(theirs).max())


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantized_product_is_that_of_rounded_activations(isa: str, bits: int, group: int, dtype: mx.Dtype) -> None:
    shape = (N, 640) if group == 128 else (N, K)
    weight, exact = quantized(bits, group, dtype, shape)
    for rows in (1, 3, 8, 77):
        x = activations(rows, shape[1])
        ours = library.linear([weight])(x)
        # A value halfway between two codes may go either way, by one code of one group.
        assert close(ours, sixteen_bits(x, group) @ exact.T, 1e-5)
        assert close(ours, x @ exact.T, 5e-5)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_the_largest_codes_together_do_not_overflow(isa: str, bits: int) -> None:
    largest, k = 2**bits - 1, 256
    codes = mx.full((N, k * bits // 32), 0xFFFFFFFF, mx.uint32)
    scales, offsets = mx.ones((N, k // 128), mx.float16), mx.zeros((N, k // 128), mx.float16)
    product = library.linear([library.pack_quantized(codes, scales, offsets, bits, 128)])
    for x in (mx.ones((1, k)), -mx.ones((8, k))):
        assert close(product(x), largest * k * x[:, :1] * mx.ones((1, N)), 1e-6)


def test_activations_of_nothing_but_zeros_or_tiny_values_are_multiplied(isa: str) -> None:
    weight, exact = quantized(4, 32, mx.float16)
    product = library.linear([weight])
    assert mx.array_equal(product(mx.zeros((3, K))), mx.zeros((3, N)))
    tiny = activations(3, K) * 1e-30
    assert close(product(tiny), tiny @ exact.T, 5e-5)
    assert bool(mx.all(mx.isfinite(product(activations(3, K) * 1e-36))))


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_product_is_exact_to_float32(isa: str, dtype: mx.Dtype) -> None:
    weight, exact = floating(dtype)
    for rows in (1, 3, 8, 77):
        x = activations(rows, K)
        assert close(library.linear([weight])(x), x @ exact.T, 2e-6)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_embedding_gives_the_exact_rows(isa: str, bits: int) -> None:
    weight, exact = quantized(bits, 32, mx.float16)
    ids = mx.array([[0, 15, 16], [199, 7, 130]])
    assert mx.abs(library.embedding(weight)(ids) - exact[ids]).max() < 1e-6
    for dtype in FLOATS:
        weight, exact = floating(dtype)
        assert mx.array_equal(library.embedding(weight)(ids), exact[ids])


def test_scales_are_kept_exactly_where_float16_cannot_hold_them(isa: str) -> None:
    weight, exact = quantized(4, 32, mx.float32)
    assert weight.layout.wide_scales
    assert mx.abs(library.embedding(weight)(mx.arange(N)) - exact).max() < 1e-7
    assert not quantized(4, 32, mx.float16)[0].layout.wide_scales


def test_a_row_gets_the_same_bits_alone_and_in_a_batch(isa: str) -> None:
    x = activations(77, K)
    for weight in (quantized(4, 32, mx.float16)[0], quantized(6, 64, mx.float32)[0], floating(mx.bfloat16)[0]):
        product = library.linear([weight])
        together = product(x)
        alone = mx.concatenate([product(x[i : i + 1]) for i in range(77)])
        assert mx.array_equal(together, alone)


def test_several_weights_biases_and_an_addend_in_one_operation(isa: str) -> None:
    first, first_exact = quantized(4, 32, mx.float16)
    second, second_exact = floating(mx.float16, (64, K))
    bias = activations(64)
    mx.eval(bias)
    x = activations(5, K)
    a, b = library.linear([first, second], [None, bias]).all(x)
    assert close(a, x @ first_exact.T, 5e-5)
    assert close(b, x @ second_exact.T + bias, 2e-6)
    addend = activations(5, 64, seed=1)
    assert close(library.linear([second])(x, addend), x @ second_exact.T + addend, 2e-6)


@pytest.mark.parametrize(("gate", "activation"), [(Gate.SILU, "silu"), (Gate.GELU_TANH, "gelu_approx")])
@pytest.mark.parametrize("dtypes", [(dtype, dtype) for dtype in FLOATS] + [(mx.float32, mx.bfloat16)])
def test_gated_product(isa: str, gate: Gate, activation: str, dtypes: tuple[mx.Dtype, mx.Dtype]) -> None:
    import mlx.nn as nn

    (first, a), (second, b) = map(floating, dtypes)
    bias = activations(N, seed=4)
    mx.eval(bias)
    for rows in (9, 100):
        x = activations(rows, K)
        expected = getattr(nn, activation)(x @ a.T) * (x @ b.T + bias)
        assert close(library.linear([first, second], [None, bias], gate)(x), expected, 1e-5)
    assert close(library.glu(gate)(x @ a.T, x @ b.T), getattr(nn, activation)(x @ a.T) * (x @ b.T), 1e-5)


@pytest.mark.parametrize("k", [40, 2600])
def test_a_floating_row_of_any_length_gets_the_same_bits_alone_and_in_a_batch(isa: str, k: int) -> None:
    x = activations(75, k)
    for dtype in FLOATS:
        weight, exact = floating(dtype, (37, k))
        for product in (library.linear([weight]), library.linear([weight, weight], gate=Gate.SILU)):
            together = product(x)
            alone = mx.concatenate([product(x[i : i + 1]) for i in range(75)])
            assert mx.array_equal(together, alone)
            assert mx.array_equal(product(x[:19]), together[:19])
        assert close(library.linear([weight])(x), x @ exact.T, 1e-5)


def test_a_norm_in_front_of_a_product(isa: str) -> None:
    weight, exact = floating(mx.float32)
    scale = activations(K, seed=2)
    mx.eval(scale)
    x = activations(4, K) * 3
    expected = mx.fast.rms_norm(x, scale, 1e-5) @ exact.T
    assert close(library.linear([weight], norm=(scale, 1e-5))(x), expected, 1e-5)


@pytest.mark.parametrize("rows", [1, 40])
def test_experts_multiply_each_row_by_its_own_matrix(isa: str, rows: int) -> None:
    for weight, exact in (quantized(4, 64, mx.float16, (6, 48, 128)), floating(mx.bfloat16, (6, 48, 128))):
        x = activations(2, rows, 1, 1, 128)
        chosen = mx.random.randint(0, 6, (2, rows, 3), key=mx.random.key(1))
        expected = mx.gather_mm(x, exact.swapaxes(-1, -2), rhs_indices=chosen)
        assert close(library.experts([weight])(x, chosen), expected, 5e-5)
        assert library.experts([weight])(x, chosen).shape == (2, rows, 3, 1, 48)


def test_strided_and_half_precision_inputs_are_read_as_they_are(isa: str) -> None:
    weight, exact = floating(mx.float32, (32, 64))
    x = activations(64, 3, 5)
    product = library.linear([weight])
    assert close(product(x.transpose(2, 1, 0)), x.transpose(2, 1, 0) @ exact.T, 1e-5)
    for dtype in (mx.float16, mx.bfloat16):
        half = activations(5, 64).astype(dtype)
        assert close(product(half), half.astype(mx.float32) @ exact.T, 1e-5)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    for _ in each_isa("baseline"):
        weight, _ = floating(mx.float32)
        with pytest.raises(ValueError, match="576"):
            library.linear([weight])(activations(2, 64))
        with pytest.raises(ValueError, match="one row at a time"):
            library.experts([weight])(activations(2, 3, K), mx.array([0]))
