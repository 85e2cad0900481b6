"""The self-test of `doctor REF`: sound models pass, and a planted fault is found and named by its layer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from metalctl.engine import parity
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.errors import UnsupportedModelError
from tests.engine import tiny
from tests.engine.architectures import zoo

PROMPTS = [tiny.prompt(length, seed=length) for length in (50, 23, 5)]

# One of each kind of layout: full attention, windows, chunks, MLA, shared keys and values, several streams, states of
# each family, mlx-lm's own objects, and a model that is stepped row by row.
KINDS = ["llama", "gemma2", "gemma3_text", "llama4", "deepseek_v3", "gemma3n", "mamba2", "qwen3_next", "falcon_h1"]


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def check(name: str) -> parity.Parity:
    return parity.check(zoo.build(name), PROMPTS)


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_model_passes(name: str) -> None:
    result = check(name)
    assert result.difference is None and result.consistent
    assert result.tokens == sum(map(len, PROMPTS)) + len(PROMPTS) * parity.STEPS
    assert result.relative <= result.allowed == 1e-4
    assert result.agreeing == result.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(zoo.CONFIGS.keys() - zoo.REFUSED.keys() - zoo.REPAIRED.keys()))
def test_every_architecture_passes(name: str) -> None:
    result = check(name)
    assert result.difference is None and result.consistent


def test_a_model_that_contradicts_itself_is_told_from_a_fault() -> None:
    result = check("plamo3")  # mlx-lm's own cache keeps one token less than its masks let a prompt see
    assert not result.consistent and result.difference is None


def test_a_model_that_the_engine_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        check("phi3small")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[CacheSet], None]], None]:
    """Spoil the caches that the paged forward under test is given, and no others."""

    def spoil(fault: Callable[[CacheSet], None]) -> None:
        class Spoilt(CacheSet):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                fault(self)

        monkeypatch.setattr(parity, "CacheSet", Spoilt)

    return spoil


def layer_of(name: str) -> tuple[int | None, str]:
    found = check(name).difference
    assert found is not None
    assert not found.relative <= found.allowed
    return found.layer, found.kind


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_keys_that_are_not_written_are_found_in_their_layer(plant: Any, layer: int) -> None:
    def fault(caches: CacheSet) -> None:
        cache = caches.kv[layer]
        write = cache.update_and_fetch
        cache.update_and_fetch = lambda keys, values: write(mx.zeros_like(keys), values)  # type: ignore[method-assign]

    plant(fault)
    assert layer_of("llama") == (layer, "TransformerBlock")


def test_a_fault_that_only_a_batch_meets_is_found(plant: Any) -> None:
    def fault(caches: CacheSet) -> None:
        cache = caches.kv[1]
        make_mask = cache.make_mask

        def blind(N: int, **named: Any) -> Any:
            mask = make_mask(N, **named)
            return mx.ones_like(mask) if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and N == 1 else mask

        for each in caches.kv:  # a model asks one of its layers for the mask of all
            each.make_mask = blind  # type: ignore[method-assign]

    plant(fault)
    found = check("qwen3").difference
    assert found is not None and found.layer == 0
    assert found.token >= len(PROMPTS[found.prompt])


def test_a_window_that_is_short_by_one_is_found_in_the_first_layer_with_a_window(plant: Any) -> None:
    def fault(caches: CacheSet) -> None:
        cache = caches.kv[0]  # which Gemma 3 asks for the mask of all its windows
        make_mask = cache.make_mask

        def short(N: int, **named: Any) -> Any:
            mask = make_mask(N, **named)
            if N == 1 or not isinstance(mask, mx.array):
                return mask
            oldest = mx.arange(mask.shape[-1])[None] == mx.argmax(mask, axis=-1)[:, None]
            return mask & ~oldest

        cache.make_mask = short  # type: ignore[method-assign]

    plant(fault)
    assert layer_of("gemma3_text") == (0, "TransformerBlock")


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_state_that_is_lost_is_found_in_its_layer(plant: Any, name: str, layer: int) -> None:
    def fault(caches: CacheSet) -> None:
        state = caches.states[layer]
        state.end = lambda: None  # type: ignore[method-assign]

    plant(fault)
    assert layer_of(name)[0] == layer


def test_an_attention_layer_among_recurrent_ones_is_named_by_its_place_in_the_model(plant: Any) -> None:
    def fault(caches: CacheSet) -> None:
        write = caches.kv[0].update_and_fetch
        caches.kv[0].update_and_fetch = lambda keys, values: write(keys * mx.nan, values)  # type: ignore[method-assign]

    plant(fault)
    layers = zoo.build("qwen3_next").layers
    attention = next(index for index, layer in enumerate(layers) if not layer.is_linear)
    assert attention > 0
    assert layer_of("qwen3_next") == (attention, type(layers[0]).__name__)


def test_a_position_that_is_wrong_in_a_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(CacheSet):
        def call(self, model: Any, tokens: mx.array, step: Any) -> mx.array:
            return super().call(model, tokens, replace(step, offset=step.offset + 1) if step.is_batch else step)

    monkeypatch.setattr(parity, "CacheSet", Late)
    assert layer_of("llama")[0] == 0


def test_a_fault_behind_the_layers_is_said_to_be_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Louder(CacheSet):
        def call(self, *arguments: Any) -> mx.array:
            return super().call(*arguments) * 1.01

    monkeypatch.setattr(parity, "CacheSet", Louder)
    found = check("llama").difference
    assert found is not None and (found.layer, found.kind) == (None, "logits")
    assert found.relative == pytest.approx(0.01, rel=1e-2)


def test_the_model_is_left_as_it_was(plant: Any) -> None:
    model = zoo.build("llama")
    kinds = [type(layer) for layer in model.layers]
    parity.check(model, PROMPTS)
    assert [type(layer) for layer in model.layers] == kinds

    def fail(_: CacheSet) -> None:
        raise RuntimeError("planted")

    plant(fail)
    with pytest.raises(RuntimeError, match="planted"):
        parity.check(model, PROMPTS)
    assert [type(layer) for layer in model.layers] == kinds
