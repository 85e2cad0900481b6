"""A fast BLAS under MLX's CPU backend.

MLX's Linux CPU wheel brings the reference BLAS. An OpenBLAS with the plain `cblas_` names that is loaded globally
before MLX is imported takes its place, for every product that MLX itself computes in float32.
"""

import ctypes
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from metalctl.kernels.cores import usable_cores

# A system's own first: it is as a rule newer than the one that a package bundles.
_SYSTEM = ("libopenblas.so.0", "libopenblas.so")
_BUNDLED = ("opencv_python*.libs/libopenblas*.so*", "opencv_contrib_python*.libs/libopenblas*.so*")
_ROW_MAJOR, _NO_TRANSPOSE = 101, 111

_active: str | None = None


def active() -> str | None:
    """What `preload` has loaded in this process."""
    return _active


def preload() -> str | None:
    """Load an OpenBLAS for MLX to use; returns its version and file, or None where there is none to load.

    Must be called before anything imports `mlx.core`, and does nothing afterwards. Does nothing either on a Mac or
    where MLX's CPU wheel is not installed. A library that multiplies wrongly on this machine is left out.
    """
    global _active
    if sys.platform != "linux" or "mlx.core" in sys.modules or not _is_cpu_wheel():
        return None
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_LOCAL)
        except OSError:
            continue
        if hasattr(library, "cblas_sgemm") and multiplies_rightly(library):
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            if hasattr(library, "openblas_set_num_threads"):
                library.openblas_set_num_threads(usable_cores())
            _active = f"{_version(library)} ({candidate})"
            return _active
    return None


def multiplies_rightly(library: ctypes.CDLL, size: int = 48) -> bool:
    """Whether `cblas_sgemm` gets a product of small whole numbers exactly: some builds do not on newer processors."""
    count = size * size
    a = [float((i * 7) % 5 - 2) for i in range(count)]
    b = [float((i * 3) % 7 - 3) for i in range(count)]
    result = (ctypes.c_float * count)()
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    library.cblas_sgemm(
        _ROW_MAJOR, _NO_TRANSPOSE, _NO_TRANSPOSE, size, size, size,
        one, (ctypes.c_float * count)(*a), size, (ctypes.c_float * count)(*b), size, zero, result, size,
    )  # fmt: skip
    columns = [b[j::size] for j in range(size)]
    rows = (a[i * size : (i + 1) * size] for i in range(size))
    expected = (sum(x * y for x, y in zip(row, column, strict=True)) for row in rows for column in columns)
    return all(x == y for x, y in zip(result, expected, strict=True))


def _is_cpu_wheel() -> bool:
    spec = find_spec("mlx")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder).parent / "mlx_cpu.libs").is_dir() for folder in folders or ())


def _candidates() -> Iterator[str]:
    yield from _SYSTEM
    for folder in dict.fromkeys(filter(None, sys.path)):
        for pattern in _BUNDLED:
            yield from sorted(map(str, Path(folder).glob(pattern)))


def _version(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_config"):
        return "BLAS"
    library.openblas_get_config.restype = ctypes.c_char_p
    words = library.openblas_get_config().decode().split()
    return " ".join(words[:2])
