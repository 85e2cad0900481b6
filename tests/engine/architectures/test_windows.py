"""Layers with a window: blocks that the window has left are given back and not read, however a prompt is cut."""

from collections.abc import Iterator
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import pytest

from metalctl.engine.cache.forward import Forward, GroupContext
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sequence import SamplingParams
from metalctl.kernels import dispatch
from tests.engine.architectures import matching, zoo
from tests.engine.architectures.matching import BLOCK
from tests.engine.architectures.parts import WINDOW

NAMES = ["llama", "gemma3_text", "exaone4", "gpt_oss", "cohere2", "llama4", "recurrent_gemma"]
REQUESTS = {"long": (0, 40), "short": (0, 11), "joining": (6, 27)}


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


class Watch:
    """Stands before an engine's forwards: how many blocks of each windowed group they read, and sequences hold."""

    def __init__(self, engine: LLMEngine, poison: bool = False):
        self.engine = engine
        self.windowed = [index for index, group in enumerate(engine.layout.groups) if group.window]
        self.most_read = self.most_held = 0
        self._call = engine.runner.caches.call
        self._poison = poison
        engine.runner.caches.call = self.call  # type: ignore[method-assign]

    def call(self, model: nn.Module, tokens: mx.array, step: Forward) -> mx.array:
        for group in self.windowed:
            self.most_read = max(self.most_read, blocks_read(step.groups[group]))
            for sequence in self.engine.scheduler.running:
                self.most_held = max(self.most_held, len(self.engine.blocks.tables(sequence)[group].blocks))
        if self._poison:
            self.poison()
        return self._call(model, tokens, step)

    def poison(self) -> None:
        """Fill every block that nobody holds with what would spoil everything it has a share in."""
        for cache in self.engine.runner.caches.kv:
            tables = [self.engine.blocks.tables(s)[cache.layer.group] for s in self.engine.scheduler.running]
            held = {0, *(block for table in tables for block in table.blocks)}
            capacity = cache.keys_pool.shape[0] // BLOCK
            free = [block * BLOCK + i for block in range(capacity) if block not in held for i in range(BLOCK)]
            if free:
                cache.keys_pool[mx.array(free)] = 1e9
                cache.values_pool[mx.array(free)] = -1e9


def blocks_read(context: GroupContext) -> int:
    if isinstance(context.read, slice):
        return -(-context.read.stop // BLOCK) - context.read.start // BLOCK
    return context.read.shape[1]


@pytest.mark.parametrize("chunk", [7, 13, 64])
@pytest.mark.parametrize("name", NAMES)
def test_no_more_blocks_are_read_or_held_than_a_window_and_a_chunk_reach(name: str, chunk: int) -> None:
    engine = matching.engine_of(zoo.build(name))
    engine.scheduler.chunk_size = chunk
    watch = Watch(engine)
    matching.run(engine, REQUESTS, count=8)
    longest = min(chunk, 40)
    bound = -(-(WINDOW + longest) // BLOCK) + 1
    assert 0 < watch.most_read <= bound
    assert 0 < watch.most_held <= bound
    assert all(pool.num_used == 0 for pool in engine.blocks.pools)


@pytest.mark.parametrize("body", [None, "reference"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "llama4", "recurrent_gemma", "gemma2", "deepseek_v3"])
def test_blocks_that_nobody_holds_are_not_read(name: str, body: str | None) -> None:
    model = zoo.build(name)
    with dispatch.forced("paged_attention", body) if body else nullcontext():
        results = []
        for poison in (False, True):
            engine = matching.engine_of(model)
            engine.scheduler.chunk_size = matching.CHUNK
            Watch(engine, poison)
            results.append(matching.run(engine, REQUESTS, count=8))
    clean, poisoned = results
    for request in REQUESTS:
        assert poisoned[request].tokens == clean[request].tokens
        assert mx.array_equal(poisoned[request].logits, clean[request].logits)


@pytest.mark.parametrize("body", [None, "reference"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3", "falcon_h1"])
def test_a_request_whose_values_are_not_finite_spoils_no_other(name: str, body: str | None) -> None:
    model = zoo.build(name)
    with dispatch.forced("paged_attention", body) if body else nullcontext():
        alone = matching.run(matching.engine_of(model), REQUESTS, count=8, banned_token_ids=(0,))
        embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
        embedding.weight[0] = mx.inf
        engine = matching.engine_of(model)
        engine.add_request([0] * 40, SamplingParams(temperature=0, max_tokens=40))
        while engine.has_work:  # its blocks go to those that come next
            engine.step()
        others = matching.run(engine, REQUESTS, count=8, banned_token_ids=(0,))
    for request in REQUESTS:
        assert others[request].tokens == alone[request].tokens
        assert others[request].difference(alone[request]) <= matching.TOLERANCE
