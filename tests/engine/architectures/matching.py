"""Whether the engine computes what a model computes by itself: the same greedy tokens, and the same logits.

Two runs of one engine hold all that a step can be: three prompts admitted in one step and read in one go, then decoded
as a batch of three lengths; and prompts cut at places that fit no block, of which one arrives while others decode.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sampler import Sampled
from metalctl.engine.sequence import RequestOutput, SamplingParams, Sequence
from tests.engine import tiny
from tests.engine.architectures import zoo

BLOCK = 8
CHUNK = 7  # cuts prompts at 7, 14, 21, ... against blocks that end at 8, 16, 24, ...
TOKENS = 16
TOLERANCE = 2e-5  # of logits whose largest are around 1 to 10

ONE_SHOT = {"one-shot 21": (0, 21), "one-shot 1": (0, 1), "one-shot 14": (0, 14)}  # (step of arrival, prompt's length)
CHUNKED = {"chunked 40": (0, 40), "chunked 11": (0, 11), "joining 27": (8, 27)}


@dataclass(frozen=True, slots=True)
class Result:
    tokens: list[int]
    logits: mx.array  # [N, V]

    def difference(self, other: "Result") -> float:
        """The largest difference of logits, relative to the largest logit where that is above 1; inf where only one
        of the two is finite."""
        mine, theirs = mx.isfinite(self.logits), mx.isfinite(other.logits)
        if self.logits.shape != other.logits.shape or not mx.array_equal(mine, theirs):
            return float("inf")
        both = mx.where(mine, mx.abs(self.logits - other.logits), 0)
        scale = mx.where(mine, mx.abs(other.logits), 0).max()
        return float((both.max() / mx.maximum(scale, 1)).item())


class Recorder:
    """Stands before an engine's sampler and keeps the logits that each request's tokens are chosen from."""

    def __init__(self, engine: LLMEngine):
        self._sampler = engine.runner.sampler
        self.rows: dict[str, list[mx.array]] = {}
        engine.runner.sampler = self  # type: ignore[assignment]

    def __call__(self, logits: mx.array, sequences: Many[Sequence], positions: Many[int]) -> Sampled:
        for row, sequence in enumerate(sequences):
            self.rows.setdefault(sequence.request_id, []).append(logits[row])
        return self._sampler(logits, sequences, positions)


def engine_of(model: nn.Module, **settings: object) -> LLMEngine:
    settings = {"block_size": BLOCK, "max_num_seqs": 4, "kv_cache_bytes": 1 << 28, "prefix_cache": "off"} | settings
    return LLMEngine(tiny.load(model), EngineConfig(**settings))  # type: ignore[arg-type]


def run(
    engine: LLMEngine, requests: dict[str, tuple[int, int]], count: int = TOKENS, **sampling: Any
) -> dict[str, Result]:
    """What the engine brings for requests that arrive at these steps with prompts of these lengths."""
    recorder = Recorder(engine)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **sampling)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    arrivals = sorted((step, name, length) for name, (step, length) in requests.items())
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            _, name, length = arrivals.pop(0)
            engine.add_request(tiny.prompt(length, seed=length), params, name)
        for output in engine.step():
            if output.request_id in tokens:
                tokens[output.request_id] += _tokens(output)
        step += 1
    engine.runner.sampler = recorder._sampler
    return {name: Result(tokens[name], mx.stack(recorder.rows[name])) for name in requests}


def engine_results(engine: LLMEngine) -> dict[str, Result]:
    results = run(engine, ONE_SHOT)
    engine.scheduler.chunk_size = CHUNK
    results |= run(engine, CHUNKED)
    assert engine.stats().errors == 0
    return results


@dataclass(frozen=True, slots=True)
class Reference:
    """What the model brings with mlx-lm's own caches, one prompt after the other."""

    results: dict[str, Result]
    rounding: float  # by how much the model differs from itself where it reads the same tokens in one go

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, min(2 * self.rounding, 10 * TOLERANCE))


def reference_of(name: str, model: nn.Module, count: int = TOKENS) -> Reference:
    """To be called before an engine has been made of the model."""
    make_cache = partial(zoo.make_cache, name)
    prompts = {key: tiny.prompt(length, seed=length) for key, (_, length) in (ONE_SHOT | CHUNKED).items()}
    results = {
        key: Result(*tiny.reference(model, prompt, count, make_cache=make_cache)) for key, prompt in prompts.items()
    }
    key, prompt = next(iter(prompts.items()))
    logits = model(mx.array([prompt + results[key].tokens[:-1]]), cache=make_cache(model))[0, len(prompt) - 1 :]
    return Reference(results, results[key].difference(Result(results[key].tokens, logits)))


def mismatches(got: dict[str, Result], reference: Reference) -> list[str]:
    """One line for each request that differs by more than rounding."""
    lines = []
    for name, result in reference.results.items():
        difference = got[name].difference(result)
        if got[name].tokens != result.tokens or not difference <= reference.tolerance:
            same = sum(a == b for a, b in zip(got[name].tokens, result.tokens, strict=True))
            lines.append(f"{name}: logits differ by {difference:.1e}, {same} of {len(result.tokens)} tokens agree")
    return lines


def _tokens(output: RequestOutput) -> Many[int]:
    if output.error is not None:
        raise output.error
    return output.token_ids
