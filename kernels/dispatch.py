"""Which body of a kernel runs: the one for this machine's device, unless another is forced.

Every operation has a reference in plain MLX operations, and bodies named after what they run on ("metal", "cuda",
"cpu"). Whoever doubts a fast body forces another by name, one operation at a time; the tests force each.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Literal

import mlx.core as mx

Platform = Literal["metal", "cuda", "cpu"]

_forced: dict[str, str] = {}


def platform() -> Platform:
    """What MLX computes on by default in this process."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def body(operation: str) -> str:
    """The name of the body that `operation` has to use: what was forced, else the platform's."""
    return _forced.get(operation) or platform()


def force(operation: str, name: str | None) -> None:
    """From now on `operation` uses the body `name`, on every thread; None gives the choice back."""
    if name is None:
        _forced.pop(operation, None)
    else:
        _forced[operation] = name


@contextmanager
def forced(operation: str, name: str) -> Iterator[None]:
    """`force` for the length of a with block."""
    before = _forced.get(operation)
    force(operation, name)
    try:
        yield
    finally:
        force(operation, before)


@cache
def source(file: str) -> dict[str, str]:
    """The sections of a kernel file of this package, by name. A section starts at a line `//@ name`."""
    text = files(__package__).joinpath(file).read_text(encoding="utf-8")
    parts = re.split(r"^//@ (\w+)[^\n]*\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
