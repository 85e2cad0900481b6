"""What stands in for mlx-lm's functions on CUDA computes what they compute (here with the plain bodies)."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta, mamba2, ssm

from metalctl.engine import cuda_layers
from metalctl.kernels import dispatch


@pytest.fixture
def installed():
    originals = (gated_delta.gated_delta_ops, ssm.ssm_attn)
    cuda_layers.install()
    with dispatch.forced("gated_delta", "reference"), dispatch.forced("state_space", "reference"):
        yield
    gated_delta.gated_delta_ops, ssm.ssm_attn = originals


def delta_arguments():
    mx.random.seed(0)
    q, k = (mx.random.normal((2, 3, 2, 32)) * 0.2 for _ in range(2))
    v, a, b = mx.random.normal((2, 3, 4, 16)), mx.random.normal((2, 3, 4)), mx.random.normal((2, 3, 4))
    return (q, k, v, a, b, mx.random.normal((4,)), mx.random.normal((4,)))


@pytest.mark.parametrize("mask", [None, mx.array([[True, True, True], [False, True, True]])], ids=["all", "padded"])
def test_gated_delta_update_gives_the_same(mask, request):
    arguments = delta_arguments()
    expected, expected_state = gated_delta.gated_delta_update(*arguments, mask=mask)
    request.getfixturevalue("installed")
    y, state = gated_delta.gated_delta_update(*arguments, mask=mask)
    seen = mx.ones((2, 3), dtype=mx.bool_) if mask is None else mask
    assert mx.abs(mx.where(seen[..., None, None], y - expected, 0)).max() < 1e-6
    assert mx.abs(state - expected_state).max() < 1e-6


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mamba2_block_gives_the_same(tokens, request):
    mx.random.seed(1)
    shared = (mx.random.normal((4,)), *(mx.random.normal((2, tokens, 2, 16)) for _ in range(2)), mx.random.normal((4,)))
    x, dt, bias = mx.random.normal((2, tokens, 4, 8)), mx.random.normal((2, tokens, 4)), mx.random.normal((4,))
    state = mx.random.normal((2, 4, 8, 16))
    expected, expected_state = ssm.ssm_update(x, *shared, dt, bias, state)
    request.getfixturevalue("installed")
    assert mamba2.ssm_update is ssm.ssm_update
    y, after = ssm.ssm_update(x, *shared, dt, bias, state)
    assert mx.abs(y - expected).max() < 2e-5
    assert mx.abs(after - expected_state).max() < 2e-5


@pytest.mark.usefixtures("installed")
def test_quantised_layers_are_replaced_and_give_the_same():
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 32), nn.Linear(32, 64, bias=False))
    nn.quantize(model, group_size=32, bits=4)
    tokens = mx.array([[1, 2, 3]])
    expected = model(tokens)
    logits = model.layers[0].as_linear(expected)
    assert cuda_layers.accelerate(model) == ["CUDA kernels: 3 quantised layers"]
    assert (model(tokens) == expected).all()
    assert (model.layers[0].as_linear(expected) == logits).all()


@pytest.mark.usefixtures("installed")
def test_layers_that_are_given_the_same_array_are_computed_together(monkeypatch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 32), nn.Linear(64, 48, bias=False)
            self.third = nn.Linear(32, 16)

        def __call__(self, x):
            return self.third(self.first(x)), self.second(x)

    block = Block()
    block.set_dtype(mx.bfloat16)
    x, other = (mx.random.normal((1, 2, 64)).astype(mx.bfloat16) for _ in range(2))
    expected = [block(x), block(other)]
    assert cuda_layers.accelerate(block) == ["CUDA kernels: 3 linear layers"]
    sizes = []
    joined = cuda_layers.linear_rows.linear_rows
    monkeypatch.setattr(
        cuda_layers.linear_rows, "linear_rows", lambda x, weights: sizes.append(len(weights)) or joined(x, weights)
    )
    for array, (deep, flat) in zip((x, other, x), (*expected, expected[0]), strict=True):
        for ours, theirs in zip(block(array), (deep, flat), strict=True):
            assert mx.allclose(ours, theirs, rtol=2e-2, atol=2e-2)
    assert sizes == [1, 1, 1, 2, 1, 2, 1]  # the first pass shows which belong together


@pytest.mark.usefixtures("installed")
def test_large_matrices_are_laid_end_to_end_and_give_the_same(monkeypatch):
    monkeypatch.setattr(cuda_layers.linear_rows, "LARGEST", 100)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 32), nn.Linear(64, 48, bias=False)

        def __call__(self, x):
            return self.first(x), self.second(x)

    block = Block()
    block.set_dtype(mx.bfloat16)
    weights = [block.first.weight, block.second.weight]
    inputs = [mx.random.normal((1, rows, 64)).astype(mx.bfloat16) for rows in (2, 3, 100)]
    expected = [block(x) for x in inputs]
    cuda_layers.accelerate(block)
    for x, results in zip(inputs * 2, expected * 2, strict=True):
        for ours, theirs in zip(block(x), results, strict=True):
            assert mx.allclose(ours, theirs, rtol=2e-2, atol=2e-2)
    assert all((now.weight == was).all() for now, was in zip((block.first, block.second), weights, strict=True))
