"""What the cache objects of all layers share during one forward: built once, read by every layer."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from metalctl.engine.cache.block_manager import BlockTable, Group
from metalctl.engine.cache.block_pool import NULL


@dataclass(frozen=True, slots=True)
class Paged:
    """The same for attention that reads the pool by itself (see `metalctl.kernels.paged_attention`), all int32:
    block tables `[B, num_blocks]`, lengths `[B]` with the new tokens, the position of each table's first slot `[B]`."""

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
    `rows`: each row's blocks that are read, the number of the first, and its tokens with the new ones.
    """

    window: int | None
    write: slice | mx.array
    read: slice | mx.array
    start: int
    length: int
    skip: int = 0  # leading tokens of the first block read that the window no longer covers
    mask: mx.array | None = None
    rows: tuple[tuple[list[int], int, int], ...] = ()
    block_size: int = 1

    @cached_property
    def paged(self) -> Paged:
        """Made when the first layer asks for it, and read by all."""
        width = max(len(blocks) for blocks, _, _ in self.rows)
        tables = [blocks + [NULL] * (width - len(blocks)) for blocks, _, _ in self.rows]
        starts = [first * self.block_size for _, first, _ in self.rows]
        return Paged(
            mx.array(tables, mx.int32),
            mx.array([length for _, _, length in self.rows], mx.int32),
            mx.array(starts, mx.int32) if any(starts) else None,
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """One call of the model: B sequences, L new tokens each. B is 1 where L is more than 1.

    `offset`: tokens that are in the cache already; an int for one sequence, int32 `[B]` for a batch.
    """

    batch_size: int
    length: int
    offset: int | mx.array
    groups: tuple[GroupContext, ...]
    slots: mx.array | None = None  # [B] int32, recurrent-state slots
    fresh: bool = False  # a sequence that has no past: recurrent layers start from their own initial state
    masks: list[tuple[mx.array, int | None]] = field(default_factory=list)  # handed out, each with its window


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
    groups: Many[Group], tables: Many[Many[BlockTable]], block_size: int, offsets: Many[int], slots: Many[int] | None
) -> Forward:
    """The forward of one new token each of several sequences; `tables[b][g]` is row b's table in group g."""
    contexts = tuple(
        _batch_group(group, [row[index] for row in tables], block_size, offsets) for index, group in enumerate(groups)
    )
    return Forward(
        len(offsets),
        1,
        mx.array(offsets, mx.int32),
        contexts,
        None if slots is None else mx.array(slots, mx.int32),
    )


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
    rows = ((blocks, first // block_size, last),)
    return GroupContext(group.window, write, read, first, last - first, skip, rows=rows, block_size=block_size)


def _batch_group(group: Group, tables: list[BlockTable], block_size: int, offsets: Many[int]) -> GroupContext:
    firsts = [group.first_visible(offset) // block_size for offset in offsets]
    rows = [table.blocks[first - table.first :] for table, first in zip(tables, firsts, strict=True)]
    width = max(map(len, rows))
    padded = [row + [NULL] * (width - len(row)) for row in rows]
    write = [
        _token_slots(table, block_size, range(offset, offset + 1))[0]
        for table, offset in zip(tables, offsets, strict=True)
    ]
    # Positions relative to each row's first block read.
    last = mx.array([offset - first * block_size for offset, first in zip(offsets, firsts, strict=True)], mx.int32)
    position = mx.arange(width * block_size, dtype=mx.int32)[None]
    mask = position <= last[:, None]
    if group.window is not None:
        mask = mask & (position > last[:, None] - group.window)
    return GroupContext(
        group.window,
        mx.array(write, mx.int32),
        mx.array(padded, mx.int32),
        0,
        width * block_size,
        mask=mask[:, None, None, :],
        rows=tuple(zip(rows, firsts, [offset + 1 for offset in offsets], strict=True)),
        block_size=block_size,
    )


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
