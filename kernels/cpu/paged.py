"""The CPU body of `metalctl.kernels.paged_attention`."""

from functools import cache

import mlx.core as mx

from metalctl.kernels.cpu import library
from metalctl.kernels.cpu.library import Operation

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)


def applies(queries: mx.array, key_pool: mx.array, value_pool: mx.array) -> bool:
    same = key_pool.dtype == value_pool.dtype and key_pool.dtype in _FLOATS and queries.dtype in _FLOATS
    return library.loaded() and same


def paged_attention(
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    block_tables: mx.array,
    lengths: mx.array,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
    starts: mx.array | None,
) -> mx.array:
    operation = _operation(scale, softcap, window, sinks is not None, starts is not None)
    if sinks is not None:
        sinks = mx.contiguous(sinks.astype(mx.float32))
    output = operation.of(queries, key_pool, value_pool, block_tables, lengths, sinks, starts)
    return output if queries.dtype == mx.float32 else output.astype(queries.dtype)


@cache
def _operation(scale: float, softcap: float | None, window: int | None, sinks: bool, starts: bool) -> Operation:
    return library.attention(scale, softcap, window, sinks, starts)
