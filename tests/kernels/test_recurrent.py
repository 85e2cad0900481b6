"""Recurrent updates: the CUDA bodies on the emulator, and the references against mlx-lm's."""

import mlx.core as mx
import pytest

from metalctl.kernels.recurrent import (
    gated_delta,
    gated_delta_reference,
    state_space_reference,
    state_space_step,
)
from tests.kernels.attention_cases import distance
from tests.kernels.emulation import emulated


def delta_inputs(
    batch=2, tokens=5, key_heads=2, value_heads=4, key_dim=64, value_dim=16, dtype=mx.float32, vector=False
):
    mx.random.seed(1)
    q, k = (mx.random.normal((batch, tokens, key_heads, key_dim)) * key_dim**-0.5 for _ in range(2))
    v = mx.random.normal((batch, tokens, value_heads, value_dim))
    g = mx.random.uniform(0.8, 1.0, (batch, tokens, value_heads, *([key_dim] if vector else [])))
    beta = mx.random.uniform(shape=(batch, tokens, value_heads))
    state = mx.random.normal((batch, value_heads, value_dim, key_dim))
    return [part.astype(dtype) for part in (q, k, v)] + [g, beta.astype(dtype), state]


def space_inputs(dtype, state_dtype=mx.float32, batch=3, heads=4, groups=2, head_dim=8, state_dim=64):
    mx.random.seed(2)
    x = mx.random.normal((batch, 1, heads, head_dim))
    b, c = (mx.random.normal((batch, 1, groups, state_dim)) for _ in range(2))
    a_log, d = mx.random.normal((heads,)), mx.random.normal((heads,))
    dt = mx.random.uniform(0.01, 1.0, (batch, 1, heads))
    state = mx.random.normal((batch, heads, head_dim, state_dim)).astype(state_dtype)
    return [x.astype(dtype), a_log, b.astype(dtype), c.astype(dtype), d, dt, state]


@pytest.mark.parametrize(
    ("changed", "tolerance"),
    [
        ({}, 2e-5),
        ({"dtype": mx.bfloat16}, 2e-2),
        ({"vector": True, "key_dim": 128}, 2e-5),
        ({"batch": 1, "value_heads": 2, "value_dim": 3, "key_dim": 32}, 2e-5),  # rows that fill no block
    ],
    ids=str,
)
def test_the_cuda_body_of_gated_delta_equals_the_reference(changed, tolerance):
    inputs = delta_inputs(**changed)
    with emulated("cuda", "gated_delta"):
        y, state = gated_delta(*inputs)
    expected, expected_state = gated_delta_reference(*inputs)
    assert y.dtype == inputs[0].dtype
    assert distance(y, expected.astype(mx.float32)) <= tolerance
    assert distance(state, expected_state) <= 2e-5


def test_masked_tokens_leave_the_gated_delta_state_alone():
    inputs = delta_inputs(tokens=6, value_heads=2, value_dim=3)  # rows of both sequences in one warp
    mask = mx.array([[True] * 6, [False, False, True, True, False, True]])
    with emulated("cuda", "gated_delta"):
        y, state = gated_delta(*inputs, mask)
    expected, expected_state = gated_delta_reference(*inputs, mask)
    assert distance(y, expected) <= 2e-5
    assert distance(state, expected_state) <= 2e-5
    kept = mx.array([2, 3, 5])
    alone = [part[1:, kept] for part in inputs[:5]] + [inputs[5][1:]]
    assert distance(state[1:], gated_delta_reference(*alone)[1]) <= 2e-5


def test_gated_delta_does_not_drift_in_512_steps():
    inputs = delta_inputs(batch=1, tokens=512, key_heads=1, value_heads=1, value_dim=4)
    with emulated("cuda", "gated_delta"):
        y, state = gated_delta(*inputs)
    expected, expected_state = gated_delta_reference(*inputs)
    assert distance(y, expected) <= 5e-5
    assert distance(state, expected_state) <= 5e-5


def test_the_reference_of_gated_delta_equals_mlx_lm():
    theirs = pytest.importorskip("mlx_lm.models.gated_delta").gated_delta_ops
    for vector in (False, True):
        inputs = delta_inputs(vector=vector)
        (y, state), (expected, expected_state) = gated_delta_reference(*inputs), theirs(*inputs)
        assert distance(y, expected) <= 2e-6
        assert distance(state, expected_state) <= 2e-6


@pytest.mark.parametrize(
    "dtypes", [(mx.float32, mx.float32), (mx.bfloat16, mx.float32), (mx.float16, mx.float16)], ids=str
)
def test_the_cuda_body_of_a_state_space_step_equals_the_reference(dtypes):
    inputs = space_inputs(*dtypes)
    with emulated("cuda", "state_space"):
        y, state = state_space_step(*inputs)
    expected, expected_state = state_space_reference(*inputs)
    tolerance = {mx.float32: 1e-5, mx.bfloat16: 1.3e-1, mx.float16: 1.6e-2}  # one rounding at the size of the result
    assert (y.dtype, state.dtype) == dtypes
    assert distance(y, expected.astype(mx.float32)) <= tolerance[dtypes[0]]
    assert distance(state, expected_state.astype(mx.float32)) <= (1e-5 if dtypes[1] == mx.float32 else 4e-3)


def test_state_space_steps_do_not_drift_in_512_steps():
    inputs = space_inputs(mx.float32, batch=1, heads=1, groups=1, head_dim=2)
    *rest, state = inputs
    exact = state
    with emulated("cuda", "state_space"):
        for _ in range(512):
            y, state = state_space_step(*rest, state)
    for _ in range(512):
        expected, exact = state_space_reference(*rest, exact)
        mx.eval(exact)
    assert distance(y, expected) <= 1e-4
    assert distance(state, exact) <= 1e-4


def test_the_reference_of_a_state_space_step_equals_mlx_lm():
    ssm = pytest.importorskip("mlx_lm.models.ssm")
    x, a_log, b, c, d, _, state = space_inputs(mx.float32)
    raw, bias = mx.random.normal((3, 1, 4)), mx.random.normal((4,))
    expected, expected_state = ssm.ssm_attn(x, a_log, b, c, d, raw, bias, state, (0.001, 100.0))
    y, after = state_space_reference(x, a_log, b, c, d, ssm.compute_dt(raw, bias, (0.001, 100.0)), state)
    assert distance(y, expected) <= 2e-5
    assert distance(after, expected_state) <= 2e-5
