"""Whether the engine computes what a model computes by itself: the same greedy tokens, and the same logits.

Two runs of one engine hold all that a step can be: three prompts admitted in one step and read in one go, then decoded
as a batch of three lengths; and prompts cut at places that fit no block, of which one arrives while others decode.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sampler import Sampled
from metalctl.engine.sequence import RequestOutput, SamplingParams, Sequence
from tests.engine import tiny

BLOCK = 8
CHUNK = 7  # cuts prompts at 7, 14, 21, ... against blocks that end at 8, 16, 24, ...
TOKENS = 16
TOLERANCE = 2e-5  # of logits whose largest are around 1 to 10

ONE_SHOT = {"one-shot 21": (0, 21), "one-shot 5": (0, 5), "one-shot 14": (0, 14)}  # (step of arrival, prompt's length)
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


def run(engine: LLMEngine, requests: dict[str, tuple[int, int]], count: int = TOKENS) -> dict[str, Result]:
    """What the engine brings for requests that arrive at these steps with prompts of these lengths."""
    recorder = Recorder(engine)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    arrivals = sorted((step, name, length) for name, (step, length) in requests.items())
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            _, name, length = arrivals.pop(0)
            engine.add_request(tiny.prompt(length, seed=length), params, name)
        for output in engine.step():
            tokens[output.request_id] += _tokens(output)
        step += 1
    engine.runner.sampler = recorder._sampler
    return {name: Result(tokens[name], mx.stack(recorder.rows[name])) for name in requests}


def engine_results(model: nn.Module) -> dict[str, Result]:
    engine = engine_of(model)
    results = run(engine, ONE_SHOT)
    engine.scheduler.chunk_size = CHUNK
    results |= run(engine, CHUNKED)
    assert engine.stats().errors == 0
    return results


def reference_results(model: nn.Module, count: int = TOKENS) -> dict[str, Result]:
    """The same by the model with mlx-lm's own cache, one prompt after the other. Before an engine has been made of it."""
    return {
        name: Result(*tiny.reference(model, tiny.prompt(length, seed=length), count))
        for name, (_, length) in (ONE_SHOT | CHUNKED).items()
    }


def mismatches(got: dict[str, Result], expected: dict[str, Result]) -> list[str]:
    """One line for each request that differs."""
    lines = []
    for name, result in expected.items():
        difference = got[name].difference(result)
        if got[name].tokens != result.tokens or not difference <= TOLERANCE:
            same = sum(a == b for a, b in zip(got[name].tokens, result.tokens, strict=True))
            lines.append(f"{name}: logits differ by {difference:.1e}, {same} of {len(result.tokens)} tokens agree")
    return lines


def _tokens(output: RequestOutput) -> Many[int]:
    if output.error is not None:
        raise output.error
    return output.token_ids
