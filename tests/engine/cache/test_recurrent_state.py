"""Rows of states are gathered for a step and put back after it, and touch nothing else."""

import mlx.core as mx
import pytest

from metalctl.engine.cache.block_manager import StateCopy
from metalctl.engine.cache.forward import Forward
from metalctl.engine.cache.layout import StateLayer
from metalctl.engine.cache.recurrent_state import RecurrentState

LAYER = StateLayer((((2, 3), mx.float32), None, ((4,), mx.float16)))


def step(slots: list[int], fresh: bool = False) -> Forward:
    return Forward(len(slots), 1, mx.array([5] * len(slots)), (), mx.array(slots, mx.int32), fresh=fresh)


@pytest.fixture
def state() -> RecurrentState:
    made = RecurrentState(LAYER)
    made.resize(5)
    made.bind([mx.arange(5 * 6, dtype=mx.float32).reshape(5, 2, 3), mx.arange(20).reshape(5, 4).astype(mx.float16)])
    return made


def test_the_model_is_handed_the_rows_of_the_step(state: RecurrentState) -> None:
    before = [mx.array(pool) for pool in state.pools]
    state.begin(step([4, 2]))
    assert mx.array_equal(state.view[0], before[0][mx.array([4, 2])])
    assert state.view[1] is None
    assert mx.array_equal(state.view[2], before[1][mx.array([4, 2])])


def test_what_it_leaves_goes_back_to_these_rows_and_no_others(state: RecurrentState) -> None:
    before = [mx.array(pool) for pool in state.pools]
    state.begin(step([4, 2]))
    state.view[0] = state.view[0] + 100
    state.end()
    changed = mx.array([False, False, True, False, True])
    assert mx.array_equal(state.pools[0], mx.where(changed[:, None, None], before[0] + 100, before[0]))
    assert mx.array_equal(state.pools[1], before[1])
    assert state.pools[1].dtype == mx.float16


def test_a_sequence_without_a_past_starts_from_nothing(state: RecurrentState) -> None:
    state.begin(step([3], fresh=True))
    assert [state.view[index] for index in range(3)] == [None, None, None]


def test_a_state_that_is_still_short_is_zero_at_its_start(state: RecurrentState) -> None:
    state.begin(step([3], fresh=True))
    state.view[2] = mx.ones((1, 1), mx.float16)
    state.end()
    assert state.pools[1][3].tolist() == [0, 0, 0, 1]


def test_copies_read_before_any_of_them_writes(state: RecurrentState) -> None:
    before = [mx.array(pool) for pool in state.pools]
    state.copy([StateCopy(1, 2), StateCopy(2, 1)])
    order = mx.array([0, 2, 1, 3, 4])
    assert all(mx.array_equal(pool, old[order]) for pool, old in zip(state.pools, before, strict=True))


def test_bytes_are_those_of_the_slots(state: RecurrentState) -> None:
    assert state.nbytes == 5 * LAYER.bytes_per_slot == 5 * (6 * 4 + 4 * 2)
    state.clear()
    assert state.nbytes == 0
