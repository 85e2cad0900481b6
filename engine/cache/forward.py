"""What the cache objects of all layers share during one forward: built once, read by every layer."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metalctl.engine.cache.block_manager import BlockTable, Group
from metalctl.engine.cache.block_pool import NULL

Ints = NDArray[np.int32]
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}  # by bytes


@dataclass(frozen=True, slots=True)
class Paged:
    """What attention needs that reads the pool by itself (see `metalctl.kernels.paged_attention`), all int32: block
    tables `[B, num_blocks]`, lengths `[B]` with the new tokens, the position of each table's first slot `[B]`."""

    block_tables: mx.array
    lengths: mx.array
    starts: mx.array | None


@dataclass(frozen=True)
class GroupContext:
    """Where one group's layers write the new tokens and what they read. What not every layer asks for is made when the
    first one does, and read by all.

    `write`: the pool's token slots for the new tokens, `[B * L]` int32, or a slice where they are consecutive.
    `read`: a slice of token slots (one sequence, consecutive blocks), or block ids `[B, num_blocks]` int32.
    `start`: the token position of the first slot that is read; `length`: how many are read (padding included).
    """

    window: int | None
    block_size: int
    write: slice | mx.array
    read: slice | mx.array
    start: int
    length: int
    skip: int = 0  # leading tokens of the first block read that the window no longer covers
    blocks: tuple[int, ...] = ()  # of the one sequence
    rows: "BatchArrays | None" = None  # of a batch
    starts: mx.array | None = None  # of a batch with a window: the position of each row's first slot, [B] int32
    _seen: dict[int, mx.array] = field(default_factory=dict)  # by the bytes of an element

    @cached_property
    def mask(self) -> mx.array | None:
        """For a batch, which of the slots that are read each new token may see, `[B, 1, L, length]` bool; else None."""
        rows = self.rows
        if rows is None:
            return None
        slot = mx.arange(self.length, dtype=mx.int32)
        query = _as_column(rows.offsets if self.starts is None else rows.offsets - self.starts)
        if rows.length > 1:
            query = query + mx.arange(rows.length, dtype=mx.int32)[:, None]
        mask = slot <= query
        if self.window is not None:
            mask = mask & (slot > query - self.window)
        if rows.length > 1:  # a column of padding sees one slot, so that its softmax is finite
            first = _as_column(rows.firsts if self.starts is None else rows.firsts - self.starts)
            mask = mx.where(query < first, slot == 0, mask)
        return mask

    def seen(self, dtype: mx.Dtype) -> mx.array | None:
        """For a batch, unsigned integers as wide as `dtype` with all bits set for the slots that any new token sees and
        none for the others, `[B, length, 1, 1]`; else None."""
        if self.mask is None:
            return None
        if dtype.size not in self._seen:
            batch, _, length, count = self.mask.shape
            seen = self.mask if length == 1 else self.mask.any(axis=2)
            bits = UNSIGNED[dtype.size]
            every, none = mx.array((1 << 8 * dtype.size) - 1, bits), mx.array(0, bits)
            self._seen[dtype.size] = mx.where(seen.reshape(batch, count, 1, 1), every, none)
        return self._seen[dtype.size]

    @cached_property
    def paged(self) -> Paged:
        if self.rows is not None:
            assert isinstance(self.read, mx.array)
            return Paged(self.read, self.rows.lengths, self.starts)
        first = self.start // self.block_size * self.block_size
        return Paged(
            mx.array([self.blocks], mx.int32),
            mx.array([self.start + self.length], mx.int32),
            mx.array([first], mx.int32) if first else None,
        )

    @cached_property
    def in_place(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """See PagedKVCache.in_place."""
        paged = self.paged
        lengths = paged.lengths if paged.starts is None else paged.lengths - paged.starts
        if self.rows is not None:
            assert isinstance(self.write, mx.array)
            return self.write, paged.block_tables, lengths, self.rows.offsets
        slots = self.write
        if isinstance(slots, slice):
            slots = mx.array(np.arange(slots.start, slots.stop, dtype=np.int32))
        return slots, paged.block_tables, lengths, mx.array([self.start + self.length - slots.size], mx.int32)


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
    kept = BatchTables(groups, block_size)
    return kept.arrays(tables, offsets, slots, lengths).forward(groups, block_size)


@dataclass(frozen=True)
class BatchArrays:
    """All that a forward of a batch depends on beside the tokens, int32. With rows and tables padded to a few sizes,
    the same shapes come again and again, and the forward can be compiled for them.

    Rows with fewer new tokens than the longest are padded in front. `offsets` `[B]` is the position of each row's first
    column, padding included (below zero where that is longer than the past); `firsts` `[B]` that of its first new
    token. `slots` `[B]` or None; for each group `writes` `[B * L]`, `blocks` `[B, width]`, `starts` `[B]`. `length` is
    L, the new tokens of the longest row.
    """

    offsets: mx.array
    firsts: mx.array
    slots: mx.array | None
    writes: tuple[mx.array, ...]
    blocks: tuple[mx.array, ...]
    starts: tuple[mx.array, ...]
    length: int = 1

    @cached_property
    def lengths(self) -> mx.array:
        """Tokens in the cache with the new ones, `[B]`."""
        return self.offsets + self.length

    def forward(self, groups: Many[Group], block_size: int) -> Forward:
        parts = zip(groups, self.writes, self.blocks, self.starts, strict=True)
        contexts = tuple(
            GroupContext(
                group.window,
                block_size,
                write,
                blocks,
                0,
                blocks.shape[1] * block_size,
                rows=self,
                starts=None if group.window is None else starts,
            )
            for group, write, blocks, starts in parts
        )
        return Forward(self.offsets.shape[0], self.length, self.offsets, contexts, self.slots)


class BatchTables:
    """Makes a batch's arrays, and keeps its block tables from one step to the next.

    A row is written anew where the first or the last block that it reads is not what it was, since a table never puts
    another block in a place; all of them where the rows are not those (the same lists of tables) of the step before.
    """

    def __init__(
        self,
        groups: Many[Group],
        block_size: int,
        padded: Callable[[int], int] = int,
        padded_rows: Callable[[int], int] = int,
    ):
        """`padded` gives the width that a table of so many blocks gets, `padded_rows` the rows that a batch of so many
        gets: those of padding read and write the null entries."""
        self._block_size = block_size
        self._padded_rows = padded_rows
        self._kept = [_KeptTable(group, block_size, padded) for group in groups]
        self._tables: Many[Many[BlockTable]] = ()

    def arrays(
        self,
        tables: Many[Many[BlockTable]],
        offsets: Many[int],
        slots: Many[int] | None,
        lengths: Many[int] | None = None,
    ) -> BatchArrays:
        """For rows with `offsets` tokens in the cache and `lengths` new ones, or one each."""
        count = len(offsets)
        missing = [0] * (self._padded_rows(count) - count)
        first = np.array([*offsets, *missing], np.int32)
        columns: Ints = first[:, None]
        padding = None
        if lengths is not None:
            ends: Ints = first + np.array([*lengths, *missing], np.int32)
            columns = ends[:, None] + np.array(range(-max(lengths), 0), np.int32)
            padding = columns < first[:, None]
        if not (len(tables) == len(self._tables) and all(map(is_, tables, self._tables))):
            self._tables = tables
            for index, kept in enumerate(self._kept):
                kept.replace([row[index] for row in tables], len(first))
        numbers, places = np.divmod(columns, self._block_size)  # of each column's block, and in it
        for kept in self._kept:
            kept.update(first, numbers[:, -1])
        firsts = mx.array(first)
        return BatchArrays(
            firsts if lengths is None else mx.array(columns[:, 0]),
            firsts,
            None if slots is None else mx.array([*slots, *missing], mx.int32),
            tuple(mx.array(kept.slots(numbers, places, padding)) for kept in self._kept),
            tuple(kept.blocks for kept in self._kept),
            tuple(kept.starts for kept in self._kept),
            columns.shape[1],
        )


class _KeptTable:
    """One group's block tables of a batch: `blocks` `[rows, width]` and `starts` `[rows]`, int32."""

    blocks: mx.array
    starts: mx.array

    def __init__(self, group: Group, block_size: int, padded: Callable[[int], int]):
        self._window = group.window
        self._block_size = block_size
        self._padded = padded

    def replace(self, tables: list[BlockTable], rows: int) -> None:
        """Go on with the tables of other sequences, and so many rows in all."""
        self._tables = tables
        self._table = np.full((rows, 0), NULL, np.int32)
        self._rows = np.arange(rows)[:, None]
        self._held = np.zeros(rows, np.int32)  # blocks in each row
        self._firsts = np.zeros(rows, np.int32)  # numbers of the first and the last block that each row reads
        self._lasts = np.full(rows, -2, np.int32)

    def update(self, offsets: Ints, lasts: Ints) -> None:
        """Read what is visible from `offsets` on, up to the blocks with the numbers `lasts`; both `[rows]`."""
        changed = lasts != self._lasts
        firsts = self._firsts
        if self._window is not None:
            firsts = np.maximum(offsets - (self._window - 1), 0) // self._block_size
            changed |= firsts != self._firsts
        if not changed.any():
            return
        for row in changed.nonzero()[0].tolist():
            if row < len(self._tables):
                self._write(row, int(firsts[row]))
        self._firsts, self._lasts = firsts, lasts
        self.blocks = mx.array(self._table[:, : self._padded(int(self._held.max()))])
        self.starts = mx.array(firsts * self._block_size)

    def slots(self, numbers: Ints, places: Ints, padding: NDArray[np.bool_] | None) -> Ints:
        """The token slots `[rows * L]` of tokens in the blocks with these numbers, `[rows, L]`: slot = block * size +
        place. The null block's first where there is `padding`."""
        blocks = numbers - self._firsts[:, None]
        if padding is not None:
            blocks[padding] = 0
        slots = self._table[self._rows, blocks] * self._block_size + places
        if padding is not None:
            slots[padding] = NULL
        return slots.reshape(-1)

    def _write(self, row: int, first: int) -> None:
        table = self._tables[row]
        blocks = table.blocks[first - table.first :]
        self._held[row] = len(blocks)
        missing = self._padded(len(blocks)) - self._table.shape[1]
        if missing > 0:
            self._table = np.pad(self._table, ((0, 0), (0, max(missing, _SPARE))), constant_values=NULL)
        self._table[row, : len(blocks)] = blocks
        self._table[row, len(blocks) :] = NULL


_SPARE = 16  # blocks by which tables grow


def _as_column(positions: mx.array) -> mx.array:
    """`[B]` as `[B, 1, 1, 1]`, to be compared with slots."""
    return positions.reshape(-1, 1, 1, 1)


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
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def _token_slots(table: BlockTable, block_size: int, positions: range) -> list[int]:
    """slot = table[position // size] * size + position % size"""
    return [
        table.blocks[position // block_size - table.first] * block_size + position % block_size
        for position in positions
    ]
