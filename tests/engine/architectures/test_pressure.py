"""Out of blocks: sequences are preempted and computed anew, for each way of keeping the past, and nothing changes."""

import random
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest

from metalctl.engine.errors import OutOfMemoryError
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sequence import SamplingParams
from tests.engine import tiny
from tests.engine.architectures import matching, zoo

LONGEST = 64  # tokens of a sequence
TOKENS = 20  # that each request brings
NAMES = ["deepseek_v41", "llama4", "gemma3n", "longcat_flash_ngram", "falcon_h1", "minimax_m3_vl"]


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def smallest_engine(model: nn.Module) -> LLMEngine:
    """With memory for hardly more than one sequence of the longest length."""
    size = 1024
    while True:
        try:
            return matching.engine_of(model, max_model_len=LONGEST, kv_cache_bytes=size, max_num_batched_tokens=16)
        except OutOfMemoryError:
            size = size * 5 // 4


@pytest.mark.parametrize("name", NAMES)
def test_preempted_sequences_bring_the_same_tokens(name: str) -> None:
    model = zoo.build(name)
    rng = random.Random(0)
    prompts = {f"{i}": tiny.prompt(rng.randrange(8, 40), seed=i) for i in range(8)}
    expected = {key: tiny.reference(model, prompt, TOKENS)[0] for key, prompt in prompts.items()}
    engine = smallest_engine(model)
    got: dict[str, list[int]] = {key: [] for key in prompts}
    for key, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), key)
        for output in engine.step():
            got[output.request_id] += output.token_ids
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            got[output.request_id] += output.token_ids
    assert got == expected
    assert engine.stats().preemptions > 0
    pools = [*engine.blocks.pools, *([engine.blocks.states] if engine.blocks.states else [])]
    assert all(pool.num_used == 0 for pool in pools)
