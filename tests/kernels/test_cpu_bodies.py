"""The bodies compiled by themselves: for this machine, and for ARM processors where a cross compiler and an emulator
are installed (Debian: g++-aarch64-linux-gnu and qemu-user)."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from metalctl.kernels.cpu.build import COMPILERS, SOURCES

FLAGS = ("-std=c++20", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-w", "-static-libstdc++", "-static-libgcc")
ARM = {"with dot products": "neoverse-n1", "without": "cortex-a53"}


def errors(compiler: str, flags: list[str], runner: list[str], folder: Path) -> list[tuple[str, float, float]]:
    program = folder / "check"
    sources = [str(SOURCES / "baseline.cpp"), str(Path(__file__).with_name("bodies_check.cpp"))]
    command = [compiler, *FLAGS, *flags, f"-I{SOURCES}", *sources, "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([*runner, str(program)], check=True, timeout=120, capture_output=True, text=True)
    words = [line.split() for line in done.stdout.splitlines()]
    return [(name, float(error), float(largest)) for name, error, largest in words]


def check(found: list[tuple[str, float, float]]) -> None:
    assert [name for name, _, _ in found].count("product") == 4
    assert [name for name, _, _ in found].count("attention") == 3
    for name, error, largest in found:
        assert error <= 1e-6 * max(largest, 1), name


def test_on_this_machine(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    check(errors(compiler, [], [], tmp_path))


@pytest.mark.parametrize("processor", ARM.values(), ids=ARM.keys())
def test_on_arm(processor: str, tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if platform.machine() == "aarch64" or compiler is None or emulator is None:
        pytest.skip("there is no cross compiler for ARM, or no emulator")
    check(errors(compiler, ["-static", f"-mcpu={processor}"], [emulator, "-cpu", "max"], tmp_path))
