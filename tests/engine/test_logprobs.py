"""Log-probabilities of what was sampled and of the prompt, against log_softmax of the model alone."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from driving import drain, engine, generate
from metalctl.engine.sequence import SamplingParams
from tiny import build, prompt

NAMES = ["llama", "gemma3_text", "gemma2"]


def log_softmax(name: str, token_ids: list[int]) -> np.ndarray:
    model = build(name)
    logits = model(mx.array([token_ids]), cache=make_prompt_cache(model))[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("name", NAMES)
def test_of_the_chosen_the_top_and_the_requested(name):
    start = prompt(20)
    outputs = generate(engine(name), start, logprobs=4, logprob_token_ids=(7, 99), max_tokens=10)
    entries = [entry for output in outputs for entry in output.logprobs]
    chosen = [token for output in outputs for token in output.token_ids]
    expected = log_softmax(name, start + chosen)[len(start) - 1 :]
    assert [entry.token_id for entry in entries] == chosen
    for row, entry in zip(expected, entries, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=5e-5)
        assert entry.rank == 1
        assert [token for token, _ in entry.top] == np.argsort(-row)[:4].tolist()
        assert [value for _, value in entry.top] == pytest.approx(sorted(row, reverse=True)[:4], abs=5e-5)
        assert dict(entry.requested) == pytest.approx({7: row[7], 99: row[99]}, abs=5e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_of_the_prompt_for_any_chunk_size_and_after_a_hit(name, chunk):
    start = prompt(40)
    runner = engine(name, block_size=1 if chunk < 8 else 8, max_num_batched_tokens=chunk)
    generate(runner, start, max_tokens=2)  # fills the prefix cache
    outputs = generate(runner, start, prompt_logprobs=3, max_tokens=5)
    values = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(values) == 1
    (entries,) = values
    assert len(entries) == len(start)
    assert entries[0] is None
    expected = log_softmax(name, start)
    for position, entry in enumerate(entries[1:], 1):
        row = expected[position - 1]
        assert entry.token_id == start[position]
        assert entry.logprob == pytest.approx(row[start[position]], abs=5e-5)
        assert entry.rank == 1 + int((row > row[start[position]]).sum())
        assert [value for _, value in entry.top] == pytest.approx(sorted(row, reverse=True)[:3], abs=5e-5)


def test_each_request_of_a_batch_gets_what_it_asked_for_and_the_others_nothing():
    runner = engine()
    wanted = {"none": {}, "chosen": {"logprobs": 0}, "three": {"logprobs": 3}, "prompt": {"prompt_logprobs": 0}}
    for index, (name, params) in enumerate(wanted.items()):
        runner.add_request(prompt(10, index), SamplingParams(temperature=0, max_tokens=4, **params), name)
    outputs = drain(runner)
    entries = {name: [e for o in outputs[name] for e in o.logprobs] for name in wanted}
    assert entries["none"] == entries["prompt"] == []
    assert [len(e.top) for e in entries["chosen"]] == [0] * 4
    assert [len(e.top) for e in entries["three"]] == [3] * 4
    assert len(outputs["prompt"][0].prompt_logprobs) == 10
    assert all(o.prompt_logprobs is None for name in ("none", "chosen", "three") for o in outputs[name])


def test_prompt_logprobs_survive_preemption():
    from test_engine import _bytes_for

    roomy = engine()
    expected = generate(roomy, prompt(20, 3), prompt_logprobs=1, max_tokens=40)[0].prompt_logprobs
    tight = engine(max_model_len=64, kv_cache_bytes=_bytes_for(130))
    for i in range(4):
        params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=1)
        tight.add_request(prompt(20, i), params, str(i))
    outputs = drain(tight)
    assert tight.stats().preemptions > 0
    got = [o.prompt_logprobs for o in outputs["3"] if o.prompt_logprobs is not None]
    assert len(got) == 1
    for one, other in zip(got[0][1:], expected[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=5e-5)
