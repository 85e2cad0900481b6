"""How fast each kernel runs here, as a share of what the memory can do, and how far it is from its reference."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metalctl.kernels import append_rows, dispatch, linear_rows, paged_attention, quantized_rows, recurrent

FEW = 2  # sequences that are compared with the reference, which needs much memory
EXACT_ENOUGH = 2e-6  # in float32


@dataclass(frozen=True, slots=True)
class Prepared:
    """The inputs are there. `run` computes the whole; the others the part that is compared."""

    run: Callable[[], mx.array]
    ours: Callable[[], mx.array]
    plain: Callable[[], mx.array]  # by MLX's own operations, in the same dtype
    exact: Callable[[], mx.array]  # by the reference, in float32


@dataclass(frozen=True, slots=True)
class Case:
    operation: str  # as `dispatch` knows it
    name: str
    bytes: int  # that have to be read and written at the least
    prepare: Callable[[], Prepared]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a case took. Errors are the largest absolute difference from the reference in float32."""

    operation: str
    name: str
    body: str
    seconds: float
    bytes_per_second: float
    share: float  # of the bandwidth that a copy reaches here
    error: float
    plain_error: float

    @property
    def sound(self) -> bool:
        """At most twice as far off as MLX's own operations in the same dtype."""
        return self.error <= max(2 * self.plain_error, EXACT_ENOUGH)


def measure(cases: Sequence[Case] | None = None, bandwidth: float | None = None) -> Iterator[Measurement]:
    """Runs each case (None: those of this platform) with the body that `dispatch` chooses.

    bandwidth    in bytes a second; None: measured first
    """
    bandwidth = bandwidth or copy_bandwidth()
    for case in default_cases() if cases is None else cases:
        work = case.prepare()
        exact = work.exact()
        errors = distance(work.ours(), exact), distance(work.plain(), exact)
        del exact
        seconds = seconds_per_call(work.run)
        speed = case.bytes / seconds
        body = dispatch.body(case.operation)
        yield Measurement(case.operation, case.name, body, seconds, speed, speed / bandwidth, *errors)


def default_cases() -> list[Case]:
    """The cases for this platform: what its kernels are for, as large as they get."""
    if dispatch.platform() == "cpu":
        return [
            attention("1 x 2048, 9/3 heads of 64", 1, 2048, heads=9, kv_heads=3, head_dim=64, dtype=mx.float32),
            attention("4 x 512, 32/8 heads of 128", 4, 512, dtype=mx.float32),
        ]
    cases = [
        attention("32 x 8192, 32/8 heads of 128", 32, 8192),
        attention("1 x 65536, 32/8 heads of 128", 1, 65536),
        attention("8 x 2048, 32/8 heads of 128", 8, 2048),
        attention("1 x 2048, 32/8 heads of 128", 1, 2048),
        attention("32 x 512, 16/8 heads of 128", 32, 512, heads=16),
        attention("32 x 8192, 64/8 heads of 64", 32, 8192, heads=64, head_dim=64),
        attention("16 x 8192, 16/8 heads of 256", 16, 8192, heads=16, head_dim=256),
        attention("32 x 8192, window 1024", 32, 8192, window=1024),
        attention("8 x 8192, 4 queries each", 8, 8192, length=4),
    ]
    if dispatch.platform() == "cuda":
        cases += [products("1024 x 2 x 3072", rows, 1024, (3072, 3072)) for rows in (1, 8, 32)]
        cases += [products("4096 x 2048", 32, 4096, (2048,)), appended("32/8 heads of 128", 32)]
        cases += [quantised("4096 x 12288, 4 bits", rows) for rows in (1, 4, 16, 32)]
        cases += [delta("32 heads of 128 x 128", 1, 512), delta("32 heads of 128 x 128", 32, 1)]
        cases += [space("64 heads of 64 x 128", 32)]
    return cases


def attention(
    name: str,
    batch: int,
    context: int,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    length: int = 1,
    dtype: mx.Dtype = mx.bfloat16,
    block_size: int = 16,
    window: int | None = None,
) -> Case:
    """Paged attention of the last `length` of `context` tokens in each of `batch` sequences, blocks in random order."""
    seen = min(context, (window or context) + length - 1)
    columns = -(-context // block_size)

    def prepare() -> Prepared:
        pool = (batch * columns + 1, block_size, kv_heads, head_dim)
        tables = mx.random.permutation(batch * columns).reshape(batch, columns) + 1
        queries = mx.random.normal((batch, heads, length, head_dim)).astype(dtype)
        keys, values = (mx.random.normal(pool, dtype=dtype) for _ in range(2))
        rest = [tables.astype(mx.int32), mx.full((batch,), context, dtype=mx.int32)]
        scale = head_dim**-0.5
        mx.eval(queries, keys, values, rest)

        def attend(queries: mx.array, tables: mx.array, lengths: mx.array) -> mx.array:
            inputs = (queries, keys, values, tables, lengths)
            return paged_attention.paged_attention(*inputs, scale=scale, window=window)

        def by(body: Callable[..., mx.array], queries: mx.array) -> mx.array:
            return body(queries, keys, values, few[1], few[2], scale, window, None, None, None)

        few = (queries[:FEW], rest[0][:FEW], rest[1][:FEW])
        compiled = mx.compile(attend)
        return Prepared(
            run=lambda: compiled(queries, *rest),
            ours=lambda: attend(*few),
            plain=lambda: by(paged_attention.plain, few[0]),
            exact=lambda: by(paged_attention.reference, few[0].astype(mx.float32)),
        )

    return Case("paged_attention", name, 2 * batch * seen * kv_heads * head_dim * dtype.size, prepare)


def quantised(name: str, rows: int, width: int = 4096, columns: int = 12288, group_size: int = 64) -> Case:
    """`rows` rows times a 4-bit matrix."""

    def prepare() -> Prepared:
        x = mx.random.normal((rows, width)).astype(mx.bfloat16)
        matrix = mx.quantize(mx.random.normal((columns, width), dtype=mx.bfloat16), group_size, 4)
        weight, scales, biases = matrix
        mx.eval(x, matrix)

        def multiply(x: mx.array) -> mx.array:
            return quantized_rows.quantized_rows(x, weight, scales, biases, group_size=group_size, bits=4)

        def exact() -> mx.array:
            wide = x.astype(mx.float32)
            return quantized_rows.reference(wide, weight, scales, biases, group_size=group_size, bits=4)

        compiled = mx.compile(multiply)
        return Prepared(
            run=lambda: compiled(x),
            ours=lambda: multiply(x),
            plain=lambda: x @ mx.dequantize(weight, scales, biases, group_size=group_size, bits=4).T,
            exact=exact,
        )

    size = width * columns // 2 + width * columns // group_size * 4
    return Case("quantized_rows", f"{rows} x {name}", size, prepare)


def products(name: str, rows: int, width: int, columns: Sequence[int]) -> Case:
    """`rows` rows times 16-bit matrices."""

    def prepare() -> Prepared:
        x = mx.random.normal((rows, width)).astype(mx.bfloat16)
        weights = [mx.random.normal((n, width), dtype=mx.bfloat16) for n in columns]
        mx.eval(x, weights)

        def joined(results: list[mx.array]) -> mx.array:
            return mx.concatenate(results, axis=-1)

        def exact() -> mx.array:
            return joined(linear_rows.reference(x.astype(mx.float32), [w.astype(mx.float32) for w in weights]))

        compiled = mx.compile(lambda x: linear_rows.linear_rows(x, weights)[0])
        return Prepared(
            run=lambda: compiled(x),
            ours=lambda: joined(linear_rows.linear_rows(x, weights)),
            plain=lambda: joined(linear_rows.reference(x, weights)),
            exact=exact,
        )

    return Case("linear_rows", f"{rows} x {name}", 2 * width * sum(columns), prepare)


def appended(name: str, rows: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> Case:
    """A new token of each of `rows` sequences, normed, rotated and put into the pools."""

    def prepare() -> Prepared:
        new = [mx.random.normal((rows, n * head_dim)).astype(mx.bfloat16) for n in (heads, kv_heads, kv_heads)]
        pools = [mx.zeros((16 * rows + 1, kv_heads, head_dim), mx.bfloat16) for _ in range(2)]
        slots, positions = mx.arange(1, rows + 1, dtype=mx.int32), mx.arange(rows, dtype=mx.int32) * 16
        frequencies = 1e-6 ** (mx.arange(head_dim // 2) * 2 / head_dim)
        norms = (mx.random.normal((head_dim,)), mx.random.normal((head_dim,)), mx.array([1e-6]))
        mx.eval(new, pools, slots, positions, frequencies, norms)

        def flat(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            return mx.concatenate([part.reshape(rows, -1) for part in (queries, keys[slots], values[slots])], axis=-1)

        def by(body: Callable[..., Any], arrays: list[mx.array]) -> Any:
            return body(*arrays, slots, positions, frequencies, traditional=False, norms=norms)

        def plain() -> mx.array:
            return flat(*by(append_rows.reference, [*new, *pools]))

        def exact() -> mx.array:
            return flat(*by(append_rows.reference, [array.astype(mx.float32) for array in (*new, *pools)]))

        def run() -> mx.array:
            queries: mx.array = by(append_rows.append_rows, [*new, *pools])
            return queries

        def ours() -> mx.array:
            queries = run()
            mx.eval(queries)  # and with it what was written to the pools
            return flat(queries, *pools)

        if not append_rows.applies(new[0], *pools):
            return Prepared(run=plain, ours=plain, plain=plain, exact=exact)
        return Prepared(run=run, ours=ours, plain=plain, exact=exact)

    return Case("append_rows", f"{rows} x {name}", 2 * 2 * rows * (heads + 2 * kv_heads) * head_dim, prepare)


def delta(name: str, batch: int, tokens: int, key_heads: int = 16, heads: int = 32, size: int = 128) -> Case:
    """The gated delta rule over `tokens` tokens."""

    def prepare() -> Prepared:
        q, k = (mx.random.normal((batch, tokens, key_heads, size)) * size**-0.5 for _ in range(2))
        v, g = mx.random.normal((batch, tokens, heads, size)), mx.random.uniform(0.9, 1.0, (batch, tokens, heads))
        beta, state = mx.random.uniform(shape=(batch, tokens, heads)), mx.random.normal((batch, heads, size, size))
        narrow = [part.astype(mx.bfloat16) for part in (q, k, v)]
        rest = [g, beta, state]
        mx.eval(narrow, rest)
        compiled = mx.compile(lambda *inputs: recurrent.gated_delta(*inputs)[0])
        return Prepared(
            run=lambda: compiled(*narrow, *rest),
            ours=lambda: recurrent.gated_delta(*narrow, *rest)[0],
            plain=lambda: recurrent.gated_delta_reference(*narrow, *rest)[0],
            exact=lambda: recurrent.gated_delta_reference(*(part.astype(mx.float32) for part in narrow), *rest)[0],
        )

    moved = 2 * batch * heads * size * size * 4 + 2 * batch * tokens * size * (2 * key_heads + 2 * heads)
    return Case("gated_delta", f"{batch} x {tokens} tokens, {name}", moved, prepare)


def space(name: str, batch: int, heads: int = 64, head_dim: int = 64, state_dim: int = 128, groups: int = 8) -> Case:
    """One token of Mamba-2's recurrence in each of `batch` sequences."""

    def prepare() -> Prepared:
        x = mx.random.normal((batch, 1, heads, head_dim))
        b, c = (mx.random.normal((batch, 1, groups, state_dim)) for _ in range(2))
        a_log, d, dt = (
            mx.random.normal((heads,)),
            mx.random.normal((heads,)),
            mx.random.uniform(shape=(batch, 1, heads)),
        )
        state = mx.random.normal((batch, heads, head_dim, state_dim))
        wide = [x, a_log, b, c, d, dt, state]
        narrow = [part.astype(mx.bfloat16) if part is x or part is b or part is c else part for part in wide]
        mx.eval(narrow)
        compiled = mx.compile(lambda *inputs: recurrent.state_space_step(*inputs)[1])
        return Prepared(
            run=lambda: compiled(*narrow),
            ours=lambda: recurrent.state_space_step(*narrow)[1],
            plain=lambda: recurrent.state_space_reference(*narrow)[1],
            exact=lambda: recurrent.state_space_reference(*(part.astype(mx.float32) for part in narrow))[1],
        )

    return Case("state_space", f"{batch} x {name}", 2 * batch * heads * head_dim * state_dim * 4, prepare)


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


def copy_bandwidth(size: int | None = None) -> float:
    """Bytes a second, read and written, of a copy of `size` bytes: by the device, or by this thread on a CPU."""
    if dispatch.platform() == "cpu":
        return _host_copy_bandwidth(size or 1 << 28)
    size = size or 4 << 30
    source = mx.random.normal((size // 4,))
    mx.eval(source)
    return 2 * size / seconds_per_call(lambda: -source)


def _host_copy_bandwidth(size: int) -> float:
    source, target = bytearray(size), bytearray(size)
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        target[:] = source
        rounds.append(time.perf_counter() - start)
    return 2 * size / min(rounds)


def distance(output: mx.array, exact: mx.array) -> float:
    """The largest absolute difference; infinite where one is not a number."""
    difference = mx.abs(output.astype(mx.float32) - exact)
    largest = mx.where(mx.isnan(difference), mx.inf, difference).max().item()
    assert isinstance(largest, float)
    return largest
