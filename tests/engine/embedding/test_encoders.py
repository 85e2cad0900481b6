"""The modules against what the transformers library computes from the same weights."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.embedding.decoder import hidden_of, load_decoder
from metalctl.engine.embedding.weights import load_encoder
from metalctl.engine.errors import CheckpointError, UnsupportedModelError

from . import tiny_checkpoints as tiny

REFERENCE = np.load(tiny.HERE / "references" / "tiny.npz")
ENCODERS = [name for name in tiny.CONFIGS if name not in ("embeddinggemma", "qwen3")]
CLOSE = 2e-5


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def batch() -> tuple[mx.array, mx.array, mx.array]:
    ids, present = tiny.inputs()
    return mx.array(ids), mx.zeros(ids.shape, mx.int32), mx.array(present)


@pytest.mark.parametrize("name", [name for name in ENCODERS if not name.endswith("cross")])
def test_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, name, tiny.shapes(name))
    encoder = load_encoder([folder / "model.safetensors"], config_of(folder), name)
    ids, types, present = batch()
    states = np.array(encoder(ids, types, present))[np.array(present)]
    assert np.abs(states - REFERENCE[name]).max() < CLOSE


@pytest.mark.parametrize("name", [name for name in ENCODERS if not name.endswith("cross")])
def test_a_padded_batch_equals_each_text_alone(name: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, name, tiny.shapes(name))
    encoder = load_encoder([folder / "model.safetensors"], config_of(folder), name)
    ids, types, present = batch()
    together = np.array(encoder(ids, types, present))
    for row, length in enumerate(tiny.LENGTHS):
        alone = np.array(encoder(ids[row : row + 1, :length], types[row : row + 1, :length], None))
        assert np.abs(together[row, :length] - alone[0]).max() < CLOSE


@pytest.mark.parametrize("name", [name for name in ENCODERS if name.endswith("cross")])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, name, tiny.shapes(name))
    encoder = load_encoder([folder / "model.safetensors"], config_of(folder), name)
    assert np.abs(np.array(encoder.classify(*batch())) - REFERENCE[name]).max() < CLOSE


@pytest.mark.parametrize("name", ["embeddinggemma", "qwen3"])
def test_states_of_decoders_without_their_first_name_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, name, tiny.shapes(name))
    assert not any(tensor.startswith("model.") for tensor in tiny.shapes(name))
    model, config = load_decoder(folder, name)
    ids, types, present = batch()
    states = np.array(hidden_of(model, config)(ids, types, present))[np.array(present)]
    assert np.abs(states - REFERENCE[name]).max() < CLOSE


def test_a_decoder_with_full_names_is_the_same(tmp_path: Path) -> None:
    short = tiny.write(tmp_path / "short", "qwen3", tiny.shapes("qwen3"))
    model, config = load_decoder(short, "short")
    long = tmp_path / "long"
    long.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (long / name).write_text((short / name).read_text())
    arrays = {f"model.{name}": mx.array(value) for name, value in tiny.weights(tiny.shapes("qwen3")).items()}
    mx.save_safetensors(str(long / "model.safetensors"), arrays)
    other, _ = load_decoder(long, "long")
    ids, types, _ = batch()
    assert mx.array_equal(hidden_of(model, config)(ids, types, None), hidden_of(other, config)(ids, types, None))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    shapes = tiny.shapes("bert")
    del shapes["encoder.layer.1.output.dense.bias"]
    folder = tiny.write(tmp_path, "bert", shapes)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.bias"):
        load_encoder([folder / "model.safetensors"], config_of(folder), "it")


def test_a_strange_tensor_is_named(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bert", {**tiny.shapes("bert"), "encoder.layer.0.adapter.weight": [2, 2]})
    with pytest.raises(UnsupportedModelError, match=r"encoder\.layer\.0\.adapter\.weight"):
        load_encoder([folder / "model.safetensors"], config_of(folder), "it")


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bert", {**tiny.shapes("bert"), "embeddings.LayerNorm.weight": [31]})
    with pytest.raises(CheckpointError, match=r"embeddings\.norm\.weight is \(31,\)"):
        load_encoder([folder / "model.safetensors"], config_of(folder), "it")


def test_names_of_older_files_and_prefixes_are_understood(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bert", tiny.shapes("bert"))
    arrays = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in mx.load(str(folder / "model.safetensors")).items()
    }
    assert any(name.endswith("gamma") for name in arrays)
    mx.save_safetensors(str(folder / "old.safetensors"), arrays)
    encoder = load_encoder([folder / "old.safetensors"], config_of(folder), "old")
    ids, types, present = batch()
    assert np.abs(np.array(encoder(ids, types, present))[np.array(present)] - REFERENCE["bert"]).max() < CLOSE


def test_weights_quantised_by_mlx_are_loaded(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bert", tiny.shapes("bert"))
    arrays = dict(mx.load(str(folder / "model.safetensors")))
    quantised: dict[str, mx.array] = {}
    for name, array in arrays.items():
        if name.endswith(".weight") and "encoder" in name and array.ndim == 2 and array.shape[-1] % 32 == 0:
            parts = mx.quantize(array, group_size=32, bits=8)
            quantised.update(zip((name, name[:-6] + "scales", name[:-6] + "biases"), parts, strict=True))
        else:
            quantised[name] = array
    mx.save_safetensors(str(folder / "q.safetensors"), quantised)
    config = {**config_of(folder), "quantization": {"group_size": 32, "bits": 8}}
    encoder = load_encoder([folder / "q.safetensors"], config, "q")
    ids, types, present = batch()
    states = np.array(encoder(ids, types, present))[np.array(present)]
    assert 0 < np.abs(states - REFERENCE["bert"]).max() < 0.1


def test_an_unknown_encoder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="deberta"):
        load_encoder([], {"model_type": "deberta"}, "it")
