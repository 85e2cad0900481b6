"""Checkpoints become models that run; what cannot is refused by name before anything large is allocated."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from metalctl.engine.errors import CheckpointError, MetalctlError, OutOfMemoryError, UnsupportedModelError
from metalctl.engine.memory import DeviceMemory
from metalctl.engine.models import loader
from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel
from metalctl.engine.models.gguf.describe import loaded_bytes
from metalctl.engine.models.gguf.reader import read_file_header
from metalctl.engine.models.loader import load
from tests.engine.models.gguf.tiny_configs import CONFIGS, LONG
from tests.engine.models.gguf.tiny_models import METADATA, write
from tests.engine.models.gguf.writer import byte_alphabet, tiny_model, write_gguf

TOKENS = mx.array([[1, 5, 9, 200, 40, 41, 42, 7]])
Type = GGMLQuantizationType


def load_file(path: Path, **options: Any) -> LoadedModel:
    return load(Checkpoint(str(path), "gguf", path, (path,)), **options)


def write_llama(path: Path, metadata: dict[str, Any] | None = None, **options: Any) -> None:
    config = {**CONFIGS["llama"], "tie_word_embeddings": options.pop("tied", False)}
    write_gguf(path, "llama", config, tiny_model(config), {**METADATA["llama"], **(metadata or {})}, **options)


def test_everything_comes_from_the_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", {"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
    loaded = load_file(tmp_path / "x.gguf")
    assert loaded.context_length == 512
    assert loaded.config["model_type"] == "llama"
    assert loaded.config["tie_word_embeddings"] is False
    assert loaded.generation_defaults == {"temperature": pytest.approx(0.6), "top_k": 20}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the end")) == "the end"
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])[0] == 256


def test_tied_embeddings_need_no_output_matrix(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", tied=True)
    loaded = load_file(tmp_path / "x.gguf")
    assert loaded.config["tie_word_embeddings"] is True
    assert "lm_head" not in loaded.model


def matrices(kind: GGMLQuantizationType) -> Callable[[str, np.ndarray], GGMLQuantizationType]:
    return lambda name, value: kind if value.ndim > 1 and value.shape[-1] % 32 == 0 else Type.F32


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q5_0, Type.Q8_0, Type.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", ["llama", "mixtral", "phi3", "qwen35moe", "gpt-oss"])
def test_quantised_file_has_the_logits_of_its_dequantised_values(
    case: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    write(case, tmp_path / "q.gguf", kind=matrices(kind))
    loaded = load_file(tmp_path / "q.gguf", dtype=mx.float32)
    packed = {name for name, _ in tree_flatten(loaded.model.parameters()) if name.endswith(".scales")}
    assert len(packed) >= 8
    write(case, tmp_path / "f.gguf", values=lambda name, value: _rounded(value, matrices(kind)(name, value)))
    expected = np.array(load_file(tmp_path / "f.gguf", dtype=mx.float32).model(TOKENS))
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), expected, atol=1e-4 * np.abs(expected).max())


def _rounded(value: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    value = np.ascontiguousarray(value)
    return value if kind == Type.F32 else gguf.dequantize(gguf.quantize(value, kind), kind)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_sixteen_bit_files_load_in_the_wanted_type(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", kind=matrices(kind))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        loaded = load_file(tmp_path / "x.gguf", dtype=dtype)
        assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {dtype}
        assert np.isfinite(np.array(loaded.model(TOKENS).astype(mx.float32))).all()


def test_quantised_weights_follow_the_wanted_type(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", kind=matrices(Type.Q4_1))
    loaded = load_file(tmp_path / "x.gguf", dtype=mx.bfloat16)
    kinds = {name.rsplit(".", 1)[-1]: array.dtype for name, array in tree_flatten(loaded.model.parameters())}
    assert kinds["scales"] == kinds["biases"] == mx.bfloat16


def test_processor_computes_in_float32_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "x.gguf", kind=matrices(Type.F16))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    loaded = load_file(tmp_path / "x.gguf")
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}


def test_mixed_file_keeps_each_tensors_own_type(tmp_path: Path) -> None:
    kinds = {"attn": Type.Q4_0, "ffn_down": Type.Q8_0, "ffn_up": Type.Q5_1}

    def mixed(name: str, value: np.ndarray) -> GGMLQuantizationType:
        found = next((kind for part, kind in kinds.items() if part in name), Type.F16)
        return matrices(found)(name, value)

    write_llama(tmp_path / "x.gguf", kind=mixed)
    layer = load_file(tmp_path / "x.gguf").model.layers[0]
    assert (layer.self_attn.q_proj.bits, layer.mlp.down_proj.bits, layer.mlp.up_proj.bits) == (4, 8, 5)
    assert not hasattr(layer.mlp.gate_proj, "bits")


def test_llama3_frequencies_come_from_their_tensor(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 1.5, 3, 8, 8, 8], np.float32)
    write_llama(tmp_path / "x.gguf", extra={"rope_freqs.weight": factors})
    rope = load_file(tmp_path / "x.gguf").model.layers[1].self_attn.rope
    expected = 10000.0 ** (np.arange(0, 16, 2) / 16) * factors
    np.testing.assert_allclose(np.array(rope._freqs), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none"}, None),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_scaling_of_positions_is_read(keys: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", keys)
    assert load_file(tmp_path / "x.gguf").config["rope_scaling"] == expected


def test_longrope_factors_come_from_their_tensors(tmp_path: Path) -> None:
    long, short = np.linspace(1, 4, 8, dtype=np.float32), np.ones(8, np.float32)
    keys = {**METADATA["phi3"], "rope.scaling.original_context_length": 128}
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    write_gguf(tmp_path / "x.gguf", "phi3", CONFIGS["phi3"], tiny_model(CONFIGS["phi3"]), keys, extra=extra)
    loaded = load_file(tmp_path / "x.gguf")
    assert loaded.config["rope_scaling"]["long_factor"] == pytest.approx(long.tolist())
    assert loaded.config["original_max_position_embeddings"] == 128
    rope = loaded.model.layers[0].self_attn.rope
    np.testing.assert_allclose(np.array(rope._freqs), 10000.0 ** (np.arange(0, 16, 2) / 16) * long, rtol=1e-5)


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    keys = {**METADATA["qwen35"], "block_count": 5, "nextn_predict_layers": 1}
    extra = {f"blk.4.{name}.weight": np.zeros((64, 128), np.float32) for name in ("nextn.eh_proj", "attn_q")}
    model = tiny_model(CONFIGS["qwen35"])
    write_gguf(tmp_path / "x.gguf", "qwen35", CONFIGS["qwen35"], model, keys, extra=extra)
    loaded = load_file(tmp_path / "x.gguf")
    assert loaded.config["num_hidden_layers"] == 4
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), np.array(model(TOKENS)), atol=2e-5)


def test_experts_with_both_projections_in_one_tensor_are_cut(tmp_path: Path) -> None:
    write("qwen3moe", tmp_path / "two.gguf")
    expected = np.array(load_file(tmp_path / "two.gguf").model(TOKENS))

    reader = gguf.GGUFReader(tmp_path / "two.gguf")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    fused = {}
    for layer in range(3):
        pair = [tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
        fused[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(pair, axis=1)
    config = CONFIGS["qwen3moe"]
    drop = tuple(f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(3) for part in ("gate", "up"))
    write_gguf(
        tmp_path / "one.gguf", "qwen3moe", config, tiny_model(config), METADATA["qwen3moe"], extra=fused, drop=drop
    )
    found = np.array(load_file(tmp_path / "one.gguf").model(TOKENS))
    np.testing.assert_array_equal(found, expected)


def test_short_rotary_factors_are_used_where_no_sequence_gets_long(tmp_path: Path) -> None:
    write("phi3-long", tmp_path / "x.gguf")
    for longest, factors in ((128, [1.0] * 8), (129, LONG), (None, LONG)):
        config = load_file(tmp_path / "x.gguf", max_model_len=longest).config
        assert config["rope_scaling"]["long_factor"] == factors


def refused(path: Path, error: type[MetalctlError] = CheckpointError, **options: Any) -> str:
    before = mx.get_active_memory()
    with pytest.raises(error) as caught:
        load_file(path, **options)
    assert mx.get_active_memory() <= before + 4096
    return caught.value.message


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "petals")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "'petals'" in refused(tmp_path / "x.gguf", UnsupportedModelError)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", {"block_count": 4})
    assert "model.layers.3" in refused(tmp_path / "x.gguf")


def test_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", extra={"blk.0.mystery.weight": np.zeros((2, 32), np.float32)})
    assert "'blk.0.mystery.weight'" in refused(tmp_path / "x.gguf", UnsupportedModelError)
    write_llama(tmp_path / "y.gguf", {"block_count": 2})
    assert "blk.2." in refused(tmp_path / "y.gguf", UnsupportedModelError)


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", extra={"blk.1.ffn_up.weight": np.zeros((96, 32), np.float32)})
    message = refused(tmp_path / "x.gguf")
    assert "'blk.1.ffn_up.weight' has the shape (96, 32); (96, 64)" in message


def test_transposed_matrix_is_not_taken_for_the_right_one(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", extra={"blk.1.ffn_up.weight": np.zeros((64, 96), np.float32)})
    assert "(64, 96)" in refused(tmp_path / "x.gguf")


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    keys = {key: value for key, value in METADATA["llama"].items() if key != "attention.head_count"}
    write_gguf(tmp_path / "x.gguf", "llama", config, tiny_model(config), keys)
    assert "llama.attention.head_count" in refused(tmp_path / "x.gguf")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_llama(path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short" in refused(path)


def test_model_that_is_too_large_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "x.gguf")
    small = DeviceMemory("a pocket calculator", 10**6, 4 * 10**5, 4 * 10**5)
    monkeypatch.setattr(loader, "device_memory", lambda: small)
    message = refused(tmp_path / "x.gguf", OutOfMemoryError)
    assert "0.0 GB can be used on a pocket calculator" in message
    with pytest.raises(OutOfMemoryError):
        load(folder(tmp_path / "m"))


def test_loaded_size_is_told_before(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf", kind=matrices(Type.Q4_1))
    told = loaded_bytes(read_file_header(tmp_path / "x.gguf"), "size", 4)
    model = load_file(tmp_path / "x.gguf", dtype=mx.float32).model
    found = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert told == pytest.approx(found, rel=0.01)


def test_fingerprint_names_the_weights(tmp_path: Path) -> None:
    write_llama(tmp_path / "x.gguf")
    first = load_file(tmp_path / "x.gguf", dtype=mx.float32).fingerprint
    assert load_file(tmp_path / "x.gguf", dtype=mx.float32).fingerprint == first
    assert load_file(tmp_path / "x.gguf", dtype=mx.float16).fingerprint != first
    write_llama(tmp_path / "x.gguf", {"block_count": 3})
    assert load_file(tmp_path / "x.gguf", dtype=mx.float32).fingerprint != first


# Checkpoint folders


def folder(path: Path, **config: Any) -> Checkpoint:
    path.mkdir(exist_ok=True)
    model = tiny_model(CONFIGS["llama"])
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "eos_token_id": 257, **config}))
    backend = Backend(BPE({character: index for index, character in enumerate(byte_alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Checkpoint(str(path), "mlx", path, tuple(path.iterdir()))


def test_folder_loads_with_its_tokenizer_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": [257, 3]}))
    loaded = load(folder(tmp_path / "m"))
    expected = np.array(tiny_model(CONFIGS["llama"])(TOKENS))
    np.testing.assert_array_equal(np.array(loaded.model(TOKENS)), expected)
    assert loaded.context_length == 512
    assert loaded.generation_defaults["temperature"] == 0.7
    assert loaded.tokenizer.eos_token_ids == {257, 3}
    assert loaded.tokenizer.decode(loaded.tokenizer.apply_chat_template([{"role": "user", "content": "é"}])) == "é"


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m", model_file="model.py")
    marker = tmp_path / "ran"
    (tmp_path / "m" / "model.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    )
    with pytest.raises(UnsupportedModelError, match=r"model\.py") as caught:
        load(checkpoint)
    assert "--trust-remote-code" in (caught.value.hint or "")
    assert not marker.exists()
    load(checkpoint, trust_remote_code=True)
    assert marker.exists()


def test_model_that_exists_only_as_code_is_refused(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m", model_type="homemade", auto_map={"AutoModel": "modeling.Model"})
    with pytest.raises(UnsupportedModelError, match=r"'homemade', and the checkpoint's own code \(auto_map\)"):
        load(checkpoint)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickles \(pytorch_model\.bin\)"):
        load(checkpoint)


def test_folder_without_weights_config_or_tokenizer_says_so(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="no weights"):
        load(checkpoint)
    shutil.move(tmp_path / "kept", tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load(checkpoint)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(checkpoint)


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(checkpoint)


def test_turn_ends_of_the_template_end_answers_too(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m", eos_token_id=5)
    settings = {"eos_token": "!", "chat_template": "{{ messages[0].content }}<|im_end|>"}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load(checkpoint)
    assert loaded.tokenizer.eos_token_ids == {5, 257, loaded.tokenizer.backend.token_to_id("!")}


def test_named_templates_come_from_fields_and_files(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "m")
    named = [{"name": "default", "template": "field"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "m" / "chat_template.jinja").write_text("file")
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "rag.jinja").write_text("rag")
    templates = load(checkpoint).tokenizer.chat_templates
    assert templates.names == ["default", "rag", "tool_use"]
    assert templates.render([]) == "file"
