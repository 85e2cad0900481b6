"""Kernels of this project on the emulator: the very sources that ship, through the very code that launches them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import pytest

from metalctl.kernels import append_rows, dispatch, linear_rows, paged_attention, quantized_rows, recurrent
from tests.kernel_emulator import NoCompilerError, cuda_kernel, find_compiler, metal_kernel


def require_compiler() -> None:
    """Skips where nothing can compile a kernel, and fails there in CI."""
    try:
        find_compiler()
    except NoCompilerError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the sources of the GPU kernels cannot be tested: {error}")
        pytest.skip(f"THE SOURCES OF THE GPU KERNELS ARE NOT TESTED: {error}")


@contextmanager
def emulated(device: str, operation: str) -> Iterator[None]:
    """Inside, `operation` runs its body for `device` ("metal", "cuda") on the emulator."""
    require_compiler()
    builders = {"metal_kernel": metal_kernel, "cuda_kernel": cuda_kernel}
    _forget_kernels()
    with pytest.MonkeyPatch.context() as patch, dispatch.forced(operation, device):
        for name, build in builders.items():
            patch.setattr(mx.fast, name, partial(_build, build), raising=False)
        yield
    _forget_kernels()


def _forget_kernels() -> None:
    for module in (append_rows, linear_rows, paged_attention, quantized_rows, recurrent):
        module.kernel.cache_clear()


def _build(build, **arguments):  # type: ignore[no-untyped-def]
    """Parts of the context that a row does not see leave their output unwritten: the merge does not read it."""
    parts = ["output"] if "partials" in arguments["name"] else []
    pools = {"written_inputs": ["key_pool", "value_pool"]} if "append" in arguments["name"] else {}
    return build(**arguments, may_leave_unwritten=parts, **pools)
