"""What lies between the projections and the attention of a decode step, on CUDA, in one launch instead of a dozen."""

from functools import cache
from typing import Any

import mlx.core as mx

from metalctl.kernels import dispatch

LONGEST = 512  # elements of a head
WARPS = 4


def append_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    slots: mx.array,
    positions: mx.array,
    frequencies: mx.array,
    *,
    traditional: bool,
    norms: tuple[mx.array, mx.array, mx.array] | None,
) -> mx.array:
    """Norm and rotate one new token's queries and keys of each row, and write its keys and values into the pools.

    queries      [B, Hq * D] float16 or bfloat16; rows may lie apart
    keys, values [B, Hkv * D] likewise
    key_pool     [tokens, Hkv, D] in the same dtype, as value_pool. **Written in place**: MLX does not know of it, so
                 whoever reads what was written must depend on the result, and nobody else may hold the pools
    slots        [B] int32, the place of each row in the pools; 0, where nobody reads, for rows that write nothing
    positions    [B] int32, what each row's token is rotated by
    frequencies  [n] float32: pair i of the first 2 n elements is rotated by `position * frequencies[i]` (RoFormer,
                 arXiv 2104.09864). Pairs are neighbours if `traditional`, else n apart
    norms        weights of the RMS norms of queries and keys, [D] float32, and their epsilon, [1] float32; or None

    Returns the queries, [B, Hq, 1, D].
    """
    rows, head_dim = queries.shape[0], key_pool.shape[-1]
    query_heads, kv_heads = queries.shape[1] // head_dim, key_pool.shape[1]
    weights = norms or (frequencies, frequencies, frequencies)  # the latter are not read
    outputs: list[mx.array] = kernel()(
        inputs=[queries, keys, values, key_pool, value_pool, slots, positions, frequencies, *weights],
        template=[
            *(("T", queries.dtype), ("HEAD_DIM", head_dim), ("ROTATED", 2 * frequencies.size)),
            *(("TRADITIONAL", traditional), ("NORMS", norms is not None), ("WARPS", WARPS)),
        ],
        grid=(-(-rows * (query_heads + 2 * kv_heads) // WARPS) * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(rows, query_heads, 1, head_dim)],
        output_dtypes=[queries.dtype],
    )
    return outputs[0]


def applies(x: mx.array, key_pool: mx.array, value_pool: mx.array) -> bool:
    """Whether the kernel serves activations like `x` and these pools."""
    same = x.dtype == key_pool.dtype == value_pool.dtype and x.dtype in (mx.float16, mx.bfloat16)
    shaped = key_pool.shape == value_pool.shape and key_pool.shape[-1] <= LONGEST
    return dispatch.body("append_rows") == "cuda" and same and shaped


def reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    slots: mx.array,
    positions: mx.array,
    frequencies: mx.array,
    *,
    traditional: bool,
    norms: tuple[mx.array, mx.array, mx.array] | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`append_rows` in plain MLX operations on new pools: queries, key pool, value pool. Normative."""
    rows, (_, kv_heads, head_dim) = queries.shape[0], key_pool.shape
    rotated = []
    for i, part in enumerate((queries, keys)):
        x = part.astype(mx.float32).reshape(rows, -1, 1, head_dim)
        if norms is not None:
            x = x * mx.rsqrt(x.square().mean(axis=-1, keepdims=True) + norms[2]) * norms[i]
        dims, freqs = 2 * frequencies.size, 1 / frequencies
        x = mx.fast.rope(x, dims, traditional=traditional, base=None, scale=1.0, offset=positions, freqs=freqs)
        rotated.append(x.astype(queries.dtype))
    new = rotated[1][:, :, 0], values.reshape(rows, kv_heads, head_dim)
    pools = []
    for pool, numbers in zip((key_pool, value_pool), new, strict=True):
        numbers = mx.where(slots[:, None, None] == 0, pool[slots], numbers)
        pools.append(mx.put_along_axis(pool, mx.broadcast_to(slots[:, None, None], numbers.shape), numbers, axis=0))
    return rotated[0], pools[0], pools[1]


@cache
def kernel() -> Any:
    names = ["queries", "keys", "values", "key_pool", "value_pool", "slots", "positions", "frequencies"]
    return mx.fast.cuda_kernel(
        name="metalctl_append_rows",
        input_names=[*names, "query_norm", "key_norm", "constants"],
        output_names=["output"],
        source=dispatch.source("append_rows.cu")["append"],
        ensure_row_contiguous=False,
    )
