"""A custom kernel: the text that MLX would compile, and a run of it over a grid."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from tests.kernel_emulator.compiler import find_compiler
from tests.kernel_emulator.translate import Parameter, cuda_unit, metal_unit

Dialect = Literal["metal", "cuda"]
Template = Sequence[tuple[str, mx.Dtype | int | bool]]
SHARED_MEMORY = {"metal": 32 << 10, "cuda": 48 << 10}
MAX_THREADS = 1024
POISON = 0xFF  # NaN in every floating point format, -1 in every integer
ALIGNMENT = 256


class EmulationError(AssertionError):
    """What a kernel did wrong: the first thing found."""


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("item", ctypes.c_size_t),
        ("writable", ctypes.c_int),
        ("initialised", ctypes.c_int),
    ]


@dataclass(frozen=True)
class _Memory:
    """A buffer of the kernel: exactly `size` bytes, aligned as the device's allocator would."""

    parameter: Parameter
    data: np.ndarray
    writable: bool = False
    initialised: bool = True

    def describe(self) -> _Buffer:
        name = self.parameter.name.encode()
        begin = self.data.ctypes.data_as(ctypes.c_void_p)
        return _Buffer(name, begin, self.data.size, self.parameter.item, self.writable, self.initialised)


@dataclass(frozen=True)
class Kernel:
    """Called like what `mx.fast.metal_kernel` returns; evaluates at once, and raises EmulationError on a finding."""

    dialect: Dialect
    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    atomic_outputs: bool = False
    may_leave_unwritten: frozenset[str] = frozenset()
    written_inputs: frozenset[str] = frozenset()
    contiguous: bool = True  # whether inputs are made so

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | float],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Template = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        if len(inputs) != len(self.input_names):
            raise ValueError(f"{self.name} takes {len(self.input_names)} inputs, got {len(inputs)}")
        named = zip(self.input_names, inputs, strict=True)
        memory = [part for name, value in named for part in self._input(name, value)]
        sizes = zip(self.output_names, output_shapes, output_dtypes, strict=True)
        outputs = [self._output(name, shape, dtype, init_value) for name, shape, dtype in sizes]
        parameters = [part.parameter for part in (*memory, *outputs)]
        unit = (metal_unit if self.dialect == "metal" else cuda_unit)(self, parameters, template)
        if verbose:
            print(unit)
        checks = ["METAL_ADDRESS_SPACES"] if self.dialect == "metal" else []
        self._run(find_compiler().library(unit, *checks), [*memory, *outputs], grid, threadgroup)
        self._write_back(inputs, memory)
        return [
            _as_array(part.data, shape, dtype)
            for part, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _input(self, name: str, value: mx.array | float) -> list[_Memory]:
        """The array, and what MLX passes beside it when the source asks: its shape, strides and rank."""
        array = value if isinstance(value, mx.array) else mx.array(value)
        small = array.size < 8  # MLX puts these into the constant address space
        parameter = Parameter(name, array.dtype, small, array.ndim == 0)
        if self.contiguous:
            array = mx.contiguous(array)
        mx.eval(array)
        parts = [_Memory(parameter, _as_it_lies(array), writable=name in self.written_inputs)]
        strides = [step // array.dtype.size for step in memoryview(array).strides or ()]
        padding = [0] * (10 - array.ndim) if self.dialect == "cuda" else []
        for suffix, dtype, values in (
            ("shape", mx.int32, [*array.shape, *padding]),
            ("strides", mx.int64, [*strides, *padding]),
            ("ndim", mx.int32, array.ndim),
        ):
            if array.ndim and f"{name}_{suffix}" in self.source:
                parameter = Parameter(f"{name}_{suffix}", dtype, True, suffix == "ndim", suffix)
                parts.append(_Memory(parameter, _bytes(mx.array(values, dtype=dtype))))
        return parts

    def _output(self, name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> _Memory:
        parameter = Parameter(name, dtype, False, False, "atomic" if self.atomic_outputs else "output")
        if init_value is not None:
            return _Memory(parameter, _bytes(mx.full(shape, init_value, dtype)), writable=True)
        data = _aligned(int(np.prod(shape)) * dtype.size)
        data[:] = POISON
        return _Memory(parameter, data, writable=True, initialised=False)

    def _write_back(self, inputs: Sequence[mx.array | float], memory: Sequence[_Memory]) -> None:
        """Into the arrays that the kernel wrote to, against MLX's rules, what it left in them."""
        data = {part.parameter.name: part.data for part in memory}
        for name, array in zip(self.input_names, inputs, strict=True):
            if name in self.written_inputs and isinstance(array, mx.array):
                target = np.asarray(memoryview(array.view(mx.uint8).reshape(-1)))
                ctypes.memmove(target.ctypes.data, data[name].ctypes.data, data[name].size)

    def _run(self, library: ctypes.CDLL, memory: Sequence[_Memory], grid: Sequence[int], group: Sequence[int]) -> None:
        if self.dialect == "cuda":  # MLX launches whole blocks there
            grid = [-(-size // part) * part for size, part in zip(grid, group, strict=True)]
        if int(np.prod(group)) > MAX_THREADS or min(*grid, *group) < 1:
            raise EmulationError(f"{self.name}: a grid of {grid} in groups of {group} cannot be launched")
        run = library.emulator_run
        run.restype = ctypes.c_char_p
        buffers = (_Buffer * len(memory))(*(part.describe() for part in memory))
        may_leave = [part.parameter.name in self.may_leave_unwritten for part in memory]
        sizes = [(ctypes.c_uint * 3)(*values) for values in (grid, group)]
        at = ctypes.c_size_t()
        skip = (ctypes.c_int * len(memory))(*may_leave)
        shared = ctypes.c_size_t(SHARED_MEMORY[self.dialect])
        finding = run(buffers, len(memory), skip, *sizes, shared, ctypes.byref(at)).decode()
        if finding:
            raise EmulationError(f"{self.name}: {finding}{_source_line(library, at.value)}")


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object = None,
    may_leave_unwritten: Sequence[str] = (),
) -> Kernel:
    """Stands in for `mx.fast.metal_kernel`. Inputs are always made contiguous.

    may_leave_unwritten   outputs that the kernel need not fill; any other element left alone is a finding
    """
    unwritten = frozenset(may_leave_unwritten)
    return Kernel("metal", name, input_names, output_names, source, header, atomic_outputs, unwritten)


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
    may_leave_unwritten: Sequence[str] = (),
    written_inputs: Sequence[str] = (),
) -> Kernel:
    """Stands in for `mx.fast.cuda_kernel`, as `metal_kernel` does for its namesake, but for `ensure_row_contiguous`.

    written_inputs   inputs that the kernel writes to, which have to be contiguous; a write to any other is a finding
    """
    unwritten, written = frozenset(may_leave_unwritten), frozenset(written_inputs)
    texts = (name, input_names, output_names, source, header)
    options = {"may_leave_unwritten": unwritten, "written_inputs": written, "contiguous": ensure_row_contiguous}
    return Kernel("cuda", *texts, **options)


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _bytes(array: mx.array) -> np.ndarray:
    flat = mx.contiguous(array).reshape(-1)
    data = _aligned(array.nbytes)
    data[:] = np.array(flat.view(mx.uint8), copy=False) if array.dtype != mx.bool_ else np.array(flat).view(np.uint8)
    return data


def _as_it_lies(array: mx.array) -> np.ndarray:
    """The bytes from an array's first element to its last, with poison where none of its elements lies."""
    strides, size = memoryview(array).strides or (), array.dtype.size
    span = size + sum((length - 1) * step for length, step in zip(array.shape, strides, strict=True))
    if not array.size or span == array.nbytes:
        return _bytes(array)
    data = _aligned(span)
    data[:] = POISON
    shape = (*array.shape, size)
    np.lib.stride_tricks.as_strided(data, shape, (*strides, 1))[...] = _bytes(array).reshape(shape)
    return data


def _as_array(data: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bool_:
        return mx.array(data.view(np.bool_)).reshape(shape)
    return mx.array(data).view(dtype).reshape(shape)


def _source_line(library: ctypes.CDLL, offset: int) -> str:
    """Where in the kernel's text an instruction stands, if a symboliser is at hand."""
    tool = shutil.which("addr2line")
    if not (offset and tool):
        return ""
    answer = subprocess.run([tool, "-e", library._name, hex(offset - 1)], capture_output=True, text=True).stdout
    place = re.search(r"(kernel (?:source|header)):(\d+)", answer)
    return f" at line {place[2]} of the {place[1]}" if place else ""
