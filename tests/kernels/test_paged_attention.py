"""Paged attention: what the reference means, and that the bodies for Metal and CUDA, run on the emulator, agree."""

import mlx.core as mx
import pytest

from metalctl.kernels import dispatch
from metalctl.kernels import paged_attention as module
from metalctl.kernels.paged_attention import Plan, make_plan, paged_attention, plain, reference
from tests.kernels.attention_cases import Case, distance, make
from tests.kernels.emulation import emulated

CASES = [
    Case(),
    Case(key_dim=80, dtype=mx.bfloat16, heads=2),
    Case(key_dim=96, heads=6),
    Case(key_dim=112, dtype=mx.bfloat16, block_size=32),
    Case(key_dim=128, dtype=mx.float32),
    Case(key_dim=128, dtype=mx.bfloat16, heads=32),
    Case(key_dim=192, value_dim=128, block_size=8),
    Case(key_dim=256, dtype=mx.bfloat16, sinks=True),
    Case(key_dim=512, heads=2, block_size=48, dtype=mx.float32),
    Case(window=20, starts=True, dtype=mx.float32),
    Case(window=33, block_size=8, sinks=True),
    Case(window=290, starts=True, dtype=mx.bfloat16, query_dtype=mx.float32),
    Case(softcap=3.0, key_dim=96),
    Case(softcap=3.0, sinks=True, lengths=(70, 9), query_dtype=mx.bfloat16),
    Case(length=3, heads=8),
    Case(length=5, window=9, starts=True, lengths=(7, 300), dtype=mx.float32),
    Case(length=4, lengths=(0, 2, 300), sinks=True),
]
WINDOWED = Case(dtype=mx.float32, length=7, window=30, sinks=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_kernel_is_at_most_twice_as_far_from_the_reference_as_plain_mlx(device, case):
    check(device, case)


FEATURES = [{}, {"window": 40, "starts": True}, {"sinks": True}, {"softcap": 5.0}]
FLOATS = [mx.float16, mx.bfloat16, mx.float32]
SIZES = [64, 80, 96, 112, 128, 192, 256, 512]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("key_dim", SIZES)
def test_every_head_size_and_dtype(device, dtype, key_dim):
    """With every block size, and the features turned so that over the whole each meets each."""
    turn = FLOATS.index(dtype) + SIZES.index(key_dim)
    for i, block_size in enumerate((8, 16, 32, 48)):
        check(device, Case(key_dim=key_dim, dtype=dtype, block_size=block_size, **FEATURES[(i + turn) % 4]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_is_right_on_this_device(case):
    check(dispatch.platform(), case, emulate=False)


def check(device, case, emulate=True):
    inputs = make(case)
    queries, keys, values, tables, _ = inputs.arrays
    assert make_plan(device, queries, keys, values, tables, case.window) is not None
    if emulate:
        with emulated(device, "paged_attention"):
            output = paged_attention(*inputs.arrays, **inputs.options)
    else:
        output = paged_attention(*inputs.arrays, **inputs.options)
    ours, common = inputs.errors(output)
    assert output.dtype == queries.dtype
    assert ours <= max(2 * common, 2e-6)


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_splitting_the_context_does_not_change_what_is_attended_to(device, monkeypatch):
    inputs = make(Case(lengths=(700, 130), dtype=mx.float32, window=600, sinks=True))
    outputs = []
    for wanted in (1, 1 << 20):
        monkeypatch.setattr(module, "WANTED", {device: wanted})
        with emulated(device, "paged_attention"):
            outputs.append(paged_attention(*inputs.arrays, **inputs.options))
    assert make_plan(device, *inputs.arrays[:4], 600).parts > 1
    assert distance(outputs[0], outputs[1]) < 2e-6


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_blocks_left_of_the_window_are_not_read(device):
    """SPEC A4: a block that no query sees may hold anything, here NaN, with a table that still names it."""
    case = Case(window=8, length=4, lengths=(200,), block_size=16, dtype=mx.float32)
    inputs = make(case)
    queries, keys, values, tables, lengths = inputs.arrays
    first = (200 - 4 - 8 + 1) // 16
    assert -(-200 // 16) - first <= -(-(8 + 4) // 16) + 1
    keys[tables[0, :first]], values[tables[0, :first]] = mx.nan, mx.nan
    with emulated(device, "paged_attention"):
        output = paged_attention(queries, keys, values, tables, lengths, **inputs.options)
    keys[tables[0, :first]], values[tables[0, :first]] = 0, 0
    assert distance(output, reference(queries, keys, values, tables, lengths, **inputs.options)) < 2e-6


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_slots_past_the_length_are_not_read(device):
    inputs = make(Case(lengths=(5, 21), block_size=32, dtype=mx.float16, key_dim=128))
    _, keys, values, tables, _ = inputs.arrays
    for row, length in enumerate((5, 21)):
        keys[tables[row, 0], length:], values[tables[row, 0], length:] = mx.nan, mx.inf
    with emulated(device, "paged_attention"):
        assert mx.isfinite(paged_attention(*inputs.arrays, **inputs.options)).all()


@pytest.mark.parametrize("body", [reference, plain])
@pytest.mark.parametrize("case", [Case(dtype=mx.float32), WINDOWED], ids=str)
def test_rows_equal_dense_attention_over_their_own_tokens(body, case):
    inputs = make(case)
    queries, keys, values, tables, _ = inputs.arrays
    output = body(*inputs.arrays, **inputs.options)
    for row, tokens in enumerate(case.lengths):
        own = [pool[tables[row]].reshape(-1, *pool.shape[2:])[:tokens] for pool in (keys, values)]
        dense = [part.swapaxes(0, 1)[None] for part in own]
        length = min(case.length, tokens)
        at = mx.arange(tokens)
        seen = at <= at[:, None]
        if case.window:
            seen = seen & (at > at[:, None] - case.window)
        expected = mx.fast.scaled_dot_product_attention(
            queries[row : row + 1, :, -length:],
            *dense,
            scale=inputs.options["scale"],
            mask=seen[-length:],
            sinks=inputs.options["sinks"],
        )
        assert distance(output[row, :, -length:], expected[0]) < 2e-6


def test_softcap_bounds_the_scores():
    queries = mx.full((1, 1, 1, 8), 100.0)
    keys = mx.stack([mx.full((1, 8), 100.0), mx.full((1, 8), -100.0)])[None]
    values = mx.stack([mx.full((1, 8), 1.0), mx.full((1, 8), 0.0)])[None]
    arrays = (queries, keys, values, mx.zeros((1, 1), dtype=mx.int32), mx.array([2], dtype=mx.int32))
    capped = reference(*arrays, 1.0, None, 1.0, None, None)
    assert capped[0, 0, 0, 0].item() == pytest.approx(mx.sigmoid(mx.array(2.0)).item(), rel=1e-5)


@pytest.mark.parametrize("body", [reference, plain])
def test_a_query_that_sees_nothing_yields_zeros(body):
    inputs = make(Case(lengths=(0, 2), length=3))
    output = body(*inputs.arrays, **inputs.options)
    assert (output[0] == 0).all()
    assert (output[1, :, 0] == 0).all()
    assert (output[1, :, 1:] != 0).any()


def plan_for(device, batch=1, context=4096, heads=32, kv_heads=8, dim=128, length=1, dtype=mx.bfloat16, window=None):
    blocks = -(-context // 16)
    pool = mx.zeros((2, 16, kv_heads, dim), dtype=dtype)
    queries = mx.zeros((batch, heads, length, dim), dtype=dtype)
    return make_plan(device, queries, pool, pool, mx.zeros((batch, blocks), dtype=mx.int32), window)


@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize("context", [16, 128, 4000, 4096, 65536, 131072, 1 << 20])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_part_is_never_longer_than_the_kernel_has_room_for(device, context, batch):
    plan = plan_for(device, batch=batch, context=context)
    share = (context + plan.parts - 1) // plan.parts + 63
    assert share <= module.LONGEST
    assert 1 <= plan.parts <= module.MOST_PARTS


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_window_costs_the_same_at_any_context(device):
    assert plan_for(device, context=65536, window=1024) == plan_for(device, context=8192, window=1024)


@pytest.mark.parametrize(
    "changed",
    [{"dim": 20}, {"dim": 1024}, {"length": 4096}, {"dtype": mx.int8}],
    ids=lambda changed: next(iter(changed)),
)
def test_shapes_that_no_kernel_fits_have_no_plan(changed):
    assert isinstance(plan_for("metal"), Plan)
    assert plan_for("metal", **changed) is None


def test_one_body_can_be_forced_and_given_back():
    inputs = make(Case(dtype=mx.float16))
    usual = dispatch.body("paged_attention")
    with dispatch.forced("paged_attention", "reference"):
        assert dispatch.body("paged_attention") == "reference"
        forced = paged_attention(*inputs.arrays, **inputs.options)
    assert dispatch.body("paged_attention") == usual
    assert (forced == reference(*inputs.arrays, **inputs.options)).all()
