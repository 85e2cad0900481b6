import ctypes
import subprocess
import sys

import pytest

from metalctl.kernels import blas
from metalctl.kernels.cores import cgroup_quota, usable_cores

PRELOAD_THEN_MULTIPLY = """
import sys
from metalctl.kernels import blas
assert "mlx" not in sys.modules and "mlx.core" not in sys.modules
loaded = blas.preload()
import mlx.core as mx
a = mx.arange(64 * 64, dtype=mx.float32).reshape(64, 64) % 7
mx.eval(a @ a)
maps = open("/proc/self/maps").read()
print(loaded is not None, loaded is not None and "openblas" in maps)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wheels of MLX bring a reference BLAS")
def test_a_blas_is_loaded_before_mlx_and_mlx_runs_on_it() -> None:
    if not blas._is_cpu_wheel():
        pytest.skip("MLX's CPU wheel is not installed")
    done = subprocess.run([sys.executable, "-c", PRELOAD_THEN_MULTIPLY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded, mapped = done.stdout.split()
    assert loaded == mapped


def test_nothing_is_loaded_once_mlx_is_there() -> None:
    import mlx.core  # noqa: F401

    assert blas.preload() is None


def test_a_library_that_multiplies_wrongly_is_noticed() -> None:
    class Library:
        def __init__(self, error: float):
            self.error = error

        def cblas_sgemm(self, *arguments: object) -> None:
            size, a, b, c = arguments[3], arguments[7], arguments[9], arguments[12]
            for i in range(size):  # type: ignore[call-overload]
                for j in range(size):  # type: ignore[call-overload]
                    c[i * size + j] = sum(a[i * size + k] * b[k * size + j] for k in range(size))  # type: ignore
            c[5] += self.error  # type: ignore[index]

    assert blas.multiplies_rightly(Library(0.0), 8)  # type: ignore[arg-type]
    assert not blas.multiplies_rightly(Library(0.5), 8)  # type: ignore[arg-type]
    assert ctypes.sizeof(ctypes.c_float) == 4


def test_cores_are_at_least_one_and_at_most_those_of_the_machine() -> None:
    import os

    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_the_narrowest_quota_of_the_groups_above_counts(tmp_path) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path, "/pod/container") == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert cgroup_quota(tmp_path, "/pod/container") == 0.5
    assert cgroup_quota(tmp_path, "/elsewhere") is None


def test_the_older_cgroups_count_too(tmp_path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup_quota(tmp_path, "/") == 2
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert cgroup_quota(tmp_path, "/") is None
