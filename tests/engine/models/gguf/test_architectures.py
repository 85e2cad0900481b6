"""Every architecture: a tiny model of mlx-lm, written as llama.cpp's converter would, loads with the same logits."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.loader import load
from tests.engine.models.gguf.tiny_models import CASES, write

TOKENS = [(7 * index * index + 3) % 288 for index in range(40)]


@pytest.mark.parametrize("case", CASES)
def test_round_trip_has_the_same_logits(case: str, tmp_path: Path) -> None:
    path = tmp_path / f"{case}.gguf"
    original = write(case, path)
    loaded = load(Checkpoint(str(path), "gguf", path, (path,)), dtype=mx.float32)
    tokens = mx.array([TOKENS])
    expected, found = np.array(original(tokens)), np.array(loaded.model(tokens))
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
