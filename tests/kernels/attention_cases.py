"""Random inputs for paged attention, and how far a body may be from the reference."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from metalctl.kernels.paged_attention import plain, reference


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] = (3, 300, 37)  # tokens of each row; more than 256 makes the kernels split the context
    length: int = 1  # queries a row
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    dtype: mx.Dtype = mx.float16
    query_dtype: mx.Dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    starts: bool = False  # leave the blocks out that no query sees any more

    def __str__(self) -> str:
        usual = vars(Case())
        changed = [f"{name}={value}" for name, value in vars(self).items() if str(value) != str(usual[name])]
        return " ".join(changed).replace("mlx.core.", "") or "default"


@dataclass(frozen=True)
class Inputs:
    arrays: tuple[mx.array, ...]  # queries, pools, tables, lengths
    options: dict[str, Any] = field(default_factory=dict)

    def errors(self, output: mx.array) -> tuple[float, float]:
        """The largest difference from the reference in float32: of `output`, and of MLX's own operations."""
        queries, *pools = self.arrays
        exact = reference(queries.astype(mx.float32), *pools, **self.options)
        return distance(output, exact), distance(plain(queries, *pools, **self.options), exact)


def distance(output: mx.array, exact: mx.array) -> float:
    difference = mx.abs(output.astype(mx.float32) - exact)
    return float(mx.where(mx.isnan(difference), mx.inf, difference).max().item())


def make(case: Case, seed: int = 0) -> Inputs:
    """Blocks in random order. Block 0, and every slot that a row must not read, hold what would show in the output."""
    mx.random.seed(seed)
    batch, size = len(case.lengths), case.block_size
    columns = -(-max(case.lengths) // size)
    pool = (batch * columns + 1, size, case.kv_heads)
    tables = (mx.random.permutation(batch * columns).reshape(batch, columns) + 1).astype(mx.int32)
    used = mx.arange(columns) * size < mx.array(case.lengths)[:, None]
    tables = mx.where(used, tables, 0)
    starts = None
    if case.starts:
        assert case.window is not None
        first = [max(0, tokens - case.length - case.window + 1) // size for tokens in case.lengths]
        starts = mx.array(first, dtype=mx.int32) * size
        width = max(-(-tokens // size) - start for tokens, start in zip(case.lengths, first, strict=True))
        padded = mx.pad(tables, ((0, 0), (0, columns)))
        tables = mx.stack([padded[row, start : start + width] for row, start in enumerate(first)])
    value_dim = case.value_dim or case.key_dim
    sinks = 2 * mx.random.normal((case.heads,)) if case.sinks else None
    keys = mx.random.normal((*pool, case.key_dim)).astype(case.dtype)
    values = mx.random.normal((*pool, value_dim)).astype(case.dtype)
    queries = mx.random.normal((batch, case.heads, case.length, case.key_dim)).astype(case.query_dtype or case.dtype)
    keys[0], values[0] = 20, 50
    return Inputs(
        (queries, keys, values, tables, mx.array(case.lengths, dtype=mx.int32)),
        {
            "scale": case.key_dim**-0.5,
            "window": case.window,
            "softcap": case.softcap,
            "sinks": sinks,
            "starts": starts,
        },
    )
