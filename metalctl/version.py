"""Which version this is, and of what it is made."""

__version__ = "0.1.0"

BACKENDS = {"mlx-metal": "metal", "mlx-cuda-13": "cuda", "mlx-cuda-12": "cuda", "mlx-cpu": "cpu"}


def versions() -> dict[str, str | None]:
    """Of the program and of what it computes with; None for what is not installed. Imports none of it."""
    import platform

    installed = [name for name in BACKENDS if installed_version(name)]
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "mlx": installed_version("mlx"),
        "mlx_lm": installed_version("mlx-lm"),
        "mlx_vlm": installed_version("mlx-vlm"),
        "backend": BACKENDS[installed[0]] if installed else None,
    }


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
