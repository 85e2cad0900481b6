"""The compiled decode step brings the tokens of the ordinary one, and is compiled for a few shapes only."""

import mlx.core as mx
import pytest

from driving import assert_nothing_held, drain, engine, tokens
from metalctl.engine.compiled_decode import padded_rows, padded_width
from metalctl.engine.sequence import SamplingParams
from metalctl.kernels import dispatch
from tests.engine.architectures import zoo
from tiny import prompt, reference


@pytest.fixture(autouse=True)
def compiling():
    """Whatever a test before has switched off: loading the CPU kernels does, for all of MLX."""
    mx.enable_compile()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "nemotron_h", "gpt_oss"])
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_tokens_are_those_of_the_model_alone(name, attention):
    served, alone = zoo.build(name), zoo.build(name)
    runner = engine(model=served, compile_decode=True)
    if not runner.runner.decodes_as_batch:
        pytest.skip("steps row by row")
    with dispatch.forced("paged_attention", attention):
        names = {
            runner.add_request(prompt(n, n), SamplingParams(temperature=0, max_tokens=8 + n)): n for n in (5, 21, 9, 17)
        }
        outputs = drain(runner)
    for request, length in names.items():
        assert tokens(outputs[request]) == reference(alone, prompt(length, length), 8 + length)[0]
    assert_nothing_held(runner)


def test_few_shapes_are_compiled():
    runner = engine(compile_decode=True)
    compiled = runner.runner._compiled
    traced = 0
    inner = runner.runner.caches.bind

    def bind(pools):
        nonlocal traced
        traced += 1
        inner(pools)

    runner.runner.caches.bind = bind
    for i in range(3):
        runner.add_request(prompt(4, i), SamplingParams(temperature=0, max_tokens=120))
    steps = 0

    def count():
        nonlocal steps
        steps += 1

    drain(runner, count)
    assert compiled is not None
    assert traced - steps <= 8  # a call binds once, a call that traces twice


@pytest.mark.parametrize("count", range(1, 300))
def test_padding_is_bounded(count):
    assert count <= padded_rows(count) < 2 * count
    assert count <= padded_width(count) < max(17, 2 * count)


def test_there_are_few_sizes():
    assert len({padded_rows(count) for count in range(1, 257)}) == 9
    assert len({padded_width(count) for count in range(1, 8193)}) == 10
