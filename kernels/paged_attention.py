"""Attention of a batch of queries over keys and values that lie in blocks of a shared pool."""

import mlx.core as mx

from metalctl.kernels import dispatch


def paged_attention(
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    block_tables: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    starts: mx.array | None = None,
) -> mx.array:
    """Causal attention of the last L positions of each row over that row's blocks.

    queries       [B, Hq, L, D]   query i of row b stands at position `lengths[b] - L + i`. A position below zero is
                                  padding (rows of different length are padded on the left)
    key_pool      [num_blocks, block_size, Hkv, D]     Hq is a multiple of Hkv: query head h reads head h // (Hq // Hkv)
    value_pool    [num_blocks, block_size, Hkv, Dv]
    block_tables  [B, max_blocks] int32   slot j of row b is `pool[block_tables[b, j // block_size], j % block_size]`.
                                  Entries past the row's length are not used, but must name a block of the pool
    lengths       [B] int32       tokens in the cache, these L included
    scale         what the scores are multiplied by
    window        a query at p sees the positions in (p - window, p]; None: [0, p]
    softcap       scores become `softcap * tanh(scores / softcap)`
    sinks         [Hq]            a logit for each head that takes part in the softmax and has no value
    starts        [B] int32       the position of slot 0 of the row's table, a multiple of block_size; None: zero.
                                  Lets a windowed layer leave out the blocks that no query sees any more

    Queries and pools may be float16, bfloat16 or float32, and need not agree. Returns [B, Hq, L, Dv] in the dtype of
    the queries. A query that sees nothing yields zeros.
    """
    arguments = (queries, key_pool, value_pool, block_tables, lengths, scale, window, softcap, sinks, starts)
    return reference(*arguments)


def gather(pool: mx.array, block_tables: mx.array) -> mx.array:
    """The slots of each row's table as one dense array: [B, H, max_blocks * block_size, D]."""
    batch = block_tables.shape[0]
    return pool[block_tables].reshape(batch, -1, *pool.shape[2:]).swapaxes(1, 2)


def visible(length: int, slots: int, lengths: mx.array, window: int | None, starts: mx.array | None) -> mx.array:
    """Which slots each query sees: bool [B, 1, length, slots]."""
    position = (lengths[:, None] - length + mx.arange(length))[:, :, None]
    slot = mx.arange(slots) + (0 if starts is None else starts[:, None])
    slot = slot.reshape(-1, 1, slots)
    seen = slot <= position
    if window is not None:
        seen = seen & (slot > position - window)
    return seen[:, None]


def reference(
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
    """What `paged_attention` means, in float32 and plain MLX operations. Normative."""
    batch, heads, length, _ = queries.shape
    keys = gather(key_pool, block_tables).astype(mx.float32)[:, :, None]
    values = gather(value_pool, block_tables).astype(mx.float32)[:, :, None]
    grouped = queries.astype(mx.float32).reshape(batch, key_pool.shape[2], -1, length, queries.shape[-1])
    scores = scale * (grouped @ keys.swapaxes(-1, -2))
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    seen = visible(length, keys.shape[-2], lengths, window, starts)[:, :, None]
    scores = mx.where(seen, scores, -mx.inf)
    top = mx.maximum(scores.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, key_pool.shape[2], -1, 1, 1)
        top = mx.maximum(top, sink)
    weights = mx.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    output = (weights @ values) / mx.where(total > 0, total, 1)
    return output.reshape(batch, heads, length, -1).astype(queries.dtype)
