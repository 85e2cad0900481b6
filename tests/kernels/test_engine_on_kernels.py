"""A whole engine whose decode attention runs the GPU bodies on the emulator gives the tokens of the model alone."""

import mlx.core as mx
import pytest

from driving import drain, engine, tokens
from metalctl.engine import attention, cuda_layers
from metalctl.engine.sequence import SamplingParams
from metalctl.kernels.paged_attention import plain
from metalctl.kernels.paged_attention import reference as exact_attention
from tests.engine.architectures import zoo
from tests.kernels.attention_cases import distance
from tests.kernels.emulation import emulated
from tiny import prompt, reference

LENGTHS = (5, 21, 40)
NEAR = 0.02  # nats, of float16


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


@pytest.mark.parametrize("lengths", [(37,), (30, 37, 40)], ids=["one", "together"])
def test_prompts_in_16_bits_are_read_by_the_cuda_kernel_and_attend_as_exactly_as_plain_mlx(lengths, monkeypatch):
    inner, prompts = attention.paged_attention, []

    def compared(queries, keys, values, tables, lengths, *, scale, window, sinks, starts):
        output = inner(queries, keys, values, tables, lengths, scale=scale, window=window, sinks=sinks, starts=starts)
        if queries.shape[2] > 1:
            rest = (keys, values, tables, lengths, scale, window, None, sinks, starts)
            position = lengths[:, None] - queries.shape[2] + mx.arange(queries.shape[2])
            real = (position >= 0)[:, None, :, None]
            exact, near, ours = exact_attention(queries.astype(mx.float32), *rest), plain(queries, *rest), output
            near, ours, exact = (mx.where(real, x.astype(mx.float32), 0) for x in (near, ours, exact))
            prompts.append((queries.shape[0], distance(ours, exact), distance(near, exact)))
        return output

    monkeypatch.setattr(attention, "paged_attention", compared)
    model = zoo.build("qwen3")
    model.set_dtype(mx.bfloat16)
    with emulated("cuda", "paged_attention"):
        served = engine(model=model, compile_decode=False, batch_prefill=True, max_num_batched_tokens=128)
        for length in lengths:
            served.add_request(prompt(length, length), SamplingParams(temperature=0, max_tokens=2))
        drain(served)
    assert max(rows for rows, _, _ in prompts) == len(lengths)
    for _, ours, near in prompts:
        assert ours <= 2 * near


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3_text", "qwen2"])
def test_a_decode_step_of_fused_attentions_gives_the_tokens_of_the_layers_as_they_are(name):
    runs = {}
    for fused in (False, True):
        model = zoo.build(name)
        model.set_dtype(mx.float16)
        with emulated("cuda", "append_rows"), emulated("cuda", "paged_attention"), emulated("cuda", "linear_rows"):
            if fused:
                assert "attentions" in cuda_layers.accelerate(model)[0]
            served = engine(model=model, compile_decode=False)
            greedy = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
            requests = [served.add_request(prompt(length, length), greedy) for length in LENGTHS]
            outputs = drain(served)
        runs[fused] = [[entry for output in outputs[request] for entry in output.logprobs] for request in requests]
    for fused, written_out in zip(runs[True], runs[False], strict=True):
        for ours, theirs in zip(fused, written_out, strict=True):
            (_, first), (_, second) = theirs.top
            if ours.token_id != theirs.token_id:  # only where rounding may choose
                assert first - second < NEAR
                break
            assert abs(ours.logprob - theirs.logprob) < NEAR
