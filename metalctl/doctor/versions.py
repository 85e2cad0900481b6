"""Python, the packages that metalctl builds on, and MLX's own parts."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.version import BACKENDS, __version__, installed_version

OLDEST, NEWEST = (3, 11), (3, 14)  # the versions of Python that metalctl is tested with

# Why a floor is where it is; that of any other package is the oldest version that metalctl is tested with.
REASONS = {
    "mlx": "the kernels are built against its headers and graph interface",
    "mlx-lm": "the paged cache takes the place of the cache objects of its models",
    "huggingface_hub": "it keeps listings of repositories, by which a part of a model is told from the whole",
    "jinja2": "chat templates come from strangers, and older sandboxes can be escaped",
    "typer": "the shared options rely on signatures that are evaluated",
    "gguf": "newer files have block types that older versions cannot name",
    "llguidance": "it fills the token masks of a batch for structured output",
    "tokenizers": "older versions cannot read the tokenizers of newer models",
}


def python_version(current: tuple[int, int] = sys.version_info[:2]) -> Check:
    shown = f"metalctl {__version__} on Python {platform.python_version()}"
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if current < OLDEST:
        return failure("python", f"{shown}; metalctl needs {span}", "Install it with a newer Python.")
    if current > NEWEST:
        return warning(
            "python", f"{shown}, which metalctl is not tested with", f"Use one of {span} if there is trouble."
        )
    return ok("python", shown)


def processor(system: str = sys.platform, machine: str | None = None, translated: bool | None = None) -> Check:
    """On a Mac, whether this Python runs on the processor itself: MLX has no build for Intel's."""
    machine = machine or platform.machine()
    if system != "darwin" or machine == "arm64":
        return ok("processor", f"{machine}, {platform.system()} {platform.release()}")
    if translated if translated is not None else _is_translated():
        return failure(
            "processor",
            "this Python is built for Intel and runs under Rosetta, where MLX cannot reach the GPU",
            "Install a Python for arm64 (brew install python, or uv python install) and metalctl into that.",
        )
    return failure(
        "processor", "a Mac with an Intel processor, for which MLX has no build", "Use Apple Silicon or Linux."
    )


def _is_translated() -> bool:
    done = subprocess.run(["sysctl", "-n", "sysctl.proc_translated"], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "1"


def packages(required: list[str] | None = None) -> Iterator[Check]:
    """One line for all that are new enough, and one for each that is not."""
    wanted = [Requirement(text) for text in (requires("metalctl") or [] if required is None else required)]
    wanted = [requirement for requirement in wanted if not requirement.marker or requirement.marker.evaluate()]
    problems = [check for requirement in wanted if (check := _package(requirement)) is not None]
    if not problems:
        yield ok("packages", f"{len(wanted)} packages are here and new enough")
    yield from problems


def _package(requirement: Requirement) -> Check | None:
    name = requirement.name
    fix = f"pip install -U '{name}{requirement.specifier}'"
    reason = REASONS.get(name.lower(), "it is the oldest that metalctl is tested with")
    try:
        installed = version(name)
    except PackageNotFoundError:
        return failure("packages", f"{name} is not installed", fix)
    if requirement.specifier.contains(Version(installed), prereleases=True):
        return None
    return failure("packages", f"{name} is {installed} and must be {requirement.specifier}: {reason}", fix)


def mlx(system: str = sys.platform) -> Check:
    """MLX comes in two packages, of which the second does the computing; both must be of the same version."""
    core = installed_version("mlx")
    backends = {name: found for name in BACKENDS if (found := installed_version(name))}
    shown = ", ".join(f"{name} {number}" for name, number in {"mlx": core, **backends}.items())
    if core is None or not backends:
        fix = (
            "pip install mlx" if system == "darwin" else "pip install 'mlx[cpu]', or 'mlx[cuda13]' with an NVIDIA GPU."
        )
        return failure(
            "mlx", "MLX is not installed" if core is None else f"{shown} has no backend to compute with", fix
        )
    if len(backends) > 1:
        extra = " ".join(list(backends)[1:])
        return warning("mlx", f"several backends are installed: {shown}", f"pip uninstall {extra}, or the other ones.")
    if set(backends.values()) != {core}:
        return failure(
            "mlx", f"{shown} do not fit together", f"pip install -U mlx=={core} {next(iter(backends))}=={core}"
        )
    return ok("mlx", f"{shown}, mlx-lm {installed_version('mlx-lm') or 'missing'}")
