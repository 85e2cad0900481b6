"""What the cache objects of all layers share during one forward: built once, read by every layer."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np

from metalctl.engine.cache.block_manager import BlockTable, Group
from metalctl.engine.cache.block_pool import NULL


@dataclass(frozen=True, slots=True)
class Paged:
    """What attention needs that reads the pool by itself (see `metalctl.kernels.paged_attention`), all int32: block
    tables `[B, num_blocks]`, lengths `[B]` with the new tokens, the position of each table's first slot `[B]`."""

    block_tables: mx.array
    lengths: mx.array
    starts: mx.array | None


@dataclass(frozen=True)
class GroupContext:
    """Where one group's layers write the new tokens and what they read.

    `write`: the pool's token slots for the new tokens, `[B * L]` int32, or a slice where they are consecutive.
    `read`: a slice of token slots (one sequence, consecutive blocks), or block ids `[B, num_blocks]` int32.
    `start`: the token position of the first slot that is read; `length`: how many are read (padding included).
    `mask`: for a batch, which of them each row may see, `[B, 1, 1, length]` bool; None where all of them.
    """

    window: int | None
    block_size: int
    write: slice | mx.array
    read: slice | mx.array
    start: int
    length: int
    skip: int = 0  # leading tokens of the first block read that the window no longer covers
    mask: mx.array | None = None
    blocks: tuple[int, ...] = ()  # of the one sequence
    tables: Paged | None = None  # of a batch

    @cached_property
    def paged(self) -> Paged:
        """Made when the first layer asks for it, and read by all."""
        if self.tables is not None:
            return self.tables
        first = self.start // self.block_size * self.block_size
        return Paged(
            mx.array([self.blocks], mx.int32),
            mx.array([self.start + self.length], mx.int32),
            mx.array([first], mx.int32) if first else None,
        )

    @cached_property
    def in_place(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """See PagedKVCache.in_place. Made when the first layer asks for it, and read by all."""
        paged = self.paged
        lengths = paged.lengths if paged.starts is None else paged.lengths - paged.starts
        if not isinstance(self.write, slice):
            return self.write, paged.block_tables, lengths, paged.lengths - self.write.size // len(paged.lengths)
        slots = mx.array(np.arange(self.write.start, self.write.stop, dtype=np.int32))
        return slots, paged.block_tables, lengths, paged.lengths - slots.size


@dataclass(frozen=True, slots=True)
class Forward:
    """One call of the model: B sequences, L new tokens each.

    `offset`: tokens that are in the cache already; an int for one sequence, int32 `[B]` for a batch.
    """

    batch_size: int
    length: int
    offset: int | mx.array
    groups: tuple[GroupContext, ...]
    slots: mx.array | None = None  # [B] int32, recurrent-state slots
    fresh: bool = False  # a sequence that has no past: recurrent layers start from their own initial state
    masks: list[tuple[mx.array, int | None]] = field(default_factory=list)  # handed out, each with its window

    @property
    def is_batch(self) -> bool:
        """Whether it is made of padded rows (also if there is one), with what each may see in a mask."""
        return not isinstance(self.offset, int)


def single(
    groups: Many[Group], tables: Many[BlockTable], block_size: int, offset: int, length: int, slot: int | None
) -> Forward:
    """The forward of `length` new tokens of one sequence that has `offset` in the cache."""
    contexts = tuple(
        _single_group(group, table, block_size, offset, length) for group, table in zip(groups, tables, strict=True)
    )
    slots = None if slot is None else mx.array([slot], mx.int32)
    return Forward(1, length, offset, contexts, slots, fresh=offset == 0)


def batch(
    groups: Many[Group],
    tables: Many[Many[BlockTable]],
    block_size: int,
    offsets: Many[int],
    slots: Many[int] | None,
    lengths: Many[int] | None = None,
) -> Forward:
    """The forward of one new token each of several sequences, or of `lengths` many; `tables[b][g]` is row b's table in
    group g."""
    arrays = BatchArrays.of(groups, tables, block_size, offsets, slots, lengths)
    return arrays.forward(groups, block_size, max(lengths or (1,)))


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """All that a forward of a batch depends on beside the tokens, int32. With rows and tables padded to a few sizes,
    the same shapes come again and again, and the forward can be compiled for them.

    Rows with fewer new tokens than the longest are padded in front. `offsets` `[B]` is the position of each row's first
    column, padding included (below zero where that is longer than the past); `firsts` `[B]` that of its first new
    token. `slots` `[B]` or None; for each group `writes` `[B * L]`, `blocks` `[B, width]`, `starts` `[B]`.
    """

    offsets: mx.array
    firsts: mx.array
    slots: mx.array | None
    writes: tuple[mx.array, ...]
    blocks: tuple[mx.array, ...]
    starts: tuple[mx.array, ...]

    @classmethod
    def of(
        cls,
        groups: Many[Group],
        tables: Many[Many[BlockTable]],
        block_size: int,
        offsets: Many[int],
        slots: Many[int] | None,
        lengths: Many[int] | None = None,
        padded: Callable[[int], int] = int,
        rows: int = 0,
    ) -> "BatchArrays":
        """`padded` gives the width that a table of so many blocks gets; further rows up to `rows` are padding, which
        reads and writes the null entries."""
        lengths = lengths or [1] * len(offsets)
        longest = max(lengths)
        missing = [0] * max(0, rows - len(offsets))
        writes, blocks, starts = [], [], []
        for index, group in enumerate(groups):
            reached = [
                _reach(group, row[index], block_size, at, length)
                for row, at, length in zip(tables, offsets, lengths, strict=True)
            ]
            width = padded(max(len(reach) for reach, _, _ in reached))
            table = np.full((len(offsets) + len(missing), width), NULL, np.int32)
            write = np.full((len(offsets) + len(missing), longest), NULL, np.int32)
            for row, (reach, _, new) in enumerate(reached):
                table[row, : len(reach)] = reach
                write[row, longest - len(new) :] = new
            blocks.append(mx.array(table))
            starts.append(mx.array([start for _, start, _ in reached] + missing, mx.int32))
            writes.append(mx.array(write.reshape(-1)))
        first_columns = [at - (longest - length) for at, length in zip(offsets, lengths, strict=True)]
        return cls(
            mx.array([*first_columns, *missing], mx.int32),
            mx.array([*offsets, *missing], mx.int32),
            None if slots is None else mx.array([*slots, *missing], mx.int32),
            tuple(writes),
            tuple(blocks),
            tuple(starts),
        )

    def forward(self, groups: Many[Group], block_size: int, length: int = 1) -> Forward:
        """`length` is L, the new tokens of the longest row."""
        arrays = zip(groups, self.writes, self.blocks, self.starts, strict=True)
        contexts = tuple(self._context(group, block_size, length, *rest) for group, *rest in arrays)
        return Forward(self.offsets.shape[0], length, self.offsets, contexts, self.slots)

    def _context(
        self, group: Group, block_size: int, length: int, write: mx.array, blocks: mx.array, starts: mx.array
    ) -> GroupContext:
        count = blocks.shape[1] * block_size
        slot = mx.arange(count, dtype=mx.int32)[None, None]
        query = (self.offsets - starts)[:, None, None] + mx.arange(length, dtype=mx.int32)[None, :, None]
        mask = slot <= query
        if group.window is not None:
            mask = mask & (slot > query - group.window)
        if length > 1:  # a column of padding sees one slot, so that its softmax is finite
            padding = query < (self.firsts - starts)[:, None, None]
            mask = mx.where(padding, slot == 0, mask)
        tables = Paged(blocks, self.offsets + length, None if group.window is None else starts)
        return GroupContext(group.window, block_size, write, blocks, 0, count, mask=mask[:, None], tables=tables)


def _reach(
    group: Group, table: BlockTable, block_size: int, offset: int, length: int
) -> tuple[list[int], int, list[int]]:
    """Of a row whose new tokens stand at `offset` and behind: the blocks it reads, the position of their first slot,
    and the token slots it writes."""
    first = group.first_visible(offset) // block_size
    write = _token_slots(table, block_size, range(offset, offset + length))
    return table.blocks[first - table.first :], first * block_size, write


def _single_group(group: Group, table: BlockTable, block_size: int, offset: int, length: int) -> GroupContext:
    first = group.first_visible(offset)
    last = offset + length
    blocks = table.blocks[first // block_size - table.first :]
    skip = first % block_size
    if _consecutive(blocks):
        base = blocks[0] * block_size + skip - first  # the pool's slot of token position 0, were it there
        read: slice | mx.array = slice(base + first, base + last)
        write: slice | mx.array = slice(base + offset, base + last)
        skip = 0
    else:
        read = mx.array([blocks], mx.int32)
        write = mx.array(_token_slots(table, block_size, range(offset, last)), mx.int32)
    return GroupContext(group.window, block_size, write, read, first, last - first, skip, blocks=tuple(blocks))


def _consecutive(blocks: list[int]) -> bool:
    return blocks[-1] - blocks[0] == len(blocks) - 1 and all(
        blocks[i] + 1 == blocks[i + 1] for i in range(len(blocks) - 1)
    )


def _token_slots(table: BlockTable, block_size: int, positions: range) -> list[int]:
    """slot = table[position // size] * size + position % size"""
    return [
        table.blocks[position // block_size - table.first] * block_size + position % block_size
        for position in positions
    ]
