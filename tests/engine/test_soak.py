"""A thousand requests that join, leave, are cancelled and preempted: each that finishes is what it is alone."""

import random

import pytest

from driving import assert_nothing_held, drain, engine, tokens
from metalctl.engine import memory
from metalctl.engine.sequence import FinishReason, SamplingParams
from tests.engine.architectures import zoo
from tiny import prompt, reference


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch):
    """State slots for as many sequences as such short ones make in so little memory."""
    monkeypatch.setattr(memory, "_TYPICAL_TOKENS", 32)


def soak(name: str, count: int, mode: str) -> None:
    rng = random.Random(count)
    model, alone = zoo.build(name), zoo.build(name)
    runner = engine(model=model, prefix_cache=mode, max_model_len=160, kv_cache_bytes=_tight(model), max_num_seqs=12)
    prefixes = [prompt(rng.randint(8, 60), 900 + i) for i in range(6)]
    requests, outputs, alive, joined = {}, {}, [], 0
    while joined < count or runner.has_work:
        for _ in range(rng.randint(0, 3)):
            if joined < count:
                token_ids = rng.choice([[], *prefixes]) + prompt(rng.randint(1, 50), joined)
                request = runner.add_request(token_ids, SamplingParams(temperature=0, max_tokens=rng.randint(1, 30)))
                requests[request] = token_ids
                alive.append(request)
                joined += 1
        for output in runner.step():
            assert output.error is None
            outputs.setdefault(output.request_id, []).append(output)
            if output.finished:
                alive.remove(output.request_id)
        if alive and rng.random() < 0.05:
            request = alive.pop(rng.randrange(len(alive)))
            outputs.setdefault(request, []).append(runner.abort(request))
    assert_nothing_held(runner)
    assert runner.stats().preemptions > 0
    assert runner.stats().cached_tokens > 0 or mode == "off"
    finished = [r for r in requests if outputs[r][-1].finish_reason is not FinishReason.ABORT]
    assert len(finished) > count // 2
    for request in finished:
        got = tokens(outputs[request])
        assert got == reference(alone, requests[request], len(got))[0], request


def _tight(model) -> int:
    """Room for a little more than two of the longest sequences."""
    from metalctl.engine.cache.layout import read_layout
    from metalctl.engine.config import EngineConfig

    return memory._Sizes(read_layout(model), EngineConfig(block_size=8, max_num_batched_tokens=16)).total(360)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_sixty_requests(name):
    soak(name, 60, "on")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "nemotron_h", "granitemoehybrid"])
@pytest.mark.parametrize("mode", ["on", "exact", "off"])
def test_a_thousand_requests(name, mode):
    soak(name, 1000, mode)


def test_what_is_left_after_a_soak_can_be_used_again():
    runner = engine("gemma3_text")
    for index in range(10):
        runner.add_request(prompt(20, index), SamplingParams(max_tokens=5))
        runner.step()
        runner.abort(f"request-{index}")
    drain(runner)
    assert_nothing_held(runner)
