"""How fast each kernel runs here, as a share of what the memory can do, and how far it is from its reference."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from metalctl.kernels import dispatch
from metalctl.kernels.paged_attention import paged_attention, plain, reference

SMALL_BATCH = 2  # rows of a case that are compared with the reference, which needs much memory


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch of `batch` sequences of `context` tokens, the last `length` of which are queries."""

    name: str
    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    length: int = 1
    dtype: mx.Dtype = mx.bfloat16
    block_size: int = 16
    window: int | None = None

    @property
    def bytes(self) -> int:
        """What has to be read at the least: the keys and values that some query sees."""
        seen = min(self.context, (self.window or self.context) + self.length - 1)
        return 2 * self.batch * seen * self.kv_heads * self.head_dim * self.dtype.size


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a case took. Errors are the largest absolute difference from the reference in float32."""

    case: AttentionCase
    body: str
    seconds: float
    gbytes_per_second: float
    share: float  # of the bandwidth that a copy reaches here
    error: float
    plain_error: float

    @property
    def sound(self) -> bool:
        """At most twice as far off as MLX's own operations in the same dtype."""
        return self.error <= max(2 * self.plain_error, 2e-6)


CASES: tuple[AttentionCase, ...] = (
    AttentionCase("32 x 8192, 32/8 heads of 128", 32, 8192),
    AttentionCase("1 x 65536, 32/8 heads of 128", 1, 65536),
    AttentionCase("8 x 2048, 32/8 heads of 128", 8, 2048),
    AttentionCase("1 x 2048, 32/8 heads of 128", 1, 2048),
    AttentionCase("32 x 512, 16/8 heads of 128", 32, 512, heads=16),
    AttentionCase("32 x 8192, 64/8 heads of 64", 32, 8192, heads=64, head_dim=64),
    AttentionCase("16 x 8192, 16/8 heads of 256", 16, 8192, heads=16, head_dim=256),
    AttentionCase("32 x 8192, window 1024", 32, 8192, window=1024),
    AttentionCase("8 x 8192, 4 queries each", 8, 8192, length=4),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    queries: mx.array
    key_pool: mx.array
    value_pool: mx.array
    block_tables: mx.array
    lengths: mx.array
    options: dict[str, Any] = field(default_factory=dict)

    def attend(self) -> mx.array:
        return _attend(self.options)(self.queries, self.key_pool, self.value_pool, self.block_tables, self.lengths)

    def compiled(self) -> Callable[[], mx.array]:
        """`attend` as part of a compiled step, where Python's own time does not count."""
        call = mx.compile(_attend(self.options))
        return lambda: call(self.queries, self.key_pool, self.value_pool, self.block_tables, self.lengths)

    def first(self, rows: int) -> "Inputs":
        cut = (self.queries[:rows], self.key_pool, self.value_pool, self.block_tables[:rows], self.lengths[:rows])
        return Inputs(*cut, self.options)


def _attend(options: dict[str, Any]) -> Callable[..., mx.array]:
    def attend(queries: mx.array, *pools: mx.array) -> mx.array:
        return paged_attention(queries, *pools, scale=queries.shape[-1] ** -0.5, **options)

    return attend


def make_inputs(case: AttentionCase) -> Inputs:
    """Random pools, blocks in random order."""
    blocks = -(-case.context // case.block_size)
    pool = (case.batch * blocks + 1, case.block_size, case.kv_heads, case.head_dim)
    tables = mx.random.permutation(case.batch * blocks).reshape(case.batch, blocks) + 1
    inputs = Inputs(
        mx.random.normal((case.batch, case.heads, case.length, case.head_dim)).astype(case.dtype),
        mx.random.normal(pool, dtype=case.dtype),
        mx.random.normal(pool, dtype=case.dtype),
        tables.astype(mx.int32),
        mx.full((case.batch,), case.context, dtype=mx.int32),
        {"window": case.window},
    )
    mx.eval(inputs.queries, inputs.key_pool, inputs.value_pool, inputs.block_tables, inputs.lengths)
    return inputs


def seconds_per_call(call: Callable[[], mx.array], at_least: float = 0.1) -> float:
    """The median over five rounds of calls that are evaluated together, so that launches do not count."""
    mx.eval(call())
    start = time.perf_counter()
    mx.eval(call())
    once = time.perf_counter() - start
    calls = max(1, min(64, int(at_least / 5 / once)))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval([call() for _ in range(calls)])
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[2]


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of an element-wise operation over `size` bytes."""
    source = mx.random.normal((size // 4,))
    mx.eval(source)
    return 2 * size / seconds_per_call(lambda: -source)


def errors(inputs: Inputs) -> tuple[float, float]:
    """Of the chosen body, and of MLX's own operations in the same dtype."""
    few = inputs.first(SMALL_BATCH)
    window = few.options.get("window")

    def by(body: Callable[..., mx.array], queries: mx.array) -> mx.array:
        scale = queries.shape[-1] ** -0.5
        pools = (few.key_pool, few.value_pool, few.block_tables, few.lengths)
        return body(queries, *pools, scale, window, None, None, None)

    exact = by(reference, few.queries.astype(mx.float32))
    common = by(plain, few.queries)
    ours = few.attend()
    return _distance(ours, exact), _distance(common, exact)


def measure(cases: Sequence[AttentionCase] = CASES, bandwidth: float | None = None) -> Iterator[Measurement]:
    """Runs each case with the body that `dispatch` chooses. `bandwidth` in bytes a second; None: measured first."""
    bandwidth = bandwidth or copy_bandwidth()
    for case in cases:
        inputs = make_inputs(case)
        error, plain_error = errors(inputs)
        seconds = seconds_per_call(inputs.compiled())
        speed = case.bytes / seconds
        body = dispatch.body("paged_attention")
        yield Measurement(case, body, seconds, speed / 1e9, speed / bandwidth, error, plain_error)


def _distance(output: mx.array, exact: mx.array) -> float:
    largest = mx.abs(output.astype(mx.float32) - exact).max().item()
    assert isinstance(largest, float)
    return largest
