"""Attention that sees both ways, and activations within a product, against MLX's own arithmetic."""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest

from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Gate
from tests.kernels.cpu_library import ISAS, each_isa

FUNCTIONS = {Gate.GELU: nn.gelu, Gate.GELU_TANH: nn.gelu_approx, Gate.SILU: nn.silu}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from each_isa(request.param)


@pytest.mark.parametrize("width", [32, 24, 64])
@pytest.mark.parametrize("window", [None, 0, 5, 70])
def test_each_token_sees_its_own_text_within_the_window(isa: str, width: int, window: int | None) -> None:
    length, lengths = 150, mx.array([150, 1, 67], mx.int32)
    shape = (3, length, 2, width)
    queries, keys, values = (mx.random.normal(shape, key=mx.random.key(i)).transpose(0, 2, 1, 3) for i in range(3))
    positions = mx.arange(length)
    seen = (positions[None, None, :] < lengths[:, None, None]) & mx.ones((1, length, 1), mx.bool_)
    if window is not None:
        seen = seen & (mx.abs(positions[:, None] - positions[None, :]) <= window)
    scores = mx.where(seen[:, None], (queries @ keys.swapaxes(2, 3)) * 0.2, -1e9)
    expected = mx.softmax(scores, axis=-1) @ values
    there = (positions[None, :] < lengths[:, None])[:, None, :, None]
    ours = library.both_ways(0.2, window).of(queries, keys, values, lengths)
    assert mx.abs(ours - mx.where(there, expected, 0)).max() < 2e-5


def test_shapes_that_do_not_go_together_are_refused(isa: str) -> None:
    x = mx.zeros((2, 2, 4, 8))
    with pytest.raises(ValueError, match="do not go together"):
        library.both_ways(1.0, None).of(x, x, x, mx.array([4], mx.int32))


@pytest.mark.parametrize(
    ("gate", "function"), [(Gate.GELU, nn.gelu), (Gate.GELU_TANH, nn.gelu_approx), (Gate.SILU, nn.silu)]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_one_weight_with_a_gate_gives_what_the_gate_makes_of_it(isa, gate, function, dtype) -> None:
    weight = (mx.random.normal((200, 96), key=mx.random.key(1)) * 0.2).astype(dtype)
    bias = mx.random.normal((200,), key=mx.random.key(2))
    operation = library.linear([library.pack_floating(weight)], [bias], gate)
    for rows in (1, 9, 130):
        x = mx.random.normal((rows, 96), key=mx.random.key(rows))
        expected = FUNCTIONS[gate](x @ weight.astype(mx.float32).T + bias)
        assert mx.abs(operation(x) - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_row_does_not_depend_on_how_many_there_are(isa: str, dtype: mx.Dtype) -> None:
    weight = (mx.random.normal((200, 96), key=mx.random.key(1)) * 0.2).astype(dtype)
    operation = library.linear([library.pack_floating(weight)])
    x = mx.random.normal((130, 96), key=mx.random.key(3))
    whole = operation(x)
    for rows in (1, 3, 8, 70):
        assert mx.array_equal(operation(x[:rows]), whole[:rows])
