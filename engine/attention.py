"""Attention straight from the block pools, in the place where mlx-lm's models attend to gathered arrays.

Every mlx-lm model that does not compute attention by hand calls `mlx_lm.models.base.scaled_dot_product_attention` with
the cache it was handed. `install` puts a function in its place that looks at the cache: one of ours is attended to by
the paged kernel of this device, where that is the faster way and the call is plain attention over what the cache gave;
anything else goes to mlx-lm's function with the arrays as they are. Nothing is lost by trying: the dense arrays that
are then not read are never computed.
"""

import sys

import mlx.core as mx
import mlx_lm.models.base as base

from metalctl.engine.cache.paged_kv import Mask, PagedKVCache
from metalctl.kernels import dispatch
from metalctl.kernels.cpu import paged as cpu
from metalctl.kernels.paged_attention import on_tensor_cores, paged_attention

WHOLE = 256  # queries that whole chunks have a multiple of
LARGE = 1 << 22  # queries times keys

_dense = base.scaled_dot_product_attention


def install() -> None:
    """Replace the function in every module of mlx-lm that has been imported. Idempotent; call it per loaded model."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "scaled_dot_product_attention", None) is _dense:
            module.scaled_dot_product_attention = attend  # type: ignore[attr-defined]


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """`scaled_dot_product_attention` of mlx-lm: queries `[B, Hq, L, D]`, keys and values `[B, H, S, D]`."""
    if isinstance(cache, PagedKVCache) and keys is cache.keys and values is cache.values:
        window = cache.window_of(mask)
        if window is not None and _pays(cache, queries):
            key_pool, value_pool, paged = cache.paged
            return paged_attention(
                queries,
                key_pool,
                value_pool,
                paged.block_tables,
                paged.lengths,
                scale=scale,
                window=window[0],
                sinks=sinks,
                starts=paged.starts,
            )
    return _dense(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _pays(cache: PagedKVCache, queries: mx.array) -> bool:
    """Whether reading the pool beats MLX's own attention over a dense array."""
    match dispatch.body("paged_attention"):
        case "cpu":
            return cpu.applies(queries, *cache.pools)
        case "reference":  # forced
            return True
        case device if queries.shape[2] == 1:
            return not cache.reads_slice  # On a GPU, MLX's is the better one for a sequence that lies in one piece.
        case device:
            return device == "cuda" and on_tensor_cores(queries, *cache.pools) and not _worth_planning(cache, queries)


def _worth_planning(cache: PagedKVCache, queries: mx.array) -> bool:
    """Whether MLX's attention over one piece gains more than the 40 ms that cuDNN takes for each new pair of lengths:
    with lengths that come again, those of whole chunks, or where the work itself takes longer than that."""
    length = queries.shape[2]
    return cache.reads_slice and (length % WHOLE == 0 or length * cache.num_visible > LARGE)
