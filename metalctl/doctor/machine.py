"""The device that models run on: its memory, and what makes a CPU fast."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.engine.memory import DeviceMemory, device_memory
from metalctl.kernels.cpu.build import COMPILERS, BuildError, mlx_folder
from metalctl.output import human_bytes

LITTLE = 2 * 10**9  # bytes, with which hardly any model runs
_PROGRAM = "#include <atomic>\n#include <concepts>\nint main() { return 0; }\n"


def device() -> Check:
    """Compute something, and see whether it is right."""
    try:
        import mlx.core as mx

        right = mx.matmul(mx.full((64, 32), 2.0), mx.ones((32, 16))).sum().item() == 64 * 32 * 16 * 2.0
    except (ImportError, RuntimeError, ValueError) as error:
        fix = "Install MLX anew: pip install --force-reinstall mlx, with [cpu] or [cuda13] behind it on Linux."
        return failure("device", f"MLX does not run here: {str(error).splitlines()[0]}", fix)
    cpu = on_cpu()
    name = f"{mx.device_info().get('device_name', 'CPU')} ({'CPU' if cpu else 'GPU'})"
    if not right:
        return failure("device", f"{name} computes wrongly", "Update the driver or macOS, then MLX: pip install -U mlx")
    if cpu and idle_gpu():
        return warning(
            "device", f"{name}, while an NVIDIA GPU is idle", "pip uninstall mlx-cpu; pip install 'mlx[cuda13]'"
        )
    if cpu and sys.platform == "darwin":
        return warning("device", f"{name}, and not Metal", "Unset MLX_DEVICE, and run outside of virtual machines.")
    return ok("device", name)


def on_cpu() -> bool:
    """Whether models run on the CPU here."""
    import mlx.core as mx

    return bool(mx.default_device() == mx.cpu)


def idle_gpu() -> bool:
    """Whether there is an NVIDIA GPU."""
    return Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is not None


def memory(found: DeviceMemory | None = None) -> Check:
    found = found or device_memory()
    shown = f"{human_bytes(found.recommended)} for models, of {human_bytes(found.total)}"
    if found.recommended < LITTLE or found.available < LITTLE:
        free = min(found.available, found.recommended)
        return warning("memory", f"{shown}; only {human_bytes(free)} are free", f"Close programs{_largest()}.")
    return ok("memory", shown)


def _largest() -> str:
    """The program that takes the most, apart from this one."""
    infos = [p.info for p in psutil.process_iter(["name", "memory_info", "pid"]) if p.info["memory_info"]]
    infos = [info for info in infos if info["pid"] != os.getpid()]
    if not infos:
        return ""
    top = max(infos, key=lambda info: info["memory_info"].rss)
    return f"; {top['name']} takes {human_bytes(top['memory_info'].rss)}"


def wired_limit(system: str = sys.platform, megabytes: int | None = None, total: int | None = None) -> Check:
    """How much of a Mac's memory its GPU may hold. macOS decides by itself where the limit is 0."""
    if system != "darwin":
        return ok("wired limit", "none on this system")
    megabytes = _wired_megabytes() if megabytes is None else megabytes
    total = total or psutil.virtual_memory().total
    if megabytes == 0:
        return ok("wired limit", "as macOS chooses")
    given = megabytes * 2**20
    shown = f"{human_bytes(given)} of {human_bytes(total)}"
    if given > total - 2 * 2**30:
        return warning("wired limit", f"{shown} leaves macOS too little", "sudo sysctl iogpu.wired_limit_mb=0")
    if given < total // 2:
        return warning("wired limit", f"{shown} is less than macOS allows", "sudo sysctl iogpu.wired_limit_mb=0")
    return ok("wired limit", shown)


def _wired_megabytes() -> int:
    done = subprocess.run(["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or 0)


def compiler(needed: bool) -> Check:
    """What compiles the CPU kernels on first use."""
    if not needed:
        return ok("compiler", "not needed: models run on the GPU")
    install = "xcode-select --install" if sys.platform == "darwin" else "Install g++, as by: apt-get install g++"
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        return warning("compiler", "there is no C++ compiler, without which models run about ten times slower", install)
    command = [found, "-x", "c++", "-std=c++20", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=_PROGRAM, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.splitlines() or ["it fails"])[0]
        return warning("compiler", f"{found} cannot compile C++20: {said}", install)
    try:
        mlx_folder()
    except BuildError as error:
        return warning("compiler", f"{error}, so the CPU kernels cannot be built", "pip install --force-reinstall mlx")
    return ok("compiler", found)


def blas(needed: bool, library: str | None) -> Check:
    """`library` is what `kernels.blas.preload` found."""
    if not needed or sys.platform != "linux":
        return ok("blas", "not needed here")
    if library is None:
        fix = "apt-get install libopenblas0, or pip install opencv-python-headless, which brings one."
        return warning("blas", "no OpenBLAS is here: long prompts are read slowly in 16 and 32 bit models", fix)
    return ok("blas", library)
