"""Products of few rows with a matrix of 4 bits, on CUDA: what a decode step of a quantised model does all the time."""

from functools import cache
from typing import Any

import mlx.core as mx

from metalctl.kernels import dispatch

MOST_ROWS = 32


def quantized_rows(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, *, group_size: int, bits: int
) -> mx.array:
    """`mx.quantized_matmul(x, weight, scales, biases, transpose=True)` in MLX's affine mode.

    x       [..., K] float16 or bfloat16
    weight  [N, K * bits / 32] uint32; scales and biases [N, K / group_size] in the dtype of x

    Returns [..., N]. Any other shape, width or device goes to MLX's own operation.
    """
    if dispatch.body("quantized_rows") != "cuda" or not applies(x, weight, scales, biases, group_size, bits):
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
    width, columns = x.shape[-1], weight.shape[0]
    rows = x.size // width
    warps, unroll = (8, 1) if rows <= 16 else (4, 4)
    outputs: list[mx.array] = kernel()(
        inputs=[x.reshape(rows, width), weight, scales, biases],
        template=[
            *(("T", x.dtype), ("GROUP_SIZE", group_size), ("TILES", -(-rows // 8))),
            *(("WARPS", warps), ("UNROLL", unroll)),
        ],
        grid=(-(-columns // 16) * warps * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
    )
    return outputs[0].reshape(*x.shape[:-1], columns)


def applies(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> bool:
    """Whether the kernel computes this product."""
    same = biases is not None and x.dtype == scales.dtype == biases.dtype and x.dtype in (mx.float16, mx.bfloat16)
    shaped = weight.ndim == 2 and bits == 4 and group_size % 32 == 0 and x.size <= MOST_ROWS * x.shape[-1]
    return same and shaped and x.size > 0


def reference(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """`quantized_rows` in float32 and plain MLX operations. Normative."""
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    matrix = mx.dequantize(weight, wide[0], wide[1], group_size=group_size, bits=bits)
    return (x.astype(mx.float32) @ matrix.T).astype(x.dtype)


@cache
def kernel() -> Any:
    sections = dispatch.source("quantized_rows.cu")
    return mx.fast.cuda_kernel(
        name="metalctl_quantized_rows",
        input_names=["x", "weight", "scales", "biases"],
        output_names=["y"],
        source=sections["product"],
        header=dispatch.source("tensor.cu")["header"] + sections["header"],
    )
