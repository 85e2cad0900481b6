"""Ownership of blocks: runs, references, hashes, eviction."""

import random

import pytest

from metalctl.engine.cache.block_pool import NULL, BlockPool, PoolExhausted
from metalctl.engine.cache.free_runs import FreeRuns


def test_free_runs_agree_with_a_plain_set():
    rng = random.Random(0)
    runs, model = FreeRuns(), set(range(1, 200))
    runs.add(1, 200)
    taken = []
    for _ in range(5000):
        if taken and rng.random() < 0.5:
            block = taken.pop(rng.randrange(len(taken)))
            runs.add(block, block + 1)
            model.add(block)
        elif model:
            if taken and runs.take_at(taken[-1] + 1):
                block = taken[-1] + 1
            else:
                block = runs.take_first(spread=rng.random() < 0.5)
            assert block in model
            model.remove(block)
            taken.append(block)
        assert len(runs) == len(model)


def test_the_null_block_is_never_handed_out_and_every_other_is():
    pool = BlockPool(limit=40, initial=2)
    blocks = [pool.allocate() for _ in range(39)]
    assert sorted(blocks) == list(range(1, 40))
    assert NULL not in blocks
    with pytest.raises(PoolExhausted):
        pool.allocate()


def test_a_growing_sequence_gets_consecutive_blocks_though_the_pool_grows():
    pool = BlockPool(limit=1000, initial=2)
    blocks = [pool.allocate()]
    for _ in range(500):
        blocks.append(pool.allocate(after=blocks[-1]))
    assert blocks == list(range(blocks[0], blocks[0] + 501))


def test_two_growing_sequences_do_not_run_into_each_other():
    pool = BlockPool(limit=129, initial=129)
    one, two = [pool.allocate()], [pool.allocate(spread=True)]
    for _ in range(50):
        one.append(pool.allocate(after=one[-1]))
        two.append(pool.allocate(after=two[-1]))
    for blocks in (one, two):
        assert blocks == list(range(blocks[0], blocks[0] + 51))


def test_eviction_is_least_recently_used_and_a_use_refreshes():
    pool = BlockPool(limit=4, initial=4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, name in zip(blocks, b"abc", strict=True):
        assert pool.publish(block, bytes([name]))
    for block in blocks:
        pool.release(block)
    pool.share(blocks[0])  # used again: now the youngest
    pool.release(blocks[0])
    assert pool.allocate() == blocks[1]
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks[0]
    assert pool.find(b"c") == blocks[2]


def test_content_in_use_is_never_evicted():
    pool = BlockPool(limit=3, initial=3)
    kept = pool.allocate()
    pool.publish(kept, b"kept")
    pool.allocate()
    with pytest.raises(PoolExhausted):
        pool.allocate()
    assert pool.find(b"kept") == kept


def test_discarded_content_is_freed_once_nobody_uses_it():
    pool = BlockPool(limit=3, initial=3)
    block = pool.allocate()
    pool.publish(block, b"x")
    pool.discard(b"x")
    assert pool.find(b"x") is None
    pool.release(block)
    assert pool.num_cached == 0
    assert {pool.allocate(), pool.allocate()} == {1, 2}


def test_random_use_never_loses_or_doubles_an_entry():
    rng = random.Random(1)
    pool = BlockPool(limit=30, initial=4)
    held: list[int] = []
    names = 0
    for _ in range(20_000):
        action = rng.random()
        if action < 0.45:
            try:
                block = pool.allocate(after=held[-1] if held else None, spread=rng.random() < 0.3)
            except PoolExhausted:
                assert len(set(held)) == 29
                continue
            assert block not in held
            held.append(block)
        elif action < 0.6 and held:
            pool.publish(rng.choice(held), str(names := names + 1).encode())
        elif action < 0.7:
            block = pool.find(str(rng.randint(1, max(1, names))).encode())
            if block is not None:
                pool.share(block)
                held.append(block)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        assert pool.num_used == len(set(held))
        assert pool.num_used + pool.num_cached <= 29
