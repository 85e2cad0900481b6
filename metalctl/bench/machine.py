"""What a figure was measured on."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from metalctl.kernels.cores import usable_cores
from metalctl.version import __version__

PACKAGES = ("mlx", "mlx-lm")


def describe() -> dict[str, Any]:
    """Chip, cores, memory (bytes), system, power, versions. Without MLX being imported."""
    return {
        "chip": _chip(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "os": _system(),
        "power": _power(),
        "python": platform.python_version(),
        "metalctl": __version__,
        **{name: _version(name) for name in PACKAGES},
    }


def describe_backend() -> dict[str, Any]:
    """What MLX computes on in this process, and with which kernels."""
    import mlx.core as mx

    from metalctl.engine import acceleration
    from metalctl.kernels import blas, dispatch

    return {
        "backend": dispatch.platform(),
        "device": mx.device_info().get("device_name"),
        "kernels": acceleration.status(),
        "blas": blas.active(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _system() -> str:
    """The system by the name that its users know, and the architecture."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name} {platform.machine()}"


def _chip() -> str:
    if sys.platform == "darwin":
        return _said(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _power() -> str | None:
    """The governor on Linux, the power source on a Mac; None where the system does not tell."""
    if sys.platform == "darwin":
        lines = (_said(["pmset", "-g", "batt"]) or "").splitlines()
        return lines[0].split("'")[1] if lines and "'" in lines[0] else None
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None


def _said(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
