"""Compiling the C++ sources beside this file, once for each machine, MLX and version of the sources."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from metalctl.kernels.cores import usable_cores

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
_COMMON = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_ISA = {  # sources by instruction set, the best first: flags of the compiler, and what Linux calls the features
    "avx512vnni": ((*_AVX512, "-mavx512vnni"), {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
    "avx512": (_AVX512, {"avx512f", "avx512bw", "avx512vl"}),
    "avx2": (_AVX2, {"avx2", "fma", "f16c"}),
    "baseline": ((), set[str]()),
}
_LEFT_OUT = "-DMETALCTL_LEFT_OUT"
_TIME_LIMIT = 300  # seconds for one source


class BuildError(Exception):
    """The sources could not be compiled; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Built:
    library: Path
    compiler: str
    fresh: bool  # compiled just now


def build(cache: Path, notice: Callable[[str], None], every: bool = False) -> Built:
    """The compiled library, from `cache` where it holds one that fits, else compiled now after one `notice`.

    It has the kernels for the best instruction set of this processor, or for `every` one that the compiler knows. Two
    processes that need it at once compile once. Raises BuildError.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    folder = cache / key(compiler, every)
    library = folder / "metalctl_cpu.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if _intact(library):
                return Built(library, compiler, fresh=False)
            notice("compiling the CPU kernels for this machine (once, about 10 s)")
            _compile(compiler, library, every)
            return Built(library, compiler, fresh=True)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror or error}") from error


def key(compiler: str, every: bool = False) -> str:
    """Names everything that the compiled code depends on: sources, flags, compiler, MLX and processor."""
    digest = hashlib.sha256()
    for part in (
        *_COMMON,
        str(_isa_flags(every)),
        compiler,
        _compiler_version(compiler),
        version("mlx"),
        _cpu(),
    ):
        digest.update(part.encode() + b"\0")
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def mlx_folder() -> Path:
    spec = find_spec("mlx")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("MLX is not installed")
    folder = next((Path(p) for p in spec.submodule_search_locations if (Path(p) / "include").is_dir()), None)
    if folder is None:
        raise BuildError("this MLX comes without its headers")
    return folder


def _compile(compiler: str, library: Path, every: bool) -> None:
    mlx = mlx_folder()
    flags = _isa_flags(every)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        # The largest first, so that no core waits for it at the end.
        sources = sorted(
            SOURCES.glob("*.cpp"), key=lambda path: (_LEFT_OUT in flags.get(path.stem, ()), path.stem not in _ISA)
        )
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [
                compiler,
                *_COMMON,
                *flags.get(source.stem, ()),
                f"-I{mlx / 'include'}",
                "-c",
                str(source),
                "-o",
                str(target),
            ]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(_run, commands))
        made = Path(scratch) / library.name
        _run([compiler, "-shared", "-o", str(made), *map(str, objects), f"-L{mlx / 'lib'}", "-lmlx", "-pthread"])
        _digest_file(library).write_text(_digest(made))
        os.replace(made, library)


def _isa_flags(every: bool) -> dict[str, tuple[str, ...]]:
    """The compiler's flags for each source of kernels: those of instruction sets that are not needed are left out."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {"baseline": ("-mcpu=native",)}
    has = _features()
    best = next(name for name, (_, needs) in _ISA.items() if needs <= has)
    return {name: flags if every or name == best else (_LEFT_OUT,) for name, (flags, _) in _ISA.items()}


def _features() -> set[str]:
    """Of the processor, as Linux calls them."""
    line = next((line for line in _cpu().splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {_TIME_LIMIT} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")


def _intact(library: Path) -> bool:
    try:
        return _digest_file(library).read_text() == _digest(library)
    except OSError:
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _cpu() -> str:
    """The processor's model and features: what the compiled code was made and chosen for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
