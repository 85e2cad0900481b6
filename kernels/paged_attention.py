"""Attention of a batch of queries over keys and values that lie in blocks of a shared pool."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import mlx.core as mx

from metalctl.kernels import dispatch
from metalctl.kernels.cpu import paged as cpu

SIMD = 32
SIMDS = 4  # SIMD-groups (warps) of a threadgroup
SHORTEST, LONGEST = 128, 4096  # positions that are worth a threadgroup, and that one can be given
FULL = 128  # threadgroups that occupy a device already: more of them are worth it for long contexts only
MOST_PARTS = 512  # threadgroups along the context of one sequence
WANTED = {"metal": 512, "cuda": 1024}  # threadgroups that keep a large device busy
MOST_ROWS = {"metal": 4, "cuda": 8}  # queries that share a load, as far as registers go
TENSOR_ROWS = 16  # the same on tensor cores, whose tiles are that high
TENSOR_WIDEST = 128  # longest head that their registers hold
ALIGNMENT = 16  # what a window sees begins up to so many positions early
MOST_TILES = {"metal": 8, "cuda": 14}  # beyond, gathering is cheaper than reading the keys for every tile of queries


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
    match dispatch.body("paged_attention"):
        case "reference":
            return reference(*arguments)
        case "metal" | "cuda" as device if (plan := make_plan(device, *arguments[:4], window)) is not None:
            return paged(plan, *arguments)
        case "cpu" if cpu.applies(*arguments[:3]):
            return cpu.paged_attention(*arguments)
    return plain(*arguments)


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
    values = _seen_only(values, seen)
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


def plain(
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
    """Gathers, then MLX's own attention in the dtype of the queries. For long chunks, and where no body fits."""
    if softcap is not None:  # MLX's attention has none
        return reference(queries, key_pool, value_pool, block_tables, lengths, scale, window, softcap, sinks, starts)
    keys = gather(key_pool, block_tables).astype(queries.dtype)
    values = gather(value_pool, block_tables).astype(queries.dtype)
    seen = visible(queries.shape[2], keys.shape[2], lengths, window, starts)
    values = _seen_only(values, seen)
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen, sinks=sinks)
    return mx.where(seen.any(axis=-1, keepdims=True), output, 0)


def _seen_only(values: mx.array, seen: mx.array) -> mx.array:
    """`values` `[..., S, D]` with 0 for those that no query sees: left there by others, they need not be finite."""
    return mx.where(seen.any(axis=-2)[..., None], values, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the kernels cut the work: the numbers that they are compiled for, and the grid."""

    device: Literal["metal", "cuda"]
    lanes: int  # neighbouring lanes that hold one key between them
    width: int  # elements of a key, and of a value, in a lane
    unroll: int  # keys in flight for each group of lanes
    rows: int  # queries that share a load
    tiles: int  # of so many rows
    parts: int  # threadgroups along the context
    tensor: bool  # on tensor cores

    @property
    def simds_name(self) -> str:
        return "SIMDS" if self.device == "metal" else "WARPS"

    def template(self) -> list[tuple[str, int]]:
        sizes = {"ROWS": self.rows, "LONGEST": LONGEST, self.simds_name: SIMDS}
        if not self.tensor:
            sizes |= {"LANES": self.lanes, "UNROLL": self.unroll, "KEY_WIDTH": self.width, "VALUE_WIDTH": self.width}
        return list(sizes.items())


def make_plan(
    device: Literal["metal", "cuda"],
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    block_tables: mx.array,
    window: int | None,
) -> Plan | None:
    """The plan for these shapes; None where the kernels do not apply."""
    batch, heads, length, key_dim = queries.shape
    _, block_size, kv_heads, value_dim = value_pool.shape
    floats = (mx.float16, mx.bfloat16, mx.float32)
    same = key_pool.dtype == value_pool.dtype and key_pool.dtype in floats and queries.dtype in floats
    widest = max(key_dim, value_dim)
    if not same or key_dim % 8 or value_dim % 8 or widest > 512:
        return None
    width = 8 if widest <= 8 * SIMD else 16
    lanes = 1 << (-(-widest // width) - 1).bit_length()
    tensor = device == "cuda" and on_tensor_cores(queries, key_pool, value_pool)
    most_rows = TENSOR_ROWS if tensor else MOST_ROWS[device] * 8 // width
    queries_of_head = heads // kv_heads * length
    tiles = -(-queries_of_head // most_rows)
    if tiles > MOST_TILES[device] and not tensor:  # on CUDA, MLX's attention with a mask is never the faster one
        return None
    context = block_tables.shape[1] * block_size
    if window is not None:
        context = min(context, window + length - 1 + ALIGNMENT)
    groups = batch * kv_heads * tiles
    shortest = SHORTEST if groups < FULL else 4 * SHORTEST
    parts = max(min(WANTED[device] // groups, context // shortest), -(-context // (LONGEST - 64)))
    if parts > MOST_PARTS:
        return None
    return Plan(
        device=device,
        lanes=lanes,
        width=width,
        unroll=4 if width == 8 and key_pool.dtype.size == 2 else 2,
        rows=_rows(queries_of_head, most_rows),
        tiles=tiles,
        parts=parts,
        tensor=tensor,
    )


def on_tensor_cores(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether CUDA's tensor cores take arrays of these dtypes and last axes. Only they are fit for whole prompts."""
    widest = max(keys.shape[-1], values.shape[-1])
    return keys.dtype == values.dtype == queries.dtype != mx.float32 and widest <= TENSOR_WIDEST


def _rows(queries: int, most: int) -> int:
    """A power of two, or the most: each number of rows is a kernel that has to be compiled."""
    return min(1 << (queries - 1).bit_length(), most)


SECTIONS = {
    "partials": ("setup", "scalar", "finish"),
    "partials_tensor": ("setup", "tensor", "finish"),
    "merge": ("merge",),
}


@cache
def kernel(device: Literal["metal", "cuda"], name: str) -> Any:
    """One of the kernels in this operation's source for `device`. Compiled by MLX when it first runs."""
    build = mx.fast.metal_kernel if device == "metal" else mx.fast.cuda_kernel
    sections = dispatch.source("paged_attention.metal" if device == "metal" else "paged_attention.cu")
    header = sections["header"]
    if name == "partials_tensor":
        sections = sections | dispatch.source("paged_attention_tensor.cu")
        header += dispatch.source("tensor.cu")["header"] + sections["helpers"]
    partials = ["queries", "keys", "values", "block_tables", "lengths", "starts", "sinks", "constants"]
    return build(
        name=f"metalctl_paged_attention_{name}",
        input_names=["partial", "stats", "sinks"] if name == "merge" else partials,
        output_names=["output"] if name == "merge" else ["output", "stats"],
        source="".join(sections[section] for section in SECTIONS[name]),
        header=header,
    )


@cache
def constants(scale: float, softcap: float) -> mx.array:
    return mx.array([scale, softcap], dtype=mx.float32)


def paged(
    plan: Plan,
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
    """The kernels for Metal and CUDA, cut as `plan` says."""
    batch, heads, length, key_dim = queries.shape
    _, block_size, kv_heads, value_dim = value_pool.shape
    final = plan.parts == 1
    parts_dtype = queries.dtype if final else mx.float32
    logits = mx.zeros((1,), dtype=mx.float32) if sinks is None else sinks.astype(mx.float32)
    arrays = [queries, key_pool, value_pool, block_tables, lengths, lengths if starts is None else starts]
    output: mx.array
    output, stats = kernel(plan.device, "partials_tensor" if plan.tensor else "partials")(
        inputs=[*arrays, logits, constants(scale, softcap or 0.0)],
        template=[
            *(("T", queries.dtype), ("U", key_pool.dtype), ("OUT", parts_dtype), ("FINAL", final)),
            *(("KEY_DIM", key_dim), ("VALUE_DIM", value_dim), ("BLOCK_SIZE", block_size), ("WINDOW", window or 0)),
            *(("SOFTCAP", softcap is not None), ("SINKS", sinks is not None), ("STARTS", starts is not None)),
            *plan.template(),
        ],
        grid=(kv_heads * plan.tiles * SIMDS * SIMD, plan.parts, batch),
        threadgroup=(SIMDS * SIMD, 1, 1),
        output_shapes=[(batch, heads, length, plan.parts, size) for size in (value_dim, 2)],
        output_dtypes=[parts_dtype, mx.float32],
    )
    if final:
        return output.reshape(batch, heads, length, value_dim)
    return merge(plan, output, stats, logits, queries.dtype, sinks is not None)


def merge(
    plan: Plan, partial: mx.array, stats: mx.array, logits: mx.array, dtype: mx.Dtype, has_sinks: bool
) -> mx.array:
    """The output of each row from those of its parts: partial [B, Hq, L, parts, Dv], stats [B, Hq, L, parts, 2]."""
    *rows, _, value_dim = partial.shape
    options = [("SINKS", has_sinks), ("MOST_PARTS", MOST_PARTS), (plan.simds_name, SIMDS)]
    outputs: list[mx.array] = kernel(plan.device, "merge")(
        inputs=[partial, stats, logits],
        template=[("T", dtype), ("VALUE_DIM", value_dim), *options],
        grid=(math.prod(rows) * SIMDS * SIMD, 1, 1),
        threadgroup=(SIMDS * SIMD, 1, 1),
        output_shapes=[(*rows, value_dim)],
        output_dtypes=[dtype],
    )
    return outputs[0]
