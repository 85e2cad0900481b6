"""Every architecture of mlx-lm matches the model run by itself, or is refused by name."""

from collections.abc import Iterator
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
import pytest

from metalctl.engine.cache.layout import OwnLayer
from metalctl.engine.errors import UnsupportedModelError
from metalctl.engine.llm_engine import LLMEngine
from metalctl.kernels import dispatch
from tests.engine.architectures import matching, table, zoo

INSTALLED = set(zoo.modules())
NAMES = [name for name in zoo.RUNNABLE if zoo.module_of(name) in INSTALLED]


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    """MLX compiles each fused function for a second or so, which is most of the time for models as small as these."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("name", NAMES)
def test_architecture_matches(name: str) -> None:
    model = zoo.build(name)
    reference = matching.reference_of(name, model)
    engine = matching.engine_of(model)
    assert matching.mismatches(matching.engine_results(engine), reference) == []
    assert_memory_is_accounted_for(engine)
    if any(group.window for group in engine.layout.groups):
        assert mismatches_as_on_a_gpu(model, reference) == []
    assert table.row(name, engine) in table.rows(), f"run: python -m {table.__name__}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_architecture_matches_as_on_a_gpu(name: str) -> None:
    model = zoo.build(name)
    reference = matching.reference_of(name, model)
    assert mismatches_as_on_a_gpu(model, reference) == []


@pytest.mark.parametrize("name", sorted(zoo.REFUSED.keys() & INSTALLED))
def test_architecture_is_refused_with_a_reason(name: str) -> None:
    model = zoo.build(name)
    with pytest.raises(UnsupportedModelError) as refusal:
        matching.engine_of(model)
    assert f"mlx-lm's code for {name}" in refusal.value.message and refusal.value.hint
    assert table.refused_row(name) in table.rows(), f"run: python -m {table.__name__}"


@pytest.mark.parametrize("name", sorted((zoo.REFUSED.keys() | zoo.REPAIRED.keys()) & INSTALLED))
def test_what_is_refused_or_repaired_fails_in_mlx_lm_itself(name: str) -> None:
    model = zoo.build(name)
    prompt = matching.tiny.prompt(21)
    try:
        whole, cut = (matching.Result(*matching.tiny.reference(model, prompt, 4, chunk)) for chunk in (None, 7))
    except (RuntimeError, ValueError):
        return
    assert whole.difference(cut) > 0.1


def test_every_architecture_of_mlx_lm_is_in_the_table() -> None:
    missing = INSTALLED - {zoo.module_of(name) for name in zoo.CONFIGS}
    if missing and version("mlx-lm") != table.documented_version():
        pytest.skip(f"mlx-lm {version('mlx-lm')} has architectures that are not described yet: {sorted(missing)}")
    assert not missing
    assert len(table.rows()) == len(zoo.CONFIGS)
    if version("mlx-lm") == table.documented_version():
        assert table.PAGE.read_text(encoding="utf-8").startswith(table.introduction())


def mismatches_as_on_a_gpu(model: nn.Module, reference: matching.Reference) -> list[str]:
    """With attention straight from the pools, and the decode step padded to the shapes that are compiled."""
    with dispatch.forced("paged_attention", "reference"):
        return matching.mismatches(
            matching.engine_results(matching.engine_of(model, compile_decode=True, batch_prefill=True)), reference
        )


def assert_memory_is_accounted_for(engine: LLMEngine) -> None:
    """Bytes charged equal bytes allocated, and nothing is held once all requests have ended."""
    blocks, layout, size = engine.blocks, engine.layout, engine.config.block_size
    assert all(pool.num_used == 0 for pool in (*blocks.pools, *([blocks.states] if blocks.states else [])))
    if any(isinstance(leaf, OwnLayer) for leaf in layout.leaves):
        return
    charged = sum(layout.block_bytes(group, size) * pool.capacity for group, pool in enumerate(blocks.pools))
    if blocks.states is not None:
        charged += layout.slot_bytes * blocks.states.capacity
    assert engine.runner.caches.nbytes == charged
