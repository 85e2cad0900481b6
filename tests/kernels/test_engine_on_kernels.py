"""A whole engine whose decode attention runs the GPU bodies on the emulator gives the tokens of the model alone."""

import pytest

from driving import drain, engine, tokens
from metalctl.engine import attention
from metalctl.engine.sequence import SamplingParams
from tests.engine.architectures import zoo
from tests.kernels.emulation import emulated
from tiny import prompt, reference

LENGTHS = (5, 21, 40)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_oss"])  # plain, windows, sinks and windows
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_tokens_are_those_of_the_model_alone(name, device, monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(options["window"])
        return inner(*arguments, **options)

    inner = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", counted)
    with emulated(device, "paged_attention"):
        served = engine(model=zoo.build(name), compile_decode=False)
        greedy = SamplingParams(temperature=0, max_tokens=5)
        requests = {served.add_request(prompt(length, length), greedy): length for length in LENGTHS}
        outputs = drain(served)
    alone = zoo.build(name)
    for request, length in requests.items():
        assert tokens(outputs[request]) == reference(alone, prompt(length, length), 5)[0]
    assert calls
    assert any(calls) == (name != "qwen3")
