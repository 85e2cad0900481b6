"""The prefix cache is exact: see docs/prefix-cache.md for the three senses of the word that are held here."""

from functools import partial

import mlx.core as mx
import pytest

from driving import LogitsTap, assert_nothing_held, drain, engine, generate, tokens
from metalctl.engine.sequence import SamplingParams
from tests.engine.architectures import matching, zoo
from tiny import prompt, reference

BLOCK, CHUNK = 8, 32
RECURRENT = sorted(zoo.HYBRIDS)
ATTENTION = ["llama", "gemma3_text", "gemma2", "deepseek_v3", "gpt_oss", "qwen3", "cohere2", "exaone4", "olmo2"]
FAMILIES = [*RECURRENT, *ATTENTION]
EVERY_FAMILY = sorted(zoo.RUNNABLE)


@pytest.fixture(scope="module")
def models():
    """Models are built once: name -> (for the engine, for the reference)."""
    built: dict[str, tuple] = {}

    def get(name: str):
        if name not in built:
            built[name] = (zoo.build(name), zoo.build(name))
        return built[name]

    return get


def make(model, mode: str):
    return engine(model=model, prefix_cache=mode, block_size=BLOCK, max_num_batched_tokens=CHUNK)


def run(runner, token_ids, count=6):
    """(tokens, logits [count, V], cached prompt tokens)"""
    tap = LogitsTap(runner)
    name = runner.add_request(token_ids, SamplingParams(temperature=0, max_tokens=count))
    outputs = drain(runner)[name]
    runner.runner.sampler = tap._sampler
    return tokens(outputs), tap.of(name), outputs[-1].usage.cached_tokens


def assert_close(got, expected, scale=2e-5):
    got_tokens, got_logits, _ = got
    tokens_alone, logits_alone = expected
    assert got_tokens == tokens_alone
    size = max(1.0, mx.abs(logits_alone).max().item())
    assert mx.abs(got_logits - logits_alone).max().item() <= scale * size


def assert_matches_alone(model, got, token_ids):
    """Against any cutting: here the whole prompt at once."""
    assert_close(got, reference(model, token_ids, len(got[0])))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("extra", [0, 1, BLOCK - 1])
def test_hit_after_divergent_suffix_is_exact(models, name, extra):
    served, alone = models(name)
    runner = make(served, "on")
    shared = prompt(5 * BLOCK + extra, 1)
    run(runner, shared, 1)
    hits = 0
    for suffix in range(4 if extra else 2):
        token_ids = shared + prompt(3 + 2 * suffix, 50 + suffix)
        got = run(runner, token_ids, 4)
        hits += got[2]
        assert_matches_alone(alone, got, token_ids)
    assert hits > 0
    assert_nothing_held(runner)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_twenty_divergent_suffixes_are_exact(models, name):
    """Within what the model's own rounding moves, where that is more."""
    served, alone = models(name)
    tolerance, make_cache = matching.reference_of(name, alone).tolerance, partial(zoo.make_cache, name)
    for extra in (0, 1, BLOCK - 1):
        runner = make(served, "on")
        shared = prompt(5 * BLOCK + extra, 1)
        run(runner, shared, 1)
        for suffix in range(20):
            token_ids = shared + prompt(1 + suffix, 50 + suffix)
            expected = reference(alone, token_ids, 4, make_cache=make_cache)
            assert_close(run(runner, token_ids, 4), expected, tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_growing_chat_hits_on_its_second_turn_and_stays_exact(models, name):
    served, alone = models(name)
    runner = make(served, "on")
    chat = prompt(3 * BLOCK + 3, 2)
    before = 0
    for turn in range(4):
        got = run(runner, chat, 13)
        assert_matches_alone(alone, got, chat)
        # All but the last part of a block of what was there before, the answer included.
        assert got[2] >= (before - 1) // BLOCK * BLOCK
        before = len(chat) + 13
        chat = chat + got[0] + prompt(4, 70 + turn)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hit_is_bit_for_bit_an_uncached_run_with_the_same_cuts(models, name):
    served, _ = models(name)
    runner = make(served, "on")
    first = prompt(5 * BLOCK, 3)
    second = first + prompt(9, 4)
    run(runner, first, 1)
    got = run(runner, second)
    assert got[2] == 5 * BLOCK
    uncached = make(served, "off")
    cuts = [CHUNK, 5 * BLOCK, 6 * BLOCK, len(second)]  # the grid, the end of the first prompt, the last whole block
    if not runner.layout.has_states:
        cuts.remove(6 * BLOCK)
    uncached.scheduler._chunk_length = lambda s: (
        next((cut for cut in cuts if cut > s.num_cached_tokens), s.num_tokens) - s.num_cached_tokens
    )
    expected = run(uncached, second)
    assert got[0] == expected[0]
    assert mx.array_equal(got[1], expected[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_in_exact_mode_output_does_not_depend_on_the_cache(models, name):
    served, _ = models(name)
    cached, uncached = make(served, "exact"), make(served, "off")
    shared = prompt(2 * CHUNK + 5, 5)
    hits = 0
    for index, length in enumerate((0, 1, 7, CHUNK)):
        token_ids = shared + prompt(length, 80 + index)
        got, expected = run(cached, token_ids), run(uncached, token_ids)
        assert got[0] == expected[0]
        assert mx.array_equal(got[1], expected[1])
        hits += got[2]
        assert got[2] % CHUNK == 0
    assert hits >= 3 * 2 * CHUNK


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "nemotron_h"])
def test_an_exact_hit_still_yields_a_first_token(models, name):
    served, alone = models(name)
    runner = make(served, "on")
    token_ids = prompt(4 * BLOCK, 6)
    first = run(runner, token_ids)
    again = run(runner, token_ids)
    assert again[2] == 3 * BLOCK
    assert first[0] == again[0]
    assert_matches_alone(alone, again, token_ids)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "granitemoehybrid"])
def test_seeded_text_is_the_same_with_the_cache_on_and_off(models, name):
    served, _ = models(name)
    texts = set()
    for mode in ("on", "exact", "off"):
        runner = make(served, mode)
        for _ in range(2):
            outputs = generate(runner, prompt(45, 7), temperature=0.9, top_p=0.95, seed=11, max_tokens=20)
            texts.add(tuple(tokens(outputs)))
    assert len(texts) == 1


def test_revision_dtype_and_salt_are_in_the_key(models):
    served, _ = models("llama")
    runner = make(served, "on")
    run(runner, prompt(40, 8))
    name = runner.add_request(prompt(40, 8), SamplingParams(max_tokens=1), cache_salt=b"adapter")
    assert drain(runner)[name][-1].usage.cached_tokens == 0
    other = make(served, "on")
    assert other.blocks._root == runner.blocks._root
    half = engine(model=served, prefix_cache="on", kv_cache_dtype="float16")
    assert half.blocks._root != runner.blocks._root


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "mamba2", "deepseek_v3"])
def test_one_budget_and_bytes_charged_are_bytes_allocated(models, name):
    """Random requests: what the pools take never exceeds the budget, and is what their entries were charged at."""
    served, _ = models(name)
    budget = 600_000 if name == "qwen3_next" else 500_000
    runner = engine(model=served, prefix_cache="on", max_model_len=256, kv_cache_bytes=budget, max_num_seqs=4)
    for index in range(60):
        shared = prompt(16, index % 3)
        runner.add_request(shared + prompt(1 + index % 40, index), SamplingParams(temperature=0, max_tokens=12))
        if index % 5 == 0:
            drain(runner, lambda: _check_bytes(runner, budget))
    drain(runner, lambda: _check_bytes(runner, budget))
    assert_nothing_held(runner)


def _check_bytes(runner, budget: int) -> None:
    taken = runner.runner.caches.nbytes
    charged = sum(
        pool.capacity * runner.layout.block_bytes(group, runner.config.block_size)
        for group, pool in enumerate(runner.blocks.pools)
    )
    if runner.blocks.states is not None:
        charged += runner.blocks.states.capacity * runner.layout.slot_bytes
    assert taken <= charged <= budget
    # Pools grow at the next launch, so they may be behind what is charged, never ahead of it.
    runner.runner.caches.grow(runner.blocks)
    assert runner.runner.caches.nbytes == charged
