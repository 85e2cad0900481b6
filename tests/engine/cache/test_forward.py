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
