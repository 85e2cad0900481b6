"""Finds a clang that can compile a kernel for the emulator, and turns a translation unit into a loaded library."""

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
OLDEST = 17  # the first clang that rounds each 16-bit operation as a GPU does
FLAGS = [
    *("-x", "c++", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", f"-I{HERE}"),
    *("-fno-vectorize", "-fno-slp-vectorize"),  # accesses wider than 16 bytes go unwatched
    "-fno-strict-aliasing",  # kernels read memory as vectors of another type all the time
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-Xclang", "-cl-single-precision-constant"),  # there is no double on the device
    *("-Wno-user-defined-literals", "-Wno-unknown-attributes", "-fno-sanitize=undefined"),
]
WATCHED = [
    *("-g", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
]


class NoCompilerError(Exception):
    """No compiler here can build a kernel for the emulator."""


class CompileError(AssertionError):
    """The kernel is not valid in its language, as far as clang can tell."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: int

    def run(self, *arguments: str) -> None:
        done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise CompileError(done.stderr)

    def library(self, unit: str, *checks: str) -> ctypes.CDLL:
        """Compiles `unit` and links it with the runtime, once for each text, compiler and runtime.

        checks    a definition each, under which `unit` must compile too
        """
        headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
        built = self._file(".so", unit, headers, self._runtime().name, *checks)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=_cache()) as folder:
                kernel, linked = Path(folder) / "kernel.cpp", Path(folder) / "linked.so"
                kernel.write_text(unit)
                for check in checks:
                    self.run(*FLAGS, f"-D{check}", "-O0", "-c", str(kernel), "-o", f"{kernel}.o")
                self.run(*FLAGS, *WATCHED, "-c", str(kernel), "-o", f"{kernel}.o")
                self.run("-shared", f"{kernel}.o", str(self._runtime()), "-o", str(linked), "-lm")
                linked.replace(built)
        return ctypes.CDLL(str(built))

    def _runtime(self) -> Path:
        built = self._file(".o", *((HERE / name).read_text() for name in ("runtime.h", "runtime.cpp")))
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=_cache()) as folder:
                self.run(*FLAGS, "-c", str(HERE / "runtime.cpp"), "-o", f"{folder}/runtime.o")
                Path(folder, "runtime.o").replace(built)
        return built

    def _file(self, suffix: str, *texts: str) -> Path:
        key = "\0".join([str(self), *FLAGS, *WATCHED, *texts])
        return _cache() / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)


def find_compiler() -> Compiler:
    """What $KERNEL_EMULATOR_CXX names, else the newest clang on the path, else the one in the package `ziglang`."""
    found = _find(os.environ.get("KERNEL_EMULATOR_CXX"))
    if isinstance(found, str):
        raise NoCompilerError(found)
    return found


@cache
def _find(chosen: str | None) -> Compiler | str:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "the kernel emulator runs on Linux on x86-64 and arm64 only"
    names = [f"clang++-{n}" for n in range(40, OLDEST - 1, -1)] + ["clang++"]
    candidates = [chosen.split()] if chosen else [[path] for name in names if (path := shutil.which(name))]
    if not chosen and importlib.util.find_spec("ziglang"):
        candidates.append([sys.executable, "-m", "ziglang", "cc"])
    for candidate in candidates:
        answer = subprocess.run([*candidate, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"clang version (\d+)", answer)
        if version and int(version[1]) >= OLDEST:
            return Compiler(tuple(candidate), int(version[1]))
    return f"no clang of version {OLDEST} or newer, and no package ziglang, to build kernels for the emulator with"


def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"kernel-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
