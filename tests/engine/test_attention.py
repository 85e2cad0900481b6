"""Attention from the pools instead of over gathered arrays: the same tokens, for every body that runs here."""

import pytest

from driving import drain, engine, tokens
from metalctl.engine import attention
from metalctl.engine.sequence import SamplingParams
from metalctl.kernels import dispatch
from tests.engine.architectures import zoo
from tiny import prompt, reference

NAMES = ["llama", "gemma3_text", "qwen3", "gpt_oss", "cohere2", "qwen3_next", "gemma4_text", "deepseek_v3", "gemma2"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_model_alone(name, monkeypatch):
    served, alone = zoo.build(name), zoo.build(name)
    called = 0
    inner = attention.paged_attention

    def counting(*arguments, **keywords):
        nonlocal called
        called += 1
        return inner(*arguments, **keywords)

    monkeypatch.setattr(attention, "paged_attention", counting)
    with dispatch.forced("paged_attention", "reference"):
        runner = engine(model=served)
        names = {
            runner.add_request(prompt(n, n), SamplingParams(temperature=0, max_tokens=16)): n for n in (5, 21, 40, 9)
        }
        outputs = drain(runner)
    for request, length in names.items():
        assert tokens(outputs[request]) == reference(alone, prompt(length, length), 16)[0]
    assert called > 0 or name in ("gemma2", "deepseek_v3")  # which attend by hand


def test_models_run_by_themselves_are_not_touched():
    model = zoo.build("llama")
    engine(model=zoo.build("llama"))
    with dispatch.forced("paged_attention", "reference"):
        assert len(reference(model, prompt(9), 4)[0]) == 4
