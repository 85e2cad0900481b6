"""Tensors become MLX's arrays part by part."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from mlx.utils import tree_flatten

from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.gguf import quants, weights
from metalctl.engine.models.gguf.parts import read_headers
from metalctl.engine.models.loader import load
from tests.engine.models.gguf.tiny_models import write


def matrices(name: str, value: np.ndarray) -> GGMLQuantizationType:
    small = value.ndim == 1 or value.shape[-1] % 32
    return GGMLQuantizationType.F32 if small else GGMLQuantizationType.Q5_1


@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen35moe", "granitehybrid"])
def test_parts_of_any_size_make_the_same_arrays(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    write(case, path, kind=matrices)
    checkpoint = Checkpoint(str(path), "gguf", path, (path,))
    whole = dict(tree_flatten(load(checkpoint).model.parameters()))
    monkeypatch.setattr(quants, "VALUES_AT_ONCE", 300)
    monkeypatch.setattr(quants, "MOST_AHEAD", 3)
    parts = dict(tree_flatten(load(checkpoint).model.parameters()))
    assert parts.keys() == whole.keys()
    assert any(name.endswith(".scales") for name in parts)
    for name, array in parts.items():
        assert mx.array_equal(array, whole[name]), name


def test_each_part_of_a_module_is_ready_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write("qwen2", path, kind=matrices)
    header = read_headers([path])[0]
    model = weights.build_model(header, [(path, header)], mx.float32, "size")
    shapes = {name: array.shape for name, array in tree_flatten(model.module.parameters())}
    ready = []
    for part in model.filling:
        assert all(mx.isfinite(array).all() for array in part.values() if isinstance(array, mx.array))
        ready.append(id(part))
    holders = [module for module in model.module.modules() if any(isinstance(x, mx.array) for x in module.values())]
    assert sorted(ready) == sorted(map(id, holders))
    assert {name: array.shape for name, array in tree_flatten(model.module.parameters())} == shapes


def test_parts_are_put_in_place_without_copies_of_the_whole() -> None:
    part = {"weight": mx.ones((64, 4096), mx.uint32), "scales": mx.ones((64, 1024))}
    size = 32 * sum(array.nbytes for array in part.values())
    mx.eval(part)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    whole = weights._assembled((part for _ in range(32)), 32 * 64)
    assert mx.get_active_memory() - before >= size
    assert mx.get_peak_memory() - before < 1.3 * size
    assert mx.array_equal(whole["weight"], mx.ones((2048, 4096), mx.uint32))
