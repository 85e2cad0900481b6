"""Products of few rows with matrices of 16 bits, on CUDA: what a decode step does most of the time.

MLX hands such a product to cuBLAS, which costs the host some 18 us each to put into a CUDA graph. A small model's step
has hundreds of them, and its kernels run for a third of that time.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from metalctl.kernels import dispatch

MOST_ROWS = 32
MOST_TOGETHER = 3  # matrices
LARGEST = 1 << 24  # bytes of a matrix; beyond, cuBLAS reads faster by more than its launch costs
WARPS, UNROLL, STRIPS = 8, 4, 1  # of a block: what measured best within a step
_SECTIONS = ("one", "two", "three")


def linear_rows(x: mx.array, weights: Sequence[mx.array]) -> list[mx.array]:
    """`x @ weight.T` for each of up to three weights, in one launch.

    x        [..., K] float16 or bfloat16, K a multiple of 8
    weights  [N, K] each, in the dtype of x

    Returns arrays [..., N]. Any other shape, dtype or device goes to MLX's own operation.
    """
    if dispatch.body("linear_rows") != "cuda" or not applies(x, weights):
        return reference(x, weights)
    width = x.shape[-1]
    rows = x.size // width
    blocks = sum(-(-weight.shape[0] // (16 * STRIPS)) for weight in weights)
    outputs: list[mx.array] = kernel(len(weights))(
        inputs=[x.reshape(rows, width), *weights],
        template=[
            *(("T", x.dtype), ("TILES", -(-rows // 8))),
            *(("WARPS", WARPS), ("UNROLL", UNROLL), ("STRIPS", STRIPS)),
        ],
        grid=(blocks * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(rows, weight.shape[0]) for weight in weights],
        output_dtypes=[x.dtype] * len(weights),
    )
    return [y.reshape(*x.shape[:-1], -1) for y in outputs]


def applies(x: mx.array, weights: Sequence[mx.array]) -> bool:
    """Whether the kernel computes these products."""
    shaped = 0 < x.size <= MOST_ROWS * x.shape[-1] and 0 < len(weights) <= MOST_TOGETHER
    return shaped and all(weight.dtype == x.dtype and can_hold(weight) for weight in weights)


def can_hold(weight: mx.array) -> bool:
    """Whether the kernel computes products with this matrix."""
    typed = weight.dtype in (mx.float16, mx.bfloat16)
    return typed and weight.ndim == 2 and weight.shape[1] % 8 == 0 and weight.nbytes <= LARGEST


def reference(x: mx.array, weights: Sequence[mx.array]) -> list[mx.array]:
    """`linear_rows` in plain MLX operations. Normative."""
    return [x @ weight.T for weight in weights]


@cache
def kernel(count: int) -> Any:
    """The kernel for so many matrices. Compiled by MLX when it first runs."""
    sections = dispatch.source("linear_rows.cu")
    return mx.fast.cuda_kernel(
        name=f"metalctl_linear_rows_{_SECTIONS[count - 1]}",
        input_names=["x", *(f"w{i}" for i in range(count))],
        output_names=[f"y{i}" for i in range(count)],
        source=sections[_SECTIONS[count - 1]] + sections["product"],
        header=dispatch.source("tensor.cu")["header"],
    )
