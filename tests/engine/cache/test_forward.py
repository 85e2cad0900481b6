"""Where tokens are written and read: slot = table[position // size] * size + position % size."""

import random
from typing import Any

import mlx.core as mx
import pytest

from metalctl.engine.cache import forward
from metalctl.engine.cache.block_manager import BlockTable, Group
from metalctl.engine.cache.forward import Forward, GroupContext
from metalctl.engine.cache.layout import KVLayer
from metalctl.engine.cache.paged_kv import PagedKVCache
from tests.engine import tiny
from tests.engine.architectures import matching

SIZES = [8, 16, 32, 48]
WINDOWS = [None, 8, 20]


def slots(table: BlockTable, size: int, positions: range) -> list[int]:
    return [table.blocks[p // size - table.first] * size + p % size for p in positions]


def random_table(rng: random.Random, size: int, group: Group, offset: int, length: int) -> BlockTable:
    """Of a sequence with `offset` tokens that gets `length` more: blocks in one run or anywhere, the first of them the
    one that the window reaches, or an earlier one that has not been let go of yet."""
    first = max(0, group.first_visible(offset) // size - rng.choice([0, 0, 1]))
    count = -(-(offset + length) // size) - first
    if rng.random() < 0.5:
        start = rng.randrange(1, 60)
        return BlockTable(first, list(range(start, start + count)))
    return BlockTable(first, rng.sample(range(1, 90), count))


def as_slots(where: slice | mx.array) -> list[int]:
    return list(range(where.start, where.stop)) if isinstance(where, slice) else where.reshape(-1).tolist()


def read_slots(context: GroupContext, size: int) -> list[int]:
    if isinstance(context.read, slice):
        return as_slots(context.read)
    every = [block * size + i for block in context.read.reshape(-1).tolist() for i in range(size)]
    return every[context.skip : context.skip + context.length]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", SIZES)
def test_one_sequence_reads_what_is_visible_and_writes_what_is_new(size: int, window: int | None) -> None:
    rng = random.Random(size)
    group = Group(window)
    for _ in range(50):
        offset, length = rng.randrange(0, 200), rng.randrange(1, 60)
        table = random_table(rng, size, group, offset, length)
        context = forward.single([group], [table], size, offset, length, None).groups[0]
        assert as_slots(context.write) == slots(table, size, range(offset, offset + length))
        assert read_slots(context, size) == slots(table, size, range(group.first_visible(offset), offset + length))
        assert context.start == group.first_visible(offset)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", SIZES)
def test_a_batch_sees_each_rows_visible_tokens_and_no_padding(size: int, window: int | None) -> None:
    rng = random.Random(size)
    group = Group(window)
    for _ in range(20):
        offsets = [rng.randrange(0, 200) for _ in range(rng.randrange(1, 6))]
        tables = [random_table(rng, size, group, offset, 1) for offset in offsets]
        step = forward.batch([group], [[table] for table in tables], size, offsets, None)
        (context,) = step.groups
        assert step.offset.tolist() == offsets  # type: ignore[union-attr]
        assert context.write.tolist() == [  # type: ignore[union-attr]
            slots(table, size, range(offset, offset + 1))[0] for table, offset in zip(tables, offsets, strict=True)
        ]
        for row, (table, offset) in enumerate(zip(tables, offsets, strict=True)):
            blocks = context.read[row].tolist()  # type: ignore[index]
            every = [block * size + i for block in blocks for i in range(size)]
            seen = [slot for slot, yes in zip(every, context.mask[row, 0, 0].tolist(), strict=True) if yes]
            assert seen == slots(table, size, range(group.first_visible(offset), offset + 1))


@pytest.mark.parametrize("slot_rows", [False, True])
@pytest.mark.parametrize("size", [8, 48])
def test_tables_kept_between_steps_are_those_made_anew(size: int, slot_rows: bool) -> None:
    """Rows grow, let go of what their windows leave behind, join, leave, and begin again with other blocks."""
    rng = random.Random(size)
    groups = [Group(), Group(20)]
    kept = forward.BatchTables(groups, size)
    rows: list[tuple[list[int], list[BlockTable]]] = []
    for _ in range(300):
        if not rows or rng.random() < 0.1:
            rows.insert(rng.randint(0, len(rows)), ([rng.randrange(100)], [BlockTable(), BlockTable()]))
        elif rng.random() < 0.1:
            rows.pop(rng.randrange(len(rows)))
        elif rng.random() < 0.1:
            rows[rng.randrange(len(rows))] = ([rng.randrange(100)], [BlockTable(), BlockTable()])
        for (offset,), tables in rows:
            for group, table in zip(groups, tables, strict=True):
                advance(rng, table, size, group, offset)
        if not rows:
            continue
        tables, offsets = [tables for _, tables in rows], [offset for (offset,), _ in rows]
        slots = rng.sample(range(1, 50), len(rows)) if slot_rows else None
        step = kept.arrays(tables, offsets, slots).forward(groups, size)
        fresh = forward.batch(groups, tables, size, offsets, slots)
        assert same(step.slots, fresh.slots)
        assert same(step.offset, fresh.offset)
        for mine, other in zip(step.groups, fresh.groups, strict=True):
            assert same(mine.read, other.read)
            assert same(mine.write, other.write)
            assert same(mine.mask, other.mask)
            assert all(map(same, mine.in_place, other.in_place))
        for offset, _ in rows:
            offset[0] += rng.choice([1, 1, 1, 2])  # 2: a step by itself in between


def advance(rng: random.Random, table: BlockTable, size: int, group: Group, offset: int) -> None:
    """Hold what a token at `offset` reads and writes, and nothing that it does not."""
    first = group.first_visible(offset) // size
    if not table.blocks:
        table.first = first
    while table.first < first:
        table.blocks.pop(0)
        table.first += 1
    while table.end * size <= offset:
        table.blocks.append(rng.randrange(1, 1000))


def same(one: Any, other: Any) -> bool:
    return one is other or bool(mx.array_equal(one, other))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [[3, 1, 7], [5, 5], [20]])
def test_a_batch_of_several_tokens_a_row_writes_each_where_it_belongs(lengths: list[int], window: int | None) -> None:
    rng = random.Random(len(lengths))
    size, group, longest = 8, Group(window), max(lengths)
    offsets = [rng.randrange(0, 100) for _ in lengths]
    tables = [random_table(rng, size, group, at, length) for at, length in zip(offsets, lengths, strict=True)]
    (context,) = forward.batch([group], [[table] for table in tables], size, offsets, None, lengths).groups
    written = context.write.reshape(len(lengths), longest).tolist()  # type: ignore[union-attr]
    for row, (table, at, length) in enumerate(zip(tables, offsets, lengths, strict=True)):
        assert written[row] == [0] * (longest - length) + slots(table, size, range(at, at + length))
        blocks = context.read[row].tolist()  # type: ignore[index]
        every = [block * size + i for block in blocks for i in range(size)]
        for column in range(longest - length, longest):
            position = at + column - (longest - length)
            sees = context.mask[row, 0, column].tolist()  # type: ignore[index]
            seen = [slot for slot, yes in zip(every, sees, strict=True) if yes]
            assert seen == slots(table, size, range(group.first_visible(position), position + 1))


@pytest.mark.parametrize("window", WINDOWS)
def test_what_was_written_is_read_again(window: int | None) -> None:
    rng = random.Random(0)
    size, group = 8, Group(window)
    cache = PagedKVCache(KVLayer(0, (2, 4), (2, 3), mx.float32), size)
    cache.resize(40)
    keys, values = mx.random.normal((1, 2, 90, 4)), mx.random.normal((1, 2, 90, 3))
    blocks = rng.sample(range(1, 40), 12)
    at = 0
    while at < 90:
        length = min(rng.choice([1, 1, 3, 7, 8, 20]), 90 - at)
        first = group.first_visible(at) // size
        table = BlockTable(first, blocks[first : -(-(at + length) // size)])
        cache.begin(forward.single([group], [table], size, at, length, None))
        got = cache.update_and_fetch(keys[:, :, at : at + length], values[:, :, at : at + length])
        start = group.first_visible(at)
        assert mx.array_equal(got[0], keys[:, :, start : at + length])
        assert mx.array_equal(got[1], values[:, :, start : at + length])
        at += length


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_what_no_row_sees_is_read_as_zero_whatever_it_is(dtype: mx.Dtype) -> None:
    size, group = 8, Group(10)
    cache = PagedKVCache(KVLayer(0, (2, 4), (2, 3), dtype), size)
    cache.resize(12)
    for index, value in enumerate((mx.nan, mx.inf)):
        cache.pools[index][:] = mx.array(value, dtype)
    tables, offsets = [BlockTable(1, [5, 6]), BlockTable(0, [7, 2])], [22, 9]
    context = forward.batch([group], [[table] for table in tables], size, offsets, None).groups[0]
    for row, table in enumerate(tables):
        seen = slots(table, size, range(group.first_visible(offsets[row]), offsets[row] + 1))
        for pool in cache.pools:
            pool[mx.array(seen)] = mx.array(row + 1, dtype)
    cache.begin(forward.batch([group], [[table] for table in tables], size, offsets, None))
    for got in (cache._read(pool, context) for pool in cache.pools):
        expected = mx.where(context.mask, mx.array([[[[1]]], [[[2]]]]), 0).swapaxes(2, 3)
        assert got.dtype == dtype
        assert mx.array_equal(got, mx.broadcast_to(expected, got.shape))


class Counting:
    """mlx.core, with a count of the arrays that are made from Python's numbers."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def array(self, *values: Any) -> mx.array:
        self.count += 1
        return mx.array(*values)


def test_tables_and_slots_become_arrays_once_a_step_and_not_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (2, 6):
        engine = matching.engine_of(tiny.build("qwen3", num_hidden_layers=layers))
        counting = Counting()
        monkeypatch.setattr(forward, "mx", counting)
        matching.run(engine, {"one": (0, 20), "two": (0, 9)}, count=4)
        counts.append(counting.count)
    assert counts[0] == counts[1] > 0


def test_the_offset_counts_the_new_tokens_once_they_are_written() -> None:
    cache = PagedKVCache(KVLayer(0, (1, 4), (1, 4), mx.float32), 8)
    cache.resize(4)
    step: Forward = forward.single([Group()], [BlockTable(0, [1, 2])], 8, 5, 4, None)
    cache.begin(step)
    assert cache.offset == 5
    cache.update_and_fetch(mx.ones((1, 1, 4, 4)), mx.ones((1, 1, 4, 4)))
    assert cache.offset == 9
