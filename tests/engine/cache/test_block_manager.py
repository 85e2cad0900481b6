"""Block tables, windows, prefix hits and checkpoints, without a model."""

import random

import pytest

from metalctl.engine.cache.block_manager import BlockManager, Group, PoolExhausted, StateCopy
from metalctl.engine.cache.block_pool import NULL, BlockPool
from metalctl.engine.cache.forward import _token_slots
from metalctl.engine.sequence import PENDING, SamplingParams, Sequence


def manager(windows=(None,), limit=200, block_size=8, states=None, **settings) -> BlockManager:
    pools = [BlockPool(limit) for _ in windows]
    slots = None if states is None else BlockPool(states)
    return BlockManager([Group(w) for w in windows], pools, block_size, states=slots, **settings)


def sequence(tokens, name=None) -> Sequence:
    tokens = list(tokens)
    return Sequence(name or f"s{random.getrandbits(60)}", tokens, SamplingParams())


def run(blocks: BlockManager, seq: Sequence, chunk: int = 10**6) -> None:
    """Compute all of a sequence's tokens, chunk by chunk, as the scheduler would."""
    blocks.admit(seq)
    while seq.num_new_tokens:
        seq.num_scheduled_tokens = min(chunk, seq.num_new_tokens)
        blocks.extend(seq)
        blocks.checkpoint(seq)
        seq.num_cached_tokens += seq.num_scheduled_tokens
        seq.num_scheduled_tokens = 0
    blocks.publish(seq)


@pytest.mark.parametrize("block_size", [8, 16, 32, 48])
def test_slots_follow_the_table_and_no_two_positions_share_one(block_size):
    rng = random.Random(block_size)
    blocks = manager(block_size=block_size, limit=3000)
    prefix = [rng.randrange(100) for _ in range(block_size * 3)]
    seen: dict[int, tuple[int, ...]] = {}
    for _ in range(30):
        seq = sequence(prefix[: rng.choice((0, block_size, 3 * block_size))] + [rng.randrange(100) for _ in range(77)])
        run(blocks, seq, chunk=rng.randint(1, 100))
        (table,) = blocks.tables(seq)
        slots = _token_slots(table, block_size, range(seq.num_tokens))
        for position, slot in enumerate(slots):
            assert slot == table.blocks[position // block_size] * block_size + position % block_size
            assert slot // block_size != NULL
            # Where two sequences share a slot, they have the same tokens up to there.
            past = tuple(seq.token_ids[: position + 1])
            assert seen.setdefault(slot, past) == past


def test_a_hit_is_the_longest_whole_prefix_and_leaves_a_token():
    blocks = manager()
    first = sequence(range(40))
    run(blocks, first)
    assert blocks.match(sequence(range(40))).num_tokens == 32  # all forty are there; the last must be computed
    assert blocks.match(sequence([*range(33), 99, 99])).num_tokens == 32
    assert blocks.match(sequence([*range(31), 99, 99])).num_tokens == 24
    assert blocks.match(sequence([99, *range(39)])).num_tokens == 0
    assert blocks.match(sequence(range(41))).num_tokens == 40


def test_a_different_root_or_salt_shares_nothing():
    blocks = manager()
    run(blocks, sequence(range(40)))
    salted = sequence(range(40))
    salted.cache_salt = b"adapter"
    assert blocks.match(salted).num_tokens == 0


def test_prompt_logprobs_need_the_whole_prompt_computed():
    blocks = manager()
    run(blocks, sequence(range(40)))
    asking = Sequence("asking", list(range(40)), SamplingParams(prompt_logprobs=1))
    assert blocks.match(asking).num_tokens == 0


def test_tokens_that_python_has_not_read_are_not_offered():
    blocks = manager()
    seq = sequence(range(15))
    run(blocks, seq)
    seq.token_ids.append(PENDING)
    seq.num_cached_tokens = 16
    blocks.publish(seq)
    assert blocks.match(sequence([*range(15), 5, 6])).num_tokens == 8
    seq.token_ids[15] = 5
    blocks.publish(seq)
    assert blocks.match(sequence([*range(15), 5, 6])).num_tokens == 16


@pytest.mark.parametrize("window", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("chunk", [1, 5, 8, 13, 100])
def test_blocks_left_of_a_window_are_given_back(window, chunk):
    blocks = manager(windows=(None, window))
    seq = sequence(range(100))
    blocks.admit(seq)
    while seq.num_new_tokens:
        seq.num_scheduled_tokens = min(chunk, seq.num_new_tokens)
        blocks.extend(seq)
        full, windowed = blocks.tables(seq)
        first_needed = max(0, seq.num_cached_tokens - window + 1)
        assert windowed.first == first_needed // 8
        assert windowed.end == full.end
        assert len(windowed.blocks) <= -(-(window + chunk) // 8) + 1
        seq.num_cached_tokens += seq.num_scheduled_tokens
        seq.num_scheduled_tokens = 0
    assert blocks.pools[1].num_used == len(windowed.blocks)


def test_a_windowed_hit_needs_only_what_the_window_sees():
    blocks = manager(windows=(None, 10))
    first = sequence(range(64))
    run(blocks, first, chunk=8)
    blocks.release(first)
    second = sequence([*range(64), 1])
    hit = blocks.match(second)
    assert hit.num_tokens == 64
    full, windowed = hit.tables
    assert (full.first, len(full.blocks)) == (0, 8)
    assert (windowed.first, len(windowed.blocks)) == (6, 2)  # positions 55 to 63


def test_everything_is_given_back_and_hits_after_release_are_the_same_blocks():
    blocks = manager(windows=(None, 10))
    seq = sequence(range(50))
    run(blocks, seq)
    table = list(blocks.tables(seq)[0].blocks)
    blocks.release(seq)
    assert all(pool.num_used == 0 for pool in blocks.pools)
    assert list(blocks.match(sequence(range(50))).tables[0].blocks) == table[:6]


def test_recurrent_layers_hit_only_where_a_checkpoint_is():
    blocks = manager(states=20)
    first = sequence(range(45))
    blocks.admit(first)
    for length in (24, 16, 5):
        first.num_scheduled_tokens = length
        blocks.extend(first)
        blocks.checkpoint(first)
        first.num_cached_tokens += length
        first.num_scheduled_tokens = 0
    blocks.publish(first)
    assert [copy.source for copy in blocks.checkpoints] == [blocks.slot(first)] * 2
    assert blocks.match(sequence([*range(45), 1])).num_tokens == 40
    assert blocks.match(sequence([*range(39), 9, 9])).num_tokens == 24
    assert blocks.match(sequence([*range(23), 9, 9])).num_tokens == 0


def test_a_hit_restores_the_checkpoint_into_the_new_slot():
    blocks = manager(states=20)
    first = sequence(range(16))
    run(blocks, first)
    (copy,) = blocks.checkpoints
    second = sequence([*range(16), 7])
    blocks.admit(second)
    assert blocks.restores == [StateCopy(copy.target, blocks.slot(second))]
    assert second.num_cached_tokens == 16


def test_checkpoints_made_while_decoding_replace_each_other():
    blocks = manager(states=20)
    seq = sequence(range(8))
    run(blocks, seq)
    for token in range(8, 33):
        seq.token_ids.append(token)
        seq.num_scheduled_tokens = 1
        blocks.extend(seq)
        blocks.checkpoint(seq)
        seq.num_cached_tokens += 1
        seq.num_scheduled_tokens = 0
    blocks.publish(seq)
    blocks.release(seq)
    assert blocks.states.num_cached == 2  # the prompt's and the newest
    assert blocks.match(sequence(range(40))).num_tokens == 32
    assert blocks.match(sequence([*range(8), 99, 99])).num_tokens == 8


def test_no_slot_for_a_checkpoint_is_no_error():
    blocks = manager(states=2)
    seq = sequence(range(16))
    run(blocks, seq)
    assert blocks.checkpoints == []
    with pytest.raises(PoolExhausted):
        blocks.admit(sequence(range(4)))
    assert blocks.num_holders == 1


def test_exact_mode_hits_on_the_grid_only_and_never_on_what_was_decoded():
    blocks = manager(grid=16)
    seq = sequence(range(40))
    run(blocks, seq)
    for token in range(40, 60):
        seq.token_ids.append(token)
        seq.num_cached_tokens += 1
    seq.num_scheduled_tokens = 0
    blocks.publish(seq)
    assert blocks.match(sequence(range(60))).num_tokens == 32
    assert blocks.match(sequence(range(32))).num_tokens == 16


def test_switched_off_it_never_hits():
    blocks = manager(enabled=False)
    run(blocks, sequence(range(40)))
    assert blocks.match(sequence(range(40))).num_tokens == 0
