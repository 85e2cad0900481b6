"""A model on the CPU kernels against the same model as mlx-lm runs it, through the engine, for many architectures."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf.constants import GGMLQuantizationType
from mlx.utils import tree_flatten
from mlx_lm.models.llama import TransformerBlock

from metalctl.engine import acceleration, decoder_layers, native_layers, replacing
from metalctl.engine.decoder_layers import DecoderLayer
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.gguf.describe import loaded_bytes
from metalctl.engine.models.gguf.parts import read_headers
from metalctl.engine.models.loader import load
from metalctl.kernels.cpu import library
from tests.engine import tiny
from tests.engine.architectures import matching, zoo
from tests.engine.models.gguf.tiny_models import write
from tests.kernels.cpu_library import built

TOLERANCE = 1e-4  # of the largest logit: float32 summed in another order
COMMON = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3n", "granite", "olmo2", "phi3", "qwen3_moe", "olmoe",
    "deepseek_v3", "gpt_oss", "falcon_h1", "lfm2", "qwen3_next", "smollm3", "cohere2",
)  # fmt: skip
FUSED = {"llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3"}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    library.load(built())
    yield
    library.unload()


def layers_of(model: nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def parameter_bytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def check(name: str) -> nn.Module:
    reference = matching.reference_of(name, zoo.build(name), 6)
    model = zoo.build(name)
    notes = acceleration.accelerate(model)
    assert notes
    engine = matching.engine_of(model)
    results = matching.run(engine, matching.ONE_SHOT, 6)
    engine.scheduler.chunk_size = matching.CHUNK
    results |= matching.run(engine, matching.CHUNKED, 6)
    for request, result in reference.results.items():
        assert results[request].tokens == result.tokens, request
        assert results[request].difference(result) <= max(TOLERANCE, 2 * reference.rounding), request
    return model


@pytest.mark.parametrize("name", [name for name in COMMON if name in zoo.RUNNABLE])
def test_a_model_computes_the_same_on_the_kernels(name: str) -> None:
    model = check(name)
    assert layers_of(model, DecoderLayer) > 0 or name not in FUSED


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.RUNNABLE if name not in COMMON])
def test_every_model_computes_the_same_on_the_kernels(name: str) -> None:
    check(name)


def test_windowed_layers_compute_the_same() -> None:
    for window in (8, 24):
        settings = {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": window,
        }
        plain, fast = (tiny.build("mistral", **settings) for _ in range(2))
        acceleration.accelerate(fast)
        assert layers_of(fast, DecoderLayer) == 3
        expected, _ = tiny.reference(plain, tiny.prompt(61, seed=61), 12)
        engine = matching.engine_of(fast, block_size=16)
        engine.scheduler.chunk_size = 13
        assert matching.run(engine, {"a": (0, 61)}, 12)["a"].tokens == expected


def test_a_request_gets_the_same_bits_alone_and_in_a_batch() -> None:
    model = zoo.build("qwen3")
    nn.quantize(model, group_size=32, bits=4)
    acceleration.accelerate(model)
    requests = {"a": (0, 21), "b": (0, 3), "c": (2, 40)}
    together = matching.run(matching.engine_of(model), requests, 12)
    for name, (_, length) in requests.items():
        alone = matching.run(matching.engine_of(model), {name: (0, length)}, 12)
        assert alone[name].tokens == together[name].tokens
        assert mx.array_equal(alone[name].logits, together[name].logits)


def test_a_prefix_hit_reads_what_the_layers_wrote() -> None:
    model = zoo.build("llama")
    acceleration.accelerate(model)
    engine = matching.engine_of(model, prefix_cache="on")
    first = matching.run(engine, {"a": (0, 40)}, 8)["a"]
    second = matching.run(engine, {"a": (0, 40)}, 8)["a"]
    assert engine.stats().cached_tokens > 0
    assert first.tokens == second.tokens
    assert mx.array_equal(first.logits, second.logits)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_models_compute_in_float32(dtype: mx.Dtype) -> None:
    half, whole = tiny.build("llama"), tiny.build("llama")
    half.set_dtype(dtype)
    whole.update(half.parameters())
    whole.set_dtype(mx.float32)
    acceleration.accelerate(half)
    ids = mx.array([tiny.prompt(30)])
    logits = half(ids)
    assert logits.dtype == mx.float32
    assert replacing.difference(whole(ids), logits) < TOLERANCE


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
def test_quantised_models_stay_close_and_keep_what_cannot_be_packed(bits: int) -> None:
    model, reference = tiny.build("llama"), tiny.build("llama")
    for each in (model, reference):
        nn.quantize(each, group_size=32, bits=bits)
    acceleration.accelerate(model)
    assert (layers_of(model, native_layers.NativeLinear) > 0) == (bits != 3)
    ids = mx.array([tiny.prompt(30)])
    assert replacing.difference(reference(ids), model(ids)) < (1e-5 if bits == 3 else 0.1)


def test_weights_are_held_once() -> None:
    model = tiny.build("llama")
    before = parameter_bytes(model)
    acceleration.accelerate(model)
    assert parameter_bytes(model) <= before * 1.01


def test_a_layer_of_unusual_form_is_left_as_it_is() -> None:
    class Doubled(TransformerBlock):
        def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
            h = x + self.self_attn(self.input_layernorm(x), mask, cache)
            return h + 2 * self.mlp(self.post_attention_layernorm(h))

    model = tiny.build("llama")
    model.model.layers[1].__class__ = Doubled
    ids = mx.array([tiny.prompt(30)])
    expected = model(ids)
    acceleration.accelerate(model)
    assert layers_of(model, DecoderLayer) == 2
    assert replacing.difference(expected, model(ids)) < TOLERANCE


def test_kinds_are_told_apart_by_what_they_compute_and_not_by_their_numbers() -> None:
    model = tiny.build("llama")
    first, second = model.model.layers[:2]
    assert replacing.kind(first) == replacing.kind(second)
    second.input_layernorm.eps *= 2
    assert replacing.kind(first) != replacing.kind(second)
    second.input_layernorm.eps /= 2
    second.mlp.down_proj.weight = second.mlp.down_proj.weight.astype(mx.float16)
    assert replacing.kind(first) != replacing.kind(second)


def test_one_layer_of_a_kind_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    proven = decoder_layers._proven
    monkeypatch.setattr(decoder_layers, "_proven", lambda *args: seen.append(id(args[0])) or proven(*args))
    model = tiny.build("llama")
    model.model.layers[1].self_attn.note = "of another kind"
    acceleration.accelerate(model)
    assert layers_of(model, DecoderLayer) == len(model.model.layers)
    assert len(seen) == 2
    assert id(model.model.layers[1]) in seen


def test_a_weight_that_is_read_or_changed_is_the_layers_own() -> None:
    layer = nn.Linear(64, 32)
    holder = nn.Module()
    holder.layer = layer
    weight, x = layer.weight, mx.random.normal((3, 64))
    acceleration.accelerate(holder)
    assert isinstance(layer, native_layers.NativeLinear)
    assert mx.array_equal(layer.weight, weight)
    layer.weight = 2 * weight
    assert replacing.difference(x @ (2 * weight).T + layer.bias, layer(x)) < TOLERANCE


def test_nothing_happens_without_kernels() -> None:
    library.unload()
    model = tiny.build("llama")
    assert acceleration.accelerate(model) == []
    assert layers_of(model, native_layers.NativeLinear) == 0


def test_without_a_compiler_there_is_one_notice_and_models_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.unload()
    monkeypatch.setenv("PATH", str(tmp_path))
    notices: list[str] = []
    acceleration.prepare(tmp_path / "cache", notices.append)
    assert len(notices) == 1
    assert "no C++ compiler" in notices[0]
    assert "no C++ compiler" in acceleration.status()
    model = tiny.build("llama")
    assert acceleration.accelerate(model) == []
    result = matching.run(matching.engine_of(model), {"a": (0, 21)}, 4)["a"]
    assert len(result.tokens) == 4


def test_nothing_is_compiled_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.unload()
    monkeypatch.setattr("sys.platform", "darwin")
    acceleration.prepare(tmp_path, lambda message: pytest.fail(message))
    assert not library.loaded()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
def test_matrices_of_16_bits_in_a_gguf_are_packed_as_they_are(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write("qwen2", path, kind=lambda name, value: kind if value.ndim > 1 else GGMLQuantizationType.F32)
    checkpoint = Checkpoint(str(path), "gguf", path, (path,))
    packed = load(checkpoint).model
    library.unload()
    plain = load(checkpoint).model
    library.load(built())
    layer = packed.model.layers[0].mlp.down_proj
    assert layer.native.layout.format.name == kind.name
    assert plain.model.layers[0].mlp.down_proj.weight.dtype == mx.float32
    told = loaded_bytes(read_headers([path])[0], "size", 4, halves_stay=True)
    assert told == pytest.approx(parameter_bytes(packed), rel=0.02)
    ids = mx.array([[3, 1, 4, 1, 5]])
    assert replacing.difference(plain(ids), packed(ids)) < TOLERANCE
