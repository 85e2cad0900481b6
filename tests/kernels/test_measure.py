"""The measuring of kernels: each kind of case runs on any platform, and a wrong kernel is not called sound."""

import mlx.core as mx
import pytest

from metalctl.kernels import dispatch, measure, paged_attention
from tests.kernels.emulation import emulated

SMALL = [
    measure.attention("small", 3, 40, heads=4, kv_heads=2, head_dim=32, length=2, window=20),
    measure.products("small", 3, 64, (16, 24)),
    measure.appended("small", 3, heads=4, kv_heads=2, head_dim=32),
    measure.quantised("small", 3, width=128, columns=32),
    measure.delta("small", 2, 4, key_heads=1, heads=2, size=16),
    measure.space("small", 2, heads=2, head_dim=4, state_dim=32, groups=1),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.operation)
def test_each_kernel_is_measured_and_sound(case):
    (result,) = measure.measure([case], bandwidth=1e9)
    assert result.sound or case.operation == "quantized_rows"  # MLX's own product on a CPU adds up in 16 bits
    assert result.body == dispatch.body(case.operation)
    assert result.bytes_per_second == pytest.approx(case.bytes / result.seconds)
    assert result.share == pytest.approx(result.bytes_per_second / 1e9)


def test_a_wrong_kernel_is_not_sound(monkeypatch):
    right = paged_attention.paged_attention
    monkeypatch.setattr(paged_attention, "paged_attention", lambda *given, **options: right(*given, **options) * 1.05)
    (result,) = measure.measure(SMALL[:1], bandwidth=1e9)
    assert not result.sound


def test_the_bytes_of_attention_are_those_that_a_window_shows():
    everything = measure.attention("all", 2, 1000, dtype=mx.float16)
    assert everything.bytes == 2 * 2 * 1000 * 8 * 128 * 2
    assert measure.attention("window", 2, 1000, window=100, dtype=mx.float16).bytes == everything.bytes // 10


def test_every_platform_has_cases(monkeypatch):
    for platform, operations in {
        "cpu": {"paged_attention"},
        "metal": {"paged_attention"},
        "cuda": {"paged_attention", "linear_rows", "append_rows", "quantized_rows", "gated_delta", "state_space"},
    }.items():
        monkeypatch.setattr(dispatch, "platform", lambda platform=platform: platform)
        assert {case.operation for case in measure.default_cases()} == operations


def test_the_bandwidth_of_a_copy_is_a_plausible_number():
    assert 1e8 < measure.copy_bandwidth(1 << 24) < 1e14


def test_the_kernel_that_writes_to_the_pools_is_measured_by_what_it_wrote():
    with emulated("cuda", "append_rows"):
        (result,) = measure.measure([measure.appended("small", 2, heads=2, kv_heads=1, head_dim=32)], bandwidth=1e9)
        assert result.body == "cuda"
    assert result.sound
