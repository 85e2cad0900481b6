"""The compiled CPU kernels for tests: built once for the machine, and tried with every instruction set that it has."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import platformdirs
import pytest

from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.build import COMPILERS, build

ISAS = ("baseline", "avx2", "avx512", "avx512-vnni")  # each processor that has one has those before it


def require_compiler() -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("MLX computes on a GPU here")
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")


def built() -> Path:
    require_compiler()
    return build(Path(platformdirs.user_cache_dir("metalctl", appauthor=False)) / "kernels", print, every=True).library


def each_isa(isa: str) -> Iterator[str]:
    """The kernels for `isa`, while the caller runs; none afterwards, so that other tests see plain MLX."""
    path = built()
    library.load(path)
    best = library.description().split(",")[0]
    try:
        if isa not in ISAS[: ISAS.index(best) + 1]:
            pytest.skip(f"this processor has no {isa}")
        library.load(path, isa)
        yield isa
    finally:
        library.unload()
