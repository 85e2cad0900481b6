"""Encoders on the CPU kernels give what they give on MLX alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.embedding.native import NativeAttention, NativeMLP, accelerate_encoder
from metalctl.engine.embedding.weights import load_encoder
from tests.kernels.cpu_library import ISAS, built, each_isa

from . import tiny_checkpoints as tiny

REFERENCE = np.load(tiny.HERE / "references" / "tiny.npz")


@pytest.fixture(params=ISAS[-1:])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    built()
    yield from each_isa(request.param)


@pytest.mark.parametrize("name", ["bert", "bert-tanh-gelu", "xlm-roberta", "modernbert", "nomic-bert"])
def test_states_stay_those_of_transformers(kernels: str, name: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, name, tiny.shapes(name))
    encoder = load_encoder([folder / "model.safetensors"], json.loads((folder / "config.json").read_text()), name)
    assert "linear layers" in accelerate_encoder(encoder)[0]
    assert all(isinstance(layer.attention, NativeAttention) for layer in encoder.layers)
    assert isinstance(encoder.layers[0].mlp, NativeMLP) == (name in ("bert", "bert-tanh-gelu", "xlm-roberta"))
    ids, present = tiny.inputs()
    for _ in range(3):  # the first passes show which layers are given the same array
        states = encoder(mx.array(ids), mx.zeros(ids.shape, mx.int32), mx.array(present))
        assert np.abs(np.array(states)[present] - REFERENCE[name]).max() < 5e-5
