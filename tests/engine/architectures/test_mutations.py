"""The comparison of the matrix can fail: for each special feature, breaking it on one side is noticed.

On the model's side the engine runs the same weights with the feature at a neutral value, or in another place; on ours a
piece of the cache is broken.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from metalctl.engine.cache import batching, own_cache, paged_kv, recurrent_state
from metalctl.engine.cache.block_manager import Group
from metalctl.engine.cache.forward import Forward, GroupContext
from metalctl.engine.cache.paged_kv import PagedKVCache
from metalctl.engine.cache.recurrent_state import RecurrentState
from tests.engine.architectures import matching, zoo
from tests.engine.architectures.parts import FULL, SLIDING


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def reference(name: str) -> matching.Reference:
    return matching.reference_of(name, zoo.build(name))


def mismatches(name: str, model: nn.Module | None = None) -> list[str]:
    return matching.mismatches(matching.engine_results(matching.engine_of(model or zoo.build(name))), reference(name))


# -- on the model's side


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("gemma2", {"attn_logit_softcapping": 1e4}, id="softcap of attention"),
        pytest.param("gear", {"attn_logit_softcapping": None}, id="softcap of attention with states"),
        pytest.param("gemma2", {"final_logit_softcapping": 1e4}, id="softcap of logits"),
        pytest.param("smollm3", {"no_rope_layer_interval": 4}, id="layers without rope"),
        pytest.param("llama4_text", {"no_rope_layers": [1, 1, 1]}, id="layers without rope, given by a list"),
        pytest.param("stablelm", {"partial_rotary_factor": 1.0}, id="partial rotary"),
        pytest.param("phi", {"partial_rotary_factor": 1.0}, id="partial rotary of Phi"),
        pytest.param("granite", {"attention_multiplier": 0.25}, id="scale of attention"),
        pytest.param("llama", {"sliding_window": 9}, id="window wider by one"),
        pytest.param("llama", {"layer_types": [SLIDING, SLIDING, FULL]}, id="which layers have windows"),
        pytest.param("llama4", {"attention_chunk_size": 9}, id="chunks of attention"),
        pytest.param("llama4", {"attn_scale": 0.0}, id="temperature that grows with the position"),
        pytest.param("gemma4_text", {"global_head_dim": 32, "rope_parameters": {}}, id="rope of each kind of layer"),
        pytest.param("deepseek_v32", {"index_topk": 64}, id="sparse attention"),
    ],
)
def test_a_feature_of_the_model_is_noticed(name: str, changes: dict[str, object]) -> None:
    model, changed = zoo.build(name), zoo.build(name, **changes)
    same = tree_map(lambda a, b: bool(mx.array_equal(a, b)), model.parameters(), changed.parameters())
    assert all(equal for _, equal in tree_flatten(same))  # nothing but the feature differs
    assert mismatches(name, changed)


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_sinks_are_noticed(name: str) -> None:
    model = zoo.build(name)
    model.update(tree_map_with_path(lambda path, a: a - 100 if "sink" in path else a, model.parameters()))
    assert mismatches(name, model)


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_the_norm_of_queries_and_keys_is_noticed(name: str) -> None:
    model = zoo.build(name)
    for layer in model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    assert mismatches(name, model)


class _NormFirst:
    """A rope that norms what it turns: queries and keys in turn."""

    def __init__(self, rope: Callable[..., mx.array], norms: list[Callable[[mx.array], mx.array]]):
        self._rope = rope
        self._norms = cycle(norms)

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return self._rope(next(self._norms)(x), offset=offset)


def test_the_place_of_the_norm_of_queries_and_keys_is_noticed() -> None:
    model = zoo.build("hunyuan_v1_dense")  # it has it after rope
    for layer in model.layers:
        attention = layer.self_attn
        attention.rope = _NormFirst(attention.rope, [attention.query_layernorm, attention.key_layernorm])
        attention.query_layernorm = attention.key_layernorm = nn.Identity()
    assert mismatches("hunyuan_v1_dense", model)


# -- on our side


def test_a_write_that_is_skipped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_kv, "_write", lambda pool, where, new: None)
    monkeypatch.setattr(batching, "_close", lambda *_: True)
    assert mismatches("qwen3")


def test_a_window_narrower_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "first_visible", lambda self, at: max(0, at - (self.window or 10**6) + 2))
    assert mismatches("llama")


def test_padding_that_is_seen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_close", lambda *_: True)
    monkeypatch.setattr(paged_kv, "_narrowed", lambda context, forward, window: mx.ones_like(context.mask))
    assert mismatches("qwen3")


def test_a_position_that_is_off_by_one_while_decoding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = PagedKVCache.offset.fget  # type: ignore[attr-defined]
    late = property(lambda self: offset(self) + (self._forward.length == 1 and self._written is None))
    monkeypatch.setattr(PagedKVCache, "offset", late)
    monkeypatch.setattr(batching, "_close", lambda *_: True)
    assert mismatches("qwen3")


@pytest.mark.parametrize("name", ["gemma3n", "afm7"])
def test_shared_keys_and_values_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "keys_and_values", lambda self: (self._written[0], 0 * self._written[1]))
    assert mismatches(name)


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next", "rwkv7", "recurrent_gemma"])
def test_a_state_that_is_not_carried_on_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_close", lambda *_: True)
    monkeypatch.setattr(RecurrentState, "end", lambda self: None)
    assert mismatches(name)


def test_a_state_that_leaks_between_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RecurrentState.begin

    def leaking(self: RecurrentState, forward: Forward | None) -> None:
        begin(self, forward)
        if forward is not None and forward.batch_size > 1:
            self.view.cache = [None if a is None else mx.broadcast_to(a[:1], a.shape) for a in self.view.cache]

    monkeypatch.setattr(batching, "_close", lambda *_: True)
    monkeypatch.setattr(RecurrentState, "begin", leaking)
    assert mismatches("mamba2")


def test_a_short_state_that_is_padded_at_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(state: mx.array, pool: mx.array) -> mx.array:
        missing = [full - now for full, now in zip(pool.shape[1:], state.shape[1:], strict=True)]
        return mx.pad(state, [(0, 0), *((0, count) for count in missing)])

    monkeypatch.setattr(batching, "_close", lambda *_: True)
    monkeypatch.setattr(recurrent_state, "_settled", padded)
    assert mismatches("longcat_flash_ngram")


def test_a_cache_object_that_two_sequences_share_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_close", lambda *_: True)
    monkeypatch.setattr(own_cache, "deepcopy", lambda blank: blank)
    assert mismatches("deepseek_v41")


def test_blocks_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PagedKVCache._read

    def turned(self: PagedKVCache, pool: mx.array, context: GroupContext) -> mx.array:
        array = read(self, pool, context)
        return mx.roll(array, 1, axis=2) if array.shape[2] > matching.BLOCK else array

    monkeypatch.setattr(PagedKVCache, "_read", turned)
    assert mismatches("qwen3")
