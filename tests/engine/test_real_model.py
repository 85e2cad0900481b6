"""SmolLM2, from its GGUF file through the whole engine, against mlx-lm generating with the same weights."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from driving import drain, tokens
from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.models.loader import load
from metalctl.engine.sequence import SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OTHERS = ["Name three colours.", "Why is the sky blue? Answer in one sentence.", "2 + 2 ="]


@pytest.fixture(scope="module")
def loaded(smollm2):
    return load(smollm2, dtype=mx.float32)


def alone(loaded, prompt: list[int], count: int) -> list[int]:
    steps = generate_step(mx.array(prompt), loaded.model, max_tokens=count, sampler=lambda x: mx.argmax(x, axis=-1))
    return [int(token) for token, _ in steps]


def test_64_greedy_tokens_are_those_of_mlx_lm(loaded):
    prompt = loaded.tokenizer.apply_chat_template(QUESTION)
    expected = alone(loaded, prompt, 64)
    assert served(loaded, [prompt])[0] == expected
    assert "Paris" in loaded.tokenizer.decode(expected)


@pytest.mark.slow
def test_a_batch_changes_none_of_them(loaded):
    texts = [QUESTION, *([{"role": "user", "content": text}] for text in OTHERS)]
    prompts = [loaded.tokenizer.apply_chat_template(text) for text in texts]
    assert served(loaded, prompts) == [alone(loaded, prompt, 64) for prompt in prompts]


def served(loaded, prompts: list[list[int]]) -> list[list[int]]:
    engine = LLMEngine(loaded, EngineConfig(max_num_batched_tokens=32, kv_cache_bytes=1 << 27))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = drain(engine)
    return [tokens(outputs[name]) for name in names]
