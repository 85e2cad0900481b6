"""Several prompts in one forward, padded in front: the tokens are those of each alone."""

import pytest

from driving import assert_nothing_held, drain, engine, tokens
from metalctl.engine.sequence import SamplingParams
from metalctl.kernels import dispatch
from tests.engine.architectures import zoo
from tiny import prompt, reference

NAMES = ["llama", "gemma3_text", "gemma2", "qwen3", "gpt_oss", "cohere2", "deepseek_v3", "gemma4_text", "olmo2", "phi3"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_tokens_are_those_of_the_model_alone(name, attention):
    served, alone = zoo.build(name), zoo.build(name)
    with dispatch.forced("paged_attention", attention):
        runner = engine(model=served, batch_prefill=True, max_num_batched_tokens=48)
        forwards = []
        inner = runner.runner._prefill_batch
        runner.runner._prefill_batch = lambda rows: forwards.append(len(rows)) or inner(rows)
        lengths = (44, 5, 21, 6, 40, 1, 100, 61, 60)
        names = {runner.add_request(prompt(n, n), SamplingParams(temperature=0, max_tokens=12)): n for n in lengths}
        outputs = drain(runner)
    for request, length in names.items():
        assert tokens(outputs[request]) == reference(alone, prompt(length, length), 12)[0]
    assert forwards
    assert_nothing_held(runner)


def test_hits_and_misses_are_read_together():
    served, alone = zoo.build("gemma3_text"), zoo.build("gemma3_text")
    runner = engine(model=served, batch_prefill=True, max_num_batched_tokens=64)
    shared = prompt(40, 1)
    for turn in range(3):
        texts = {f"{turn}-{i}": [*shared, *prompt(7 + i, 10 * turn + i)] for i in range(4)}
        texts[f"{turn}-new"] = prompt(12, 99 + turn)
        for name, text in texts.items():
            runner.add_request(text, SamplingParams(temperature=0, max_tokens=6), name)
        outputs = drain(runner)
        for name, text in texts.items():
            assert tokens(outputs[name]) == reference(alone, text, 6)[0]
    assert runner.stats().cached_tokens > 0


def test_what_is_not_finite_in_a_block_spoils_no_other_sequence():
    """A sequence's values are made infinite; who shares a forward with it, or gets its blocks, is not touched."""
    import mlx.core as mx

    served, alone = zoo.build("llama"), zoo.build("llama")
    runner = engine(model=served, batch_prefill=True, prefix_cache="off")
    caches = runner.runner.caches
    runner.add_request(prompt(20, 1), SamplingParams(temperature=0, max_tokens=4))
    drain(runner)
    for cache in caches.kv:
        cache.bind([mx.full(pool.shape, float("nan")) for pool in cache.pools])
    names = {runner.add_request(prompt(n, n), SamplingParams(temperature=0, max_tokens=6)): n for n in (9, 11, 30)}
    outputs = drain(runner)
    for request, length in names.items():
        assert tokens(outputs[request]) == reference(alone, prompt(length, length), 6)[0]
