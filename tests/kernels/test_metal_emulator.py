"""The emulator finds what is wrong with a kernel, and computes what a right one means."""

import mlx.core as mx
import pytest

from tests.kernel_emulator import CompileError, EmulationError, cuda_kernel, metal_kernel
from tests.kernels.emulation import require_compiler


@pytest.fixture(autouse=True)
def _compiler():
    require_compiler()


def run(source, inputs=(), shape=(64,), dtype=mx.float32, threads=64, group=64, header="", template=(), **options):
    kernel = metal_kernel(
        name="kernel_under_test",
        input_names=[f"in{i}" for i in range(len(inputs))],
        output_names=["out"],
        source=source,
        header=header,
        **options,
    )
    (output,) = kernel(
        inputs=list(inputs),
        template=list(template),
        grid=(threads, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    return output


INDEX = "uint i = thread_position_in_grid.x;\n"
NUMBERS = mx.arange(64).astype(mx.float32)


# ---- what it finds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("out[i] = in0[i + 1];", r"a read of 4 bytes at in0\[64\], which has 64 elements"),
        ("out[i] = in0[int(i) - 1];", r"a read of 4 bytes at in0\[-1\]"),
        ("out[i + 1] = in0[i];", r"a write of 4 bytes at out\[64\]"),
        ("out[i] = out[i] + 1;", r"out\[0\] is read before anything was written there"),
        ("if (i != 5) out[i] = 0;", r"nothing was written to out\[5\]"),
        ("((device float*)in0)[i] = 1; out[i] = 1;", r"a write to in0\[0\], an input"),
        ("out[i] = ((const device float4*)(in0 + 1))[i / 8].x;", r"in0\[1\] is not aligned"),
        ("out[0] = in0[i];", r"data race on out\[0\]"),
    ],
)
def test_a_bad_access_to_a_buffer_is_found(source, finding):
    cast = source.startswith("((device float*)")
    if cast:
        source = source.replace("(device float*)in0", "const_cast<device float*>(in0)")
    with pytest.raises(EmulationError, match=finding):
        run(INDEX + source, [NUMBERS])


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("tile[i] = in0[i]; out[i] = tile[63 - i];", r"data race on tile|read before anything was written"),
        ("out[i] = tile[i];", r"tile\[0\] is read before anything was written there"),
        ("tile[i + 1] = 1; out[i] = 0;", r"a write of 4 bytes at tile\[64\], which has 64 elements"),
        (
            "tile[i] = 0; threadgroup_barrier(mem_flags::mem_none); out[i] = tile[63 - i];",
            r"data race on tile",
        ),
        (
            "tile[i] = 0; threadgroup_barrier(mem_flags::mem_device); out[i] = tile[63 - i];",
            r"data race on tile",
        ),
        (
            "tile[i] = 0; simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[63 - i];",
            r"data race on tile|read before anything was written",
        ),
        (
            "tile[i] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
            "float x = tile[63 - i]; tile[i] = x; out[i] = x;",
            r"data race on tile",
        ),
    ],
)
def test_a_bad_use_of_threadgroup_memory_is_found(body, finding):
    with pytest.raises(EmulationError, match=finding):
        run(INDEX + "threadgroup float tile[64];\n" + body, [NUMBERS])


@pytest.mark.parametrize(
    "body",
    [
        "tile[i] = in0[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[63 - i];",
        "tile[i] = in0[i]; simdgroup_barrier(mem_flags::mem_threadgroup); out[63 - i] = tile[i ^ 1];",
        "tile[i] = in0[i]; out[63 - i] = tile[i];",
        "threadgroup float* own = tile + i; *own = in0[i]; out[i] = *own;",
    ],
)
def test_ordered_accesses_are_no_race(body):
    output = run(INDEX + "threadgroup float tile[16 * 4], unused;\n" + body, [NUMBERS])
    assert sorted(output.tolist()) == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("if (i < 40) threadgroup_barrier(mem_flags::mem_none);", r"a barrier in divergent control flow"),
        ("if (i < 32) return; threadgroup_barrier(mem_flags::mem_none);", r"thread \d+ has ended"),
        (
            "if (i < 32) {\nthreadgroup_barrier(mem_flags::mem_none);\n}"
            "else {\nthreadgroup_barrier(mem_flags::mem_none);\n}",
            r"divergent control flow: .*line 4.*line 6",
        ),
        ("if (i % 2) sum = simd_sum(sum);\nelse sum = simd_max(sum);", r"divergent control flow"),
        ("if (i < 8) sum = simd_sum(sum);\nelse threadgroup_barrier(mem_flags::mem_none);", r"divergent control flow"),
        ("if (i < 16) return; sum = simd_shuffle_xor(sum, 16);", r"reads lane \d+, which does not take part"),
        (
            "threadgroup_barrier(i < 32 ? mem_flags::mem_none : mem_flags::mem_device);",
            r"different memory flags",
        ),
    ],
)
def test_divergent_control_flow_is_found(body, finding):
    with pytest.raises(EmulationError, match=finding):
        run(INDEX + "float sum = in0[i]; out[i] = 0;\n" + body, [NUMBERS])


def test_threadgroups_that_touch_the_same_memory_race():
    with pytest.raises(EmulationError, match=r"threadgroup 0 touched it too"):
        run("out[thread_position_in_threadgroup.x] = 1;", threads=64, group=32, shape=(32,))


def test_more_threadgroup_memory_than_there_is_is_found():
    with pytest.raises(EmulationError, match=r"the limit is 32768"):
        run(INDEX + "threadgroup float big[9000]; big[i] = 0; out[i] = big[i];")


def test_a_finding_names_the_line_and_the_thread():
    with pytest.raises(EmulationError, match=r"thread \[40, 0, 0\] of threadgroup \[0, 0, 0\]"):
        run(INDEX + "\nout[i] = in0[i < 40 ? i : 99];", [NUMBERS])


@pytest.mark.parametrize(
    ("source", "header"),
    [
        ("out[i] = read(in1, i % 2);", "float read(const device float* p, uint i) { return p[i]; }"),
        ("threadgroup float tile[64]; device float* p = tile; p[i] = 0; out[i] = p[i];", ""),
        ("thread float* p = out; p[i] = 0;", ""),
        ("out[i] = undefined_function(in0[i]);", ""),
    ],
    ids=["constant as device", "threadgroup as device", "device as thread", "unknown name"],
)
def test_what_the_metal_compiler_refuses_is_refused(source, header):
    """An input of fewer than 8 elements is in the constant address space: no function for device pointers takes it."""
    with pytest.raises(CompileError):
        run(INDEX + source, [NUMBERS, mx.ones((2,))], header=header)


# ---- what it computes ------------------------------------------------------------------------------------------------


def test_simd_operations_mean_what_they_say():
    lane = mx.arange(32).astype(mx.float32)
    for expression, expected in {
        "simd_sum(x)": mx.full((32,), 496.0),
        "simd_max(x)": mx.full((32,), 31.0),
        "simd_prefix_inclusive_sum(x)": mx.cumsum(lane),
        "simd_prefix_exclusive_sum(x)": mx.cumsum(lane) - lane,
        "simd_shuffle_xor(x, 5)": mx.array([float(i ^ 5) for i in range(32)]),
        "simd_shuffle_down(x, 4)": mx.minimum(lane + 4, 31) - mx.where(lane > 27, 31 - lane, 0),
        "simd_broadcast(x, 7)": mx.full((32,), 7.0),
        "quad_sum(x)": mx.array([float(sum(range(i // 4 * 4, i // 4 * 4 + 4))) for i in range(32)]),
    }.items():
        output = run(f"{INDEX} float x = in0[i]; out[i] = {expression};", [lane], (32,), threads=32, group=32)
        assert output.tolist() == expected.tolist(), expression


def test_a_last_threadgroup_may_be_smaller():
    """Metal launches threads, not whole threadgroups: the 40th thread starts none that does not exist."""
    output = run(INDEX + "out[i] = simd_sum(1.0f) + threads_per_threadgroup.x;", shape=(40,), threads=40, group=32)
    assert output.tolist() == [64.0] * 32 + [16.0] * 8


def test_each_operation_in_half_precision_is_rounded():
    source = INDEX + "half x = half(in0[i]); out[i] = float(x * x + half(1.0));"
    values = 1 + mx.arange(64) / 50
    half = values.astype(mx.float16)
    assert (run(source, [values]) == (half * half + mx.array(1, mx.float16)).astype(mx.float32)).all()


def test_there_is_no_double():
    source = INDEX + "out[i] = sizeof(1.0 * in0[i]) == 4;"
    assert (run(source, [NUMBERS]) == 1).all()


def test_vectors_swizzle_and_are_made_by_name():
    source = INDEX + "float4 v = float4(in0[i], float2(2.0f), 1.0f); half2 h = half2(v.wx); out[i] = v.y + float(h.y);"
    assert (run(source, [NUMBERS]) == NUMBERS + 2).all()


def test_atomic_additions_do_not_race():
    source = INDEX + "atomic_fetch_add_explicit(&out[i % 4], 1, memory_order_relaxed);"
    kernel = metal_kernel("count", [], ["out"], source, atomic_outputs=True)
    launch = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(4,)], "output_dtypes": [mx.int32]}
    assert kernel(inputs=[], init_value=0, **launch)[0].tolist() == [16] * 4


def test_matrices_of_a_simdgroup_multiply():
    a, b = mx.random.normal((8, 8)), mx.random.normal((8, 8))
    source = """
        simdgroup_float8x8 a, b, c = simdgroup_float8x8(0.0f);
        simdgroup_load(a, in0, 8);
        simdgroup_load(b, in1, 8, 0, true);
        simdgroup_multiply_accumulate(c, a, b, c);
        simdgroup_store(c, out, 8);
    """
    output = run(source, [a, b], (8, 8), threads=32, group=32)
    assert mx.allclose(output, a @ b.T, atol=1e-5)


def test_shapes_and_template_arguments_arrive():
    source = INDEX + "out[i] = i < in0_shape[1] && FLAG ? T(in0[i + in0_strides[0]]) * SIZE + in0_ndim : T(0);"
    rows = mx.arange(12).astype(mx.float32).reshape(2, 6)
    output = run(source, [rows], template=[("T", mx.float32), ("SIZE", 3), ("FLAG", True)])
    assert output[:6].tolist() == [float(i * 3 + 2) for i in range(6, 12)]


def test_outputs_begin_as_nan_and_init_value_is_kept():
    kernel = metal_kernel("leave", ["x"], ["out"], "if (x < 0) out[0] = 0;", may_leave_unwritten=["out"])
    launch = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(3,)], "output_dtypes": [mx.float32]}
    assert mx.isnan(kernel(inputs=[1.0], **launch)[0]).all()
    assert kernel(inputs=[1.0], init_value=7, **launch)[0].tolist() == [7, 7, 7]


def test_cuda_sources_run_too():
    source = """
        __shared__ float tile[32];
        int i = threadIdx.x + blockIdx.x * blockDim.x;
        tile[threadIdx.x] = float(x[i]);
        __syncthreads();
        out[i] = T(tile[31 - threadIdx.x] + __shfl_xor_sync(0xffffffff, 1.0f, 1));
    """
    x = mx.arange(64).astype(mx.bfloat16)
    kernel = cuda_kernel("reverse", ["x"], ["out"], source)
    (output,) = kernel(
        inputs=[x],
        template=[("T", mx.bfloat16)],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.bfloat16],
    )
    assert output.tolist() == [*range(32, 0, -1), *range(64, 32, -1)]


def test_a_race_in_a_cuda_source_is_found():
    source = "__shared__ float tile[64]; tile[threadIdx.x] = 1; out[threadIdx.x] = tile[63 - threadIdx.x];"
    launch = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    with pytest.raises(EmulationError, match=r"data race|read before"):
        cuda_kernel("race", [], ["out"], source)(inputs=[], **launch)


# ---- kernels that others wrote ---------------------------------------------------------------------------------------


def gated_delta_inputs(batch, tokens, dtype):
    mx.random.seed(3)
    key_heads, value_heads, key_dim, value_dim = 1, 2, 128, 8
    q, k = (mx.random.normal((batch, tokens, key_heads, key_dim)) * key_dim**-0.5 for _ in range(2))
    v = mx.random.normal((batch, tokens, value_heads, value_dim))
    g = mx.random.uniform(0.9, 1.0, (batch, tokens, value_heads))
    beta = mx.random.uniform(shape=(batch, tokens, value_heads))
    state = mx.random.normal((batch, value_heads, value_dim, key_dim))
    return [part.astype(dtype) for part in (q, k, v)] + [g, beta, state]


@pytest.mark.parametrize("make", ["_make_gated_delta_kernel", "_make_gated_delta_packed_kernel"])
def test_the_gated_delta_kernels_of_mlx_lm_run_and_do_not_drift(make, monkeypatch):
    """512 steps against the plain operations, as mlx-lm has both."""
    module = pytest.importorskip("mlx_lm.models.gated_delta")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    kernel = getattr(module, make)()
    q, k, v, g, beta, state = inputs = gated_delta_inputs(2, 512, mx.float32)
    expected, expected_state = module.gated_delta_ops(*inputs)
    rows = 8 if "packed" in make else 1
    y, final = kernel(
        inputs=[q, k, v, g, beta, state, 512],
        template=[("InT", q.dtype), ("StT", state.dtype), ("Dk", 128), ("Dv", 8), ("Hk", 1), ("Hv", 2)],
        grid=(32, 8 // rows, 2 * 2),
        threadgroup=(32, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, state.dtype],
    )
    assert mx.abs(y - expected).max() < 1e-4
    assert mx.abs(final - expected_state).max() < 1e-4


def test_the_state_space_kernel_of_mlx_lm_runs(monkeypatch):
    module = pytest.importorskip("mlx_lm.models.ssm")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(module, "_ssm_kernel", module.make_ssm_kernel())
    x, b, c = mx.random.normal((2, 1, 4, 8)), mx.random.normal((2, 1, 2, 64)), mx.random.normal((2, 1, 2, 64))
    a_log, d, dt_bias = mx.random.normal((4,)), mx.random.normal((4,)), mx.random.normal((4,))
    dt, state = mx.random.normal((2, 1, 4)), mx.random.normal((2, 4, 8, 64))
    arguments = (x, a_log, b, c, d, dt, dt_bias, state, (0.001, 100.0))
    y, final = module.ssm_update_kernel(*arguments)
    expected, expected_state = module.ssm_attn(*arguments)
    assert mx.abs(y - expected).max() < 1e-4
    assert mx.abs(final - expected_state).max() < 1e-4
