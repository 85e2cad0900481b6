"""Which blocks and state slots each sequence holds, and which prefixes are in the cache. Plain Python.

Layers that keep the same tokens form a *group*: one group for full attention, one for each window. A sequence has a
block table in each group. Recurrent layers have a *slot* a sequence, and *checkpoints*: copies of its slot at whole
blocks, found by the same hash of the tokens before them.
"""

import hashlib
from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from metalctl.engine.cache.block_pool import NULL, BlockPool, PoolExhausted
from metalctl.engine.sequence import PENDING, Sequence

__all__ = ["BlockManager", "BlockTable", "Group", "Hit", "PoolExhausted", "StateCopy"]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that see the same tokens: all of them, or the last `window` ones."""

    window: int | None = None

    def first_visible(self, position: int) -> int:
        """The first token that a query at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(slots=True)
class BlockTable:
    """The blocks of a sequence in one group. Block `first + i` of the sequence is `blocks[i]`; what lies before
    `first` has left the window and is no longer held."""

    first: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy all recurrent states of slot `source` to slot `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a sequence that leaves a token to compute."""

    num_tokens: int
    tables: tuple[BlockTable, ...]
    checkpoint: int | None


@dataclass(slots=True)
class _Holding:
    tables: list[BlockTable]
    slot: int = NULL
    hashes: list[bytes] = field(default_factory=list)  # of each whole block whose tokens are known
    published: int = 0  # blocks that have been offered to the prefix cache
    settled: int = 0  # up to so many tokens there is nothing to allocate, publish or let go of
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (blocks before it, slot), not yet findable
    rolling: bytes | None = None  # the newest checkpoint made while decoding, replaced by the next


class BlockManager:
    """Hands out blocks and slots, and matches prefixes.

    `root` names what the cached content depends on beside the tokens: model revision and KV dtype; a sequence's
    `cache_salt` adds what is its own.
    `grid` restricts hits to multiples of so many tokens (the exact mode); `enabled` switches matching off altogether.
    """

    def __init__(
        self,
        groups: Many[Group],
        pools: Many[BlockPool],
        block_size: int,
        *,
        states: BlockPool | None = None,
        root: bytes = b"",
        enabled: bool = True,
        grid: int | None = None,
    ):
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.states = states
        self.block_size = block_size
        self.restores: list[StateCopy] = []  # to be done before the next step
        self.checkpoints: list[StateCopy] = []  # to be done after the next step
        self._root = root
        self._enabled = enabled
        self._grid = grid
        self._holdings: dict[str, _Holding] = {}

    # -- what a sequence holds

    def tables(self, sequence: Sequence) -> list[BlockTable]:
        return self._holdings[sequence.request_id].tables

    def slot(self, sequence: Sequence) -> int:
        return self._holdings[sequence.request_id].slot

    @property
    def slots(self) -> set[int]:
        """The state slots of the sequences that run."""
        return {holding.slot for holding in self._holdings.values()}

    @property
    def capacities(self) -> list[int]:
        """Entries of each pool, the one of states last."""
        return [pool.capacity for pool in (*self.pools, *((self.states,) if self.states else ()))]

    @property
    def num_holders(self) -> int:
        return len(self._holdings)

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence its place: what the prefix cache has of it, and a slot. Raises PoolExhausted."""
        hit = self.match(sequence)
        for pool, table in zip(self.pools, hit.tables, strict=True):
            for block in table.blocks:
                pool.share(block)
        holding = _Holding(list(hit.tables), published=hit.num_tokens // self.block_size)
        self._holdings[sequence.request_id] = holding
        if self.states is not None:
            self._admit_state(sequence, holding, hit)
        sequence.num_cached_tokens = hit.num_tokens

    def extend(self, sequence: Sequence, spread: bool = False) -> None:
        """Make room for the scheduled tokens, and let go of what has left the windows. Raises PoolExhausted."""
        holding = self._holdings[sequence.request_id]
        tokens = sequence.num_cached_tokens + sequence.num_scheduled_tokens
        if tokens <= holding.settled:
            return
        needed = -(-tokens // self.block_size)
        self.publish(sequence)
        self._slide(sequence)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            while table.end < needed:
                after = table.blocks[-1] if table.blocks else None
                table.blocks.append(pool.allocate(after, spread))
        holding.settled = self._next_change(sequence.num_cached_tokens)

    def release(self, sequence: Sequence) -> None:
        """Take everything back; what has been published stays findable until it is evicted."""
        holding = self._holdings.pop(sequence.request_id, None)
        if holding is None:
            return
        for pool, table in zip(self.pools, holding.tables, strict=True):
            for block in reversed(table.blocks):  # the ends of prefixes are evicted before their beginnings
                pool.release(block)
        if self.states is not None:
            for _, slot in holding.checkpoints:
                self.states.release(slot)
            if holding.slot != NULL:
                self.states.release(holding.slot)

    # -- the prefix cache

    def match(self, sequence: Sequence) -> Hit:
        """The longest prefix for which every group has the blocks it would read and, with recurrent layers, a
        checkpoint exists. Takes nothing."""
        if self._enabled and sequence.params.prompt_logprobs is None:
            step = (self._grid or self.block_size) // self.block_size
            longest = (sequence.num_tokens - 1) // self.block_size
            hashes = self._hash_blocks([], sequence, longest)
            for count in range(self._whole_prefix(hashes) // step * step, 0, -step):
                hit = self._hit(hashes, count)
                if hit is not None:
                    return hit
        return Hit(0, tuple(BlockTable() for _ in self.groups), None)

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks and checkpoints that are computed and whose tokens are known to later sequences."""
        holding = self._holdings.get(sequence.request_id)
        if holding is None or not self._enabled:
            return
        known = sequence.num_tokens
        while known and sequence.token_ids[known - 1] == PENDING:
            known -= 1
        if self._grid is not None:  # what decoding computes differs in rounding from what reading a prompt does
            known = min(known, sequence.num_prompt_tokens)
        whole = min(sequence.num_cached_tokens, known) // self.block_size
        self._hash_blocks(holding.hashes, sequence, whole)
        for index in range(holding.published, whole):
            for pool, table in zip(self.pools, holding.tables, strict=True):
                if index >= table.first:
                    pool.publish(table.blocks[index - table.first], holding.hashes[index])
        holding.published = max(holding.published, whole)
        self._publish_checkpoints(sequence, holding, whole)

    def checkpoint(self, sequence: Sequence) -> None:
        """Keep a copy of the state that the scheduled tokens lead to, if that is at a whole block and there is room."""
        position = sequence.num_cached_tokens + sequence.num_scheduled_tokens
        if self.states is None or not self._enabled or position % (self._grid or self.block_size):
            return
        if self._grid is not None and position > sequence.num_prompt_tokens:
            return
        try:
            slot = self.states.allocate()
        except PoolExhausted:
            return  # a copy fewer to reuse, nothing else
        holding = self._holdings[sequence.request_id]
        holding.checkpoints.append((position // self.block_size, slot))
        self.checkpoints.append(StateCopy(holding.slot, slot))

    def forget(self) -> None:
        """Drop everything that nobody uses: after a step that failed, what the blocks hold is not certain."""
        for pool in (*self.pools, *([self.states] if self.states is not None else [])):
            pool.forget()

    # -- inner

    def _whole_prefix(self, hashes: list[bytes]) -> int:
        """How many leading blocks every group of full attention has."""
        full = [pool for group, pool in zip(self.groups, self.pools, strict=True) if group.window is None]
        for count, content in enumerate(hashes):
            if any(pool.find(content) is None for pool in full):
                return count
        return len(hashes)

    def _hit(self, hashes: list[bytes], count: int) -> Hit | None:
        checkpoint = None
        if self.states is not None:
            checkpoint = self.states.find(hashes[count - 1])
            if checkpoint is None:
                return None
        tables = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            first = group.first_visible(count * self.block_size) // self.block_size
            blocks = [pool.find(content) for content in hashes[first:count]]
            if any(block is None for block in blocks):
                return None
            tables.append(BlockTable(first, [block for block in blocks if block is not None]))
        return Hit(count * self.block_size, tuple(tables), checkpoint)

    def _admit_state(self, sequence: Sequence, holding: _Holding, hit: Hit) -> None:
        assert self.states is not None
        if hit.checkpoint is not None:
            self.states.share(hit.checkpoint)  # so that it is not evicted to make room for its own copy
        try:
            holding.slot = self.states.allocate()
        except PoolExhausted:
            self.release(sequence)
            raise
        finally:
            if hit.checkpoint is not None:
                self.states.release(hit.checkpoint)
        if hit.checkpoint is not None:
            self.restores.append(StateCopy(hit.checkpoint, holding.slot))

    def _slide(self, sequence: Sequence) -> None:
        for group, pool, table in zip(self.groups, self.pools, self.tables(sequence), strict=True):
            keep = group.first_visible(sequence.num_cached_tokens) // self.block_size
            while table.first < keep and table.blocks:
                pool.release(table.blocks.pop(0))
                table.first += 1

    def _next_change(self, cached: int) -> int:
        """The number of cached tokens, more than `cached`, at which a block is full or has left a window."""
        size = self.block_size
        changes = [cached // size * size + size]
        for group in self.groups:
            if group.window is not None:
                changes.append((group.first_visible(cached) // size + 1) * size + group.window - 1)
        return min(changes)

    def _publish_checkpoints(self, sequence: Sequence, holding: _Holding, whole: int) -> None:
        waiting = []
        for blocks, slot in holding.checkpoints:
            if blocks > whole:
                waiting.append((blocks, slot))
                continue
            assert self.states is not None
            content = holding.hashes[blocks - 1]
            self.states.publish(slot, content)
            self.states.release(slot)
            if blocks * self.block_size > sequence.num_prompt_tokens:
                if holding.rolling is not None and holding.rolling != content:
                    self.states.discard(holding.rolling)
                holding.rolling = content
        holding.checkpoints = waiting

    def _hash_blocks(self, hashes: list[bytes], sequence: Sequence, count: int) -> list[bytes]:
        """Extend the chained hashes to `count` whole blocks."""
        size = self.block_size
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else self._root + sequence.cache_salt
            tokens = array("q", sequence.token_ids[index * size : (index + 1) * size]).tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes
