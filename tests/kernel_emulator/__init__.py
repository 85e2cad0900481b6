"""Runs the sources of custom MLX kernels, Metal or CUDA, on the CPU, and watches every memory access they make.

    kernel = metal_kernel(name=..., input_names=..., output_names=..., source=...)   # as mx.fast.metal_kernel
    outputs = kernel(inputs=..., template=..., grid=..., threadgroup=..., output_shapes=..., output_dtypes=...)

takes the arguments of `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` and can stand in their place. It needs Linux on
x86-64 or arm64, clang 17 or newer (or the package `ziglang`, which carries one), numpy and MLX's CPU backend.
"""

from tests.kernel_emulator.compiler import CompileError, Compiler, NoCompilerError, find_compiler
from tests.kernel_emulator.kernel import EmulationError, Kernel, cuda_kernel, metal_kernel

__all__ = [
    "CompileError",
    "Compiler",
    "EmulationError",
    "Kernel",
    "NoCompilerError",
    "cuda_kernel",
    "find_compiler",
    "metal_kernel",
]
