"""The budget: a formula over a fake device, with every term told when it does not fit."""

import pytest

from metalctl.engine.cache.layout import read_layout
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import OutOfMemoryError
from metalctl.engine.last_rows import LastRows
from metalctl.engine.llm_engine import measured_forward
from metalctl.engine.memory import DeviceMemory, device_memory, plan
from tests.engine.architectures import zoo
from tiny import build

GPU = DeviceMemory("fake", total=100_000_000, available=70_000_000, recommended=80_000_000)
PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32


def of(config: EngineConfig, context=4096, name="llama", device=GPU, weights=10_000_000, forward=2_000_000):
    return plan(read_layout(build(name)), config, context, weights=weights, forward=forward, device=device)


def test_budget_is_the_share_of_the_working_set_less_weights_less_one_forward():
    memory = of(EngineConfig(gpu_memory_utilization=0.5, block_size=16))
    terms = dict(memory.terms)
    assert terms["memory of the device"] == 80_000_000
    assert terms["budget for the cache"] == 40_000_000 - 10_000_000 - 2_000_000
    blocks = 28_000_000 // (PER_TOKEN * 16)
    assert memory.group_limits == (blocks,)
    assert memory.max_model_len == 4096


def test_on_a_cpu_what_is_free_counts_and_the_weights_in_it_are_counted_once():
    cpu = DeviceMemory("cpu", 100_000_000, 50_000_000, 50_000_000)
    terms = dict(of(EngineConfig(gpu_memory_utilization=1.0), device=cpu).terms)
    assert terms["budget for the cache"] == 50_000_000 + 10_000_000 - 10_000_000 - 2_000_000


def test_a_context_that_nobody_asked_for_shrinks_to_what_fits():
    memory = of(EngineConfig(kv_cache_bytes=PER_TOKEN * 16 * 65), context=4096)
    assert memory.max_model_len == 64 * 16


def test_a_context_that_was_asked_for_is_refused_with_the_terms():
    config = EngineConfig(kv_cache_bytes=PER_TOKEN * 16 * 65, max_model_len=2000)
    with pytest.raises(OutOfMemoryError) as caught:
        of(config)
    for term in ("memory of the device", "usable", "weights", "one forward", "budget", "one sequence of 2000 tokens"):
        assert term in caught.value.message
    assert "--max-model-len" in caught.value.hint
    assert caught.value.exit_code == 5


def test_weights_that_leave_nothing_are_refused():
    with pytest.raises(OutOfMemoryError):
        of(EngineConfig(), weights=79_000_000)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2", "gemma4_text", "falcon_h1"])
@pytest.mark.parametrize("budget", [1_000_000, 30_000_000])
def test_the_pools_never_exceed_the_budget_and_use_most_of_it(name, budget):
    layout = read_layout(zoo.build(name))
    config = EngineConfig(kv_cache_bytes=budget, block_size=16, max_num_batched_tokens=32)
    memory = plan(layout, config, 1 << 20, weights=0, forward=0, device=GPU)
    taken = sum(limit * layout.block_bytes(g, 16) for g, limit in enumerate(memory.group_limits))
    taken += memory.slot_limit * layout.slot_bytes
    assert taken <= budget
    if any(group.window is None for group in layout.groups):
        assert taken >= 0.8 * budget


def test_windows_and_shared_layers_are_charged_for_what_they_keep():
    full = read_layout(build("llama", num_hidden_layers=6))
    windowed = read_layout(build("gemma3_text", num_hidden_layers=6))
    config = EngineConfig(kv_cache_bytes=3_000_000, max_num_batched_tokens=32)
    plans = [plan(x, config, 1 << 20, weights=0, forward=0, device=GPU) for x in (full, windowed)]
    assert plans[1].max_model_len > 2 * plans[0].max_model_len


def test_a_forward_is_measured_by_running_it():
    model = build("llama")
    rows = LastRows(model)
    short, long = (measured_forward(model, length, rows) for length in (16, 512))
    assert 0 < short < long
    assert long >= 512 * PER_TOKEN  # its K and V at least


def test_a_second_engine_over_a_model_computes_the_last_position_only_too():
    import mlx.core as mx

    model = build("llama")
    for _ in range(2):
        rows = LastRows(model)
        with rows.only(True):
            assert model(mx.zeros((1, 9), mx.int32)).shape == (1, 1, 128)
        assert model(mx.zeros((1, 9), mx.int32)).shape == (1, 9, 128)


def test_this_machine_has_memory():
    memory = device_memory()
    assert 0 < memory.available <= memory.total
    assert memory.name
