"""One sampler for the whole batch: kept sets by brute force, distributions by chi-square, rows independent."""

import math

import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.sampler import Sampler, logprobs
from metalctl.engine.sequence import PENDING, SamplingParams, Sequence

V = 50


def row(seed: int = 0, prompt=(1, 2, 3), output=(), **params) -> Sequence:
    name = f"s{id(params)}"
    return Sequence(name, [*prompt, *output], SamplingParams(**params), seed=seed, num_prompt_tokens=len(prompt))


def logits(count: int, seed: int = 0, scale: float = 2.0) -> mx.array:
    return scale * mx.random.normal((count, V), key=mx.random.key(seed))


def sample(rows: list[Sequence], values: mx.array, positions=None, eos=frozenset()) -> list[int]:
    positions = positions or [r.num_tokens for r in rows]
    return Sampler(eos)(values, rows, positions).tokens.tolist()


def probabilities(values: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """By brute force, in float64."""
    scaled = values.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    kept, total = [], 0.0
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += p[token]
    kept = [t for t in kept if p[t] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 1},
]


@pytest.mark.parametrize("params", FILTERS)
def test_draws_follow_the_distribution_and_never_leave_the_kept_set(params):
    count = 4000
    values = mx.broadcast_to(logits(1, 7), (count, V))
    rows = [row(seed=i, **params) for i in range(count)]
    drawn = np.bincount(sample(rows, values), minlength=V)
    expected = probabilities(np.array(values[0]), **params) * count
    assert drawn[expected == 0].sum() == 0
    large = expected >= 5
    observed = np.append(drawn[large], drawn[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    chi_square = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9))[wanted > 0].sum())
    freedom = max(1, int((wanted > 0).sum()) - 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_every_row_is_what_it_would_be_alone():
    rows = [row(seed=i, **params) for i, params in enumerate(FILTERS)]
    rows += [
        row(temperature=0.0),
        row(seed=3, repetition_penalty=1.8, output=(4, 4)),
        row(seed=4, presence_penalty=1.5, frequency_penalty=0.5, output=(7, 7, 8)),
        row(seed=5, logit_bias=((9, 6.0), (10, -100.0))),
        row(seed=6, allowed_token_ids=(11, 12)),
        row(seed=7, banned_token_ids=tuple(range(40))),
        row(seed=8, min_tokens=5),
    ]
    values = logits(len(rows), 3)
    together = sample(rows, values, eos=frozenset({0}))
    for index, single in enumerate(rows):
        alone = sample([single], values[index : index + 1], eos=frozenset({0}))
        assert alone == [together[index]], FILTERS[index] if index < len(FILTERS) else single.params


def test_the_number_that_decides_is_of_splitmix64():
    """Its first numbers from 0 begin with these bytes; with all of 256 tokens equally likely the byte is the token."""
    flat = mx.zeros((4, 256))
    assert sample([row(seed=0) for _ in range(4)], flat, positions=[1, 2, 3, 4]) == [0xE2, 0x6E, 0x06, 0xF8]


def test_a_seed_and_a_position_decide():
    values = mx.broadcast_to(logits(1), (200, V))
    again = [row(seed=5) for _ in range(200)]
    assert len(set(sample(again, values, positions=[9] * 200))) == 1
    assert len(set(sample(again, values, positions=list(range(200))))) > 5
    assert len(set(sample([row(seed=i) for i in range(200)], values, positions=[9] * 200))) > 5
    assert sample([row(seed=-1)], values[:1]) == sample([row(seed=2**64 - 1)], values[:1])


def test_greedy_takes_the_likeliest_and_ignores_filters():
    values = logits(3, 5)
    rows = [row(temperature=0.0), row(temperature=0.0, top_k=1, top_p=0.1), row(temperature=0.0, min_p=1.0)]
    assert sample(rows, values) == np.array(values).argmax(-1).tolist()


def test_penalties_are_those_of_their_definitions():
    values = np.array(logits(1, 11))
    prompt, output = (1, 2, 2), (3, 3, 4)
    expected = values.astype(np.float64).copy()
    for token in {*prompt, *output}:
        expected[0, token] = expected[0, token] / 1.7 if expected[0, token] > 0 else expected[0, token] * 1.7
    for token, times in {3: 2, 4: 1}.items():
        expected[0, token] -= 0.9 + 0.4 * times
    penalised = row(
        prompt=prompt, output=output, repetition_penalty=1.7, presence_penalty=0.9, frequency_penalty=0.4, temperature=0
    )
    sampler = Sampler(frozenset())
    adjusted = sampler._adjust(mx.array(values), sampler._rows_for([penalised], V))
    np.testing.assert_allclose(np.array(adjusted), expected, atol=1e-5)


def test_tokens_that_python_has_not_read_are_penalised_too():
    """One row joins while the other's last token is still PENDING: counts must include it."""
    values = mx.array(np.tile(np.linspace(1, 2, V, dtype=np.float32), (2, 1)))
    sampler = Sampler(frozenset())
    first = row(temperature=0.0, presence_penalty=50.0, prompt=(1,))
    assert sampler(values[:1], [first], [1]).tokens.tolist() == [V - 1]
    first.token_ids.append(PENDING)
    second = row(temperature=0.0, presence_penalty=50.0, prompt=(2,))
    assert sampler(values, [first, second], [2, 1]).tokens.tolist() == [V - 2, V - 1]
    first.token_ids[-1:] = [V - 1, PENDING]
    second.token_ids.append(PENDING)
    assert sampler(values, [first, second], [3, 2]).tokens.tolist() == [V - 3, V - 2]


def test_bans_bias_and_allowed_sets():
    values = logits(1, 2)
    best = int(mx.argmax(values[0]))
    assert sample([row(temperature=0.0, banned_token_ids=(best,))], values) != [best]
    assert sample([row(temperature=0.0, logit_bias=((17, 100.0),))], values) == [17]
    assert sample([row(temperature=0.0, allowed_token_ids=(23,))], values) == [23]
    everything_else = tuple(t for t in range(V) if t != 31)
    assert sample([row(seed=1, banned_token_ids=everything_else)], values) == [31]


def test_end_tokens_wait_for_min_tokens():
    values = mx.zeros((1, V)).at[0, 4].add(50.0).at[0, 6].add(40.0)
    early = row(temperature=0.0, min_tokens=2, stop_token_ids=(6,), output=(9,))
    late = row(temperature=0.0, min_tokens=2, stop_token_ids=(6,), output=(9, 9))
    assert sample([early], values, eos=frozenset({4})) not in ([4], [6])
    assert sample([late], values, eos=frozenset({4})) == [4]


def test_ties_and_infinities_do_no_harm():
    values = mx.zeros((2, V))
    assert 0 <= sample([row(seed=1, top_k=3), row(seed=2)], values)[0] < V
    only = mx.full((1, V), -float("inf")).at[0, 8].add(float("inf"))
    only = mx.where(mx.arange(V) == 8, 1.0, -float("inf"))[None]
    assert sample([row(seed=1, top_p=0.5)], only) == [8]


def test_logprobs_are_those_of_log_softmax():
    values = logits(4, 9)
    tokens = mx.array([3, 8, 0, 49])
    requested = mx.array([[1, 2]] * 4)
    got = logprobs(values, tokens, 5, requested)
    reference = np.array(values, np.float64)
    reference -= np.log(np.exp(reference).sum(-1, keepdims=True))
    for index, token in enumerate(tokens.tolist()):
        assert abs(got.logprob[index].item() - reference[index, token]) < 1e-5
        assert got.rank[index].item() == 1 + int((reference[index] > reference[index, token]).sum())
        order = np.argsort(-reference[index])[:5]
        assert got.top_ids[index].tolist() == order.tolist()
        np.testing.assert_allclose(np.array(got.top_logprobs[index]), reference[index, order], atol=1e-5)
        np.testing.assert_allclose(np.array(got.requested[index]), reference[index, [1, 2]], atol=1e-5)
