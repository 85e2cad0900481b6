"""Each of mlx-lm's cache kinds is translated, or its objects are kept as they are and charged for."""

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_lm_cache
import pytest

from metalctl.engine.cache.block_manager import Group
from metalctl.engine.cache.layout import (
    TABLE,
    CacheLayout,
    KVLayer,
    ListLayer,
    NoLayer,
    OwnLayer,
    StateLayer,
    read_layout,
)
from metalctl.engine.errors import UnsupportedModelError
from tests.engine.architectures import matching, zoo

# What mlx-lm makes by itself out of the kinds that models ask for: no model asks for one of these.
DERIVED = {"QuantizedKVCache", "BatchKVCache", "BatchRotatingKVCache", "_BaseCache", "LRUPromptCache"}


class Model(nn.Module):
    """One layer that writes `[1, 2, L, 4]` to its cache and does nothing with it."""

    def __init__(self, *caches: Any, use: Any = None):
        super().__init__()
        self.kinds = caches
        self.use = use or (lambda cache, x: cache.update_and_fetch(x, x[..., :3]))

    def make_cache(self) -> list[Any]:
        return [make() for make in self.kinds]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        for one in cache:
            self.use(one, mx.zeros((1, 2, tokens.shape[1], 4)))
        return mx.zeros((*tokens.shape, 8))


def layout_of(*kinds: Any, use: Any = None) -> CacheLayout:
    return read_layout(Model(*kinds, use=use))


def test_every_kind_of_mlx_lm_has_a_row() -> None:
    classes = {name for name, value in inspect.getmembers(mlx_lm_cache, inspect.isclass) if name.endswith("Cache")}
    assert classes - {kind.__name__ for kind in TABLE} <= DERIVED


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (mlx_lm_cache.KVCache, None),
        (mlx_lm_cache.ConcatenateKVCache, None),
        (lambda: mlx_lm_cache.RotatingKVCache(max_size=8), 8),
        (lambda: mlx_lm_cache.ChunkedKVCache(8), 8),
    ],
)
def test_keys_and_values_go_to_blocks(kind: Any, window: int | None) -> None:
    layout = layout_of(kind)
    assert layout.groups == (Group(window),)
    assert layout.layers == (KVLayer(0, (2, 4), (2, 3), mx.float32),)
    assert layout.block_bytes(0, 16) == 16 * 2 * (4 + 3) * 4
    assert layout.slot_bytes == 0 and not layout.has_states and layout.shares_prefixes


def test_a_dtype_that_is_asked_for_is_that_of_the_blocks() -> None:
    (layer,) = read_layout(Model(mlx_lm_cache.KVCache), mx.bfloat16).layers
    assert isinstance(layer, KVLayer) and layer.dtype == mx.bfloat16 and layer.bytes_per_token == 2 * 7 * 2


def test_states_go_to_slots_and_empty_entries_stay_empty() -> None:
    def use(cache: Any, x: mx.array) -> None:
        cache[0] = mx.zeros((1, 3, 5), mx.float16)

    layout = layout_of(lambda: mlx_lm_cache.ArraysCache(2), use=use)
    assert layout.layers == (StateLayer((((3, 5), mx.float16), None)),)
    assert layout.slot_bytes == 3 * 5 * 2 and layout.has_states and layout.shares_prefixes


def test_caches_in_a_list_and_unused_ones() -> None:
    def use(cache: Any, x: mx.array) -> None:
        if cache is not None:
            cache[1].update_and_fetch(x, x)

    layout = layout_of(
        lambda: mlx_lm_cache.CacheList(mlx_lm_cache.KVCache(), mlx_lm_cache.RotatingKVCache(max_size=8)),
        lambda: None,
        use=use,
    )
    kv = KVLayer(0, (2, 4), (2, 4), mx.float32)
    assert layout.layers == (ListLayer((NoLayer(given=True), kv)), NoLayer(given=False))
    assert layout.groups == (Group(8),)


def test_a_window_that_masks_ask_for_is_kept_whole() -> None:
    def use(cache: Any, x: mx.array) -> None:
        cache.make_mask(x.shape[2], window_size=9)
        cache.update_and_fetch(x, x)

    assert layout_of(lambda: mlx_lm_cache.RotatingKVCache(max_size=8), use=use).groups == (Group(9),)


def grow(cache: Any, x: mx.array) -> None:
    rows = x[:, 0]
    cache[0] = rows if cache[0] is None else mx.concatenate([cache[0], rows], axis=1)


@pytest.mark.parametrize(
    ("kind", "use", "rate"),
    [
        pytest.param(lambda: mlx_lm_cache.RotatingKVCache(max_size=8, keep=4), None, 0, id="keeps its first tokens"),
        pytest.param(lambda: mlx_lm_cache.ArraysCache(1), grow, 4 * 4, id="states that grow"),
        pytest.param(mlx_lm_cache.QuantizedKVCache, lambda cache, x: cache.update_and_fetch(
            mx.zeros((1, 2, x.shape[2], 64)), mx.zeros((1, 2, x.shape[2], 64))), 2 * 2 * (64 + 8), id="no row"),
    ],
)  # fmt: skip
def test_what_blocks_and_slots_cannot_hold_stays_in_the_models_own_objects(kind: Any, use: Any, rate: int) -> None:
    layout = layout_of(kind, use=use)
    (layer,) = layout.layers
    assert isinstance(layer, OwnLayer) and rate <= layer.bytes_per_token <= rate + 1
    assert layout.has_states and not layout.shares_prefixes
    assert layout.block_bytes(layer.group, 16) == 16 * layer.bytes_per_token


def test_a_cache_that_does_not_say_how_large_it_is_is_refused_by_name() -> None:
    class Secretive:
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            return keys, values

    with pytest.raises(UnsupportedModelError, match="Secretive"):
        layout_of(Secretive)


def test_own_objects_take_no_more_than_is_charged() -> None:
    engine = matching.engine_of(zoo.build("deepseek_v41"))
    caches, blocks = engine.runner.caches, engine.blocks
    shares = []
    call = caches.call

    def watched(*arguments: Any) -> mx.array:
        logits = call(*arguments)
        charged = engine.layout.block_bytes(0, engine.config.block_size) * blocks.pools[0].num_used
        charged += engine.layout.slot_bytes * blocks.states.num_used
        shares.append(caches.nbytes / charged)
        return logits

    caches.call = watched  # type: ignore[method-assign]
    matching.run(engine, {"one": (0, 40), "two": (2, 11)})
    assert 0.5 < max(shares) <= 1
    caches.grow(blocks)
    assert caches.nbytes == 0
