"""Many requests at once: each output is what the request would get alone, whatever happens around it."""

import random

import mlx.core as mx
import pytest

from driving import assert_nothing_held, drain, engine, generate, text, tokens
from metalctl.engine.cache import cache_set, forward, paged_kv, recurrent_state
from metalctl.engine.errors import ContextLengthError, OutOfMemoryError, UsageError
from metalctl.engine.sequence import FinishReason, SamplingParams, Status
from tiny import CONFIGS, build, prompt, reference

WINDOWED = "gemma3_text"


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_tokens_are_those_of_the_model_alone(name):
    lengths = (5, 21, 40, 1, 16, 33)
    runner = engine(name)
    names = {runner.add_request(prompt(n, n), SamplingParams(temperature=0, max_tokens=24)): n for n in lengths}
    outputs = drain(runner)
    model = build(name)
    for request, length in names.items():
        expected, _ = reference(model, prompt(length, length), 24)
        assert tokens(outputs[request]) == expected


@pytest.mark.parametrize("name", ["llama", WINDOWED])
@pytest.mark.parametrize("sampled", [False, True])
def test_joining_and_leaving_at_any_step_changes_no_output(name, sampled):
    rng = random.Random(sampled)
    runner = engine(name, max_num_seqs=8, prefix_cache="off")
    requests = {}
    for index in range(100):
        params = SamplingParams(
            temperature=0.8 if sampled else 0.0, seed=index, max_tokens=rng.randint(1, 30), top_p=rng.choice((1, 0.9))
        )
        requests[f"r{index}"] = (prompt(rng.choice((1, 2, 7, 8, 9, 30, rng.randint(1, 400))), index), params)
    waiting = list(requests)
    got: dict[str, list[int]] = {request: [] for request in requests}
    while waiting or runner.has_work:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                runner.add_request(*requests[waiting[0]], request_id=waiting.pop(0))
        for output in runner.step():
            assert output.error is None
            got[output.request_id].extend(output.token_ids)
    assert_nothing_held(runner)
    for request in rng.sample(sorted(requests), 40):
        alone = engine(name, model=runner.loaded.model, prefix_cache="off")
        alone.add_request(*requests[request], request_id=request)
        assert tokens(drain(alone)[request]) == got[request]


def test_decoding_goes_on_while_a_long_prompt_is_read():
    runner = engine(max_num_batched_tokens=16)
    runner.add_request(prompt(4), SamplingParams(temperature=0, max_tokens=60), "stream")
    while not any(output.token_ids for output in runner.step()):
        pass
    runner.add_request(prompt(600), SamplingParams(temperature=0, max_tokens=1), "long")
    heard = 0
    while True:
        outputs = {output.request_id for output in runner.step()}
        if "long" in outputs:
            break
        assert "stream" in outputs  # a token in every step: the longest gap is one chunk
        heard += 1
    assert heard >= 600 // 16


def test_room_for_exactly_one_longest_request():
    """The pool holds 64 tokens: a request of 64 completes, one of 65 is refused at once with both numbers."""
    runner = engine(max_model_len=64, kv_cache_bytes=_bytes_for(64))
    assert runner.blocks.pools[0].limit - 1 == 8
    outputs = generate(runner, prompt(40), max_tokens=24)
    assert len(tokens(outputs)) == 24
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(ContextLengthError, match=r"41 tokens and 24 are to follow, but the context holds 64"):
        runner.add_request(prompt(41), SamplingParams(max_tokens=24))
    assert not runner.has_work


def test_a_context_that_does_not_fit_is_refused_with_every_term():
    with pytest.raises(OutOfMemoryError, match="budget for the cache") as caught:
        engine(max_model_len=72, kv_cache_bytes=_bytes_for(64))
    assert "--max-model-len" in caught.value.hint


def test_without_a_limit_generation_ends_where_the_context_does():
    runner = engine(max_model_len=48)
    outputs = generate(runner, prompt(20), max_tokens=None)
    assert len(tokens(outputs)) == 28
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["llama", WINDOWED])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_preemption_changes_no_output(name, mode):
    model = build(name)
    roomy = engine(name, model=model)
    expected = {i: tokens(generate(roomy, prompt(20, i), max_tokens=40)) for i in range(4)}
    tight = engine(name, model=model, max_model_len=64, kv_cache_bytes=_bytes_for(130, name), prefix_cache=mode)
    for i in expected:
        tight.add_request(prompt(20, i), SamplingParams(temperature=0, max_tokens=40), str(i))
    outputs = drain(tight)
    assert tight.stats().preemptions > 0
    assert {i: tokens(outputs[str(i)]) for i in expected} == expected
    assert_nothing_held(tight)


def test_the_youngest_is_preempted():
    tight = engine(max_model_len=64, kv_cache_bytes=_bytes_for(100))
    for i in range(3):
        tight.add_request(prompt(20, i), SamplingParams(temperature=0, max_tokens=40), str(i))
    oldest = tight._sequences["0"]
    finished = [o.request_id for outputs in drain(tight).values() for o in outputs if o.finished]
    assert oldest.preemptions == 0
    assert finished[0] == "0"
    assert tight.stats().preemptions > 0


def test_a_thousand_steps_leave_memory_flat():
    runner = engine(WINDOWED, max_model_len=128, kv_cache_bytes=_bytes_for(400, WINDOWED))
    sizes = []

    def measure():
        sizes.append(mx.get_active_memory() - runner.runner.caches.nbytes)

    steps = 0
    while steps < 1100:
        runner.add_request(prompt(30, steps), SamplingParams(temperature=0.7, max_tokens=60))
        runner.add_request(prompt(9, steps), SamplingParams(temperature=0, max_tokens=70))
        drain(runner, measure)
        steps = len(sizes)
    early, late = max(sizes[200:400]), max(sizes[-200:])
    assert late <= early * 1.02
    one_copy_of_the_pools = runner.runner.caches.nbytes
    assert max(sizes[200:]) - min(sizes[200:]) < one_copy_of_the_pools
    assert_nothing_held(runner)


def test_cancelling_at_any_moment_frees_every_block():
    rng = random.Random(4)
    runner = engine(WINDOWED, max_num_seqs=6, max_model_len=128, kv_cache_bytes=_bytes_for(400, WINDOWED))
    alive: list[str] = []
    cancelled = 0
    while cancelled < 1000:
        if len(alive) < 12:
            name = runner.add_request(prompt(rng.randint(1, 60), rng.randint(0, 9)), SamplingParams(max_tokens=60))
            alive.append(name)
        for _ in range(rng.randint(0, 2)):
            for output in runner.step():
                if output.finished:
                    alive.remove(output.request_id)
        if alive and rng.random() < 0.9:
            name = alive.pop(rng.randrange(len(alive)))
            output = runner.abort(name)
            assert output.finish_reason is FinishReason.ABORT
            cancelled += 1
    for name in alive:
        runner.abort(name)
    drain(runner)
    assert_nothing_held(runner)
    assert runner.abort("nobody") is None


def test_what_follows_a_cancel_is_not_disturbed_by_it():
    model = build("llama")
    expected = tokens(generate(engine(model=model), prompt(20, 1)))
    runner = engine(model=model)
    runner.add_request(prompt(33, 2), SamplingParams(), "gone")
    for _ in range(3):
        runner.step()
    runner.abort("gone")
    assert tokens(generate(runner, prompt(20, 1))) == expected


class TestEnds:
    def test_end_of_sequence(self):
        model = build("llama")
        free = tokens(generate(engine(model=model), prompt(9)))
        stop = free[5]
        cut = free.index(stop)
        outputs = generate(engine(model=model, eos=[stop]), prompt(9))
        assert tokens(outputs) == free[: cut + 1]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason is None
        assert text(outputs) == engine(model=model).tokenizer.decode(free[:cut])

    def test_end_of_sequence_can_be_ignored_and_put_off(self):
        model = build("llama")
        free = tokens(generate(engine(model=model), prompt(9)))
        stop = free[3]
        ignoring = generate(engine(model=model, eos=[stop]), prompt(9), ignore_eos=True)
        assert tokens(ignoring) == free
        later = generate(engine(model=model, eos=[stop]), prompt(9), min_tokens=10)
        assert stop not in tokens(later)[:10]
        assert len(tokens(later)) >= 10

    def test_stop_token(self):
        free = tokens(generate(engine(), prompt(9)))
        outputs = generate(engine(), prompt(9), stop_token_ids=(free[4],))
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason == free[4]

    def test_stop_string_over_several_tokens(self):
        free = generate(engine(), prompt(9), max_tokens=30)
        whole = text(free)
        stop = whole[11:16]
        cut = whole.index(stop)
        outputs = generate(engine(), prompt(9), max_tokens=30, stop=(stop,))
        assert text(outputs) == whole[:cut]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason == stop

    def test_usage(self):
        runner = engine()
        first = generate(runner, prompt(40), max_tokens=5)[-1].usage
        assert (first.prompt_tokens, first.output_tokens, first.cached_tokens) == (40, 5, 0)
        assert 0 <= first.queue_time <= first.time_to_first_token <= first.elapsed
        second = generate(runner, prompt(40), max_tokens=5)[-1].usage
        assert second.cached_tokens == 32


class TestFaults:
    """A failing request ends with its error; what runs beside it and what comes after gets its right answer."""

    def _others(self, runner, poison) -> None:
        model = runner.loaded.model
        expected = {i: tokens(generate(engine(model=model), prompt(12 + i, i))) for i in range(3)}
        for i in expected:
            runner.add_request(prompt(12 + i, i), SamplingParams(temperature=0, max_tokens=16), str(i))
        poison()
        outputs = drain(runner, fail=False)
        assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
        assert "poisoned" in str(outputs["bad"][-1].error)
        assert {i: tokens(outputs[str(i)]) for i in expected} == expected
        assert tokens(generate_after_fault(runner)) == tokens(generate(engine(model=model), prompt(30, 9)))
        assert_nothing_held(runner)

    def test_in_the_sampler(self):
        runner = engine()
        inner = runner.runner.sampler

        def sampler(logits, sequences, positions):
            if any(s.request_id == "bad" and s.num_output_tokens == 5 for s in sequences):
                raise ValueError("poisoned sampler")
            return inner(logits, sequences, positions)

        runner.runner.sampler = sampler
        self._others(runner, lambda: runner.add_request(prompt(7), SamplingParams(max_tokens=30), "bad"))

    def test_in_the_detokenizer(self):
        runner = engine()

        def poison():
            runner.add_request(prompt(7), SamplingParams(max_tokens=30), "bad")

            def add(token, watch=True):
                raise ValueError("poisoned detokenizer")

            runner._texts["bad"].add = add

        self._others(runner, poison)

    def test_in_the_model(self):
        runner = engine()
        inner = runner.runner.caches.call

        def call(model, inputs, step):
            if inputs.shape[1] == 11:  # only the bad prompt has this length
                raise RuntimeError("poisoned forward")
            return inner(model, inputs, step)

        runner.runner.caches.call = call
        self._others(runner, lambda: runner.add_request(prompt(11), SamplingParams(max_tokens=30), "bad"))


def generate_after_fault(runner):
    name = runner.add_request(prompt(30, 9), SamplingParams(temperature=0, max_tokens=16))
    return drain(runner, fail=False)[name]


class TestRefusals:
    @pytest.mark.parametrize(
        ("token_ids", "message"), [([], "empty"), ([5, 128], "outside of the vocabulary"), ([-1], "outside")]
    )
    def test_bad_prompts(self, token_ids, message):
        with pytest.raises(UsageError, match=message):
            engine().add_request(token_ids)

    def test_an_id_in_use(self):
        runner = engine()
        runner.add_request([1], request_id="x")
        with pytest.raises(UsageError, match="already"):
            runner.add_request([1], request_id="x")

    @pytest.mark.parametrize(
        "params",
        [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 2}, {"max_tokens": 0},
         {"repetition_penalty": 0}, {"presence_penalty": 1000}, {"stop": ("",)}, {"seed": 2**64}, {"logprobs": -1},
         {"temperature": float("nan")}],
    )  # fmt: skip
    def test_parameters_out_of_range(self, params):
        with pytest.raises(UsageError, match=next(iter(params))):
            SamplingParams(**params)


def test_block_tables_become_arrays_once_a_step_not_once_a_layer(monkeypatch):
    counts = {layers: _arrays_made(monkeypatch, layers) for layers in (3, 9)}
    assert counts[3] == counts[9] > 0


def _arrays_made(monkeypatch, layers: int) -> int:
    """How many arrays the cache makes from Python numbers while three requests are served."""
    runner = engine(model=build("llama", num_hidden_layers=layers), prefix_cache="off")
    generate(runner, prompt(5))  # by now the pools are there
    for i in range(3):
        runner.add_request(prompt(5 + i, i), SamplingParams(temperature=0, max_tokens=8))
    made = 0

    class Counting(type(mx)):
        def __getattr__(self, name):
            nonlocal made
            made += name in ("array", "arange", "zeros")
            return getattr(mx, name)

    with monkeypatch.context() as patch:
        for module in (cache_set, forward, paged_kv, recurrent_state):
            patch.setattr(module, "mx", Counting("mx"), raising=False)
        drain(runner)
    return made


def test_a_finished_sequence_says_so():
    runner = engine()
    name = runner.add_request(prompt(5), SamplingParams(max_tokens=3))
    sequence = runner._sequences[name]
    assert sequence.status is Status.WAITING
    drain(runner)
    assert sequence.status is Status.FINISHED
    assert sequence.num_output_tokens == 3


def _bytes_for(token_count: int, name: str = "llama") -> int:
    """Bytes for a pool of so many tokens and the null block, with its windows."""
    from metalctl.engine.cache.layout import read_layout
    from metalctl.engine.config import EngineConfig
    from metalctl.engine.memory import _Sizes

    config = EngineConfig(block_size=8, max_num_batched_tokens=16)
    return _Sizes(read_layout(build(name)), config).total(token_count)
