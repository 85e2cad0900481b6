"""Driving an engine to its end, and what every test wants to know afterwards."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sequence import RequestOutput, SamplingParams
from tiny import build, load

GREEDY = {"temperature": 0.0}


def engine(name: str = "llama", *, eos: Sequence[int] = (), context: int = 4096, model=None, **config) -> LLMEngine:
    settings = {"block_size": 8, "max_num_batched_tokens": 16, "kv_cache_bytes": 1 << 24, **config}
    return LLMEngine(load(model or build(name), eos, context), EngineConfig(**settings))


def drain(
    engine: LLMEngine, each_step: Callable[[], None] = lambda: None, fail: bool = True
) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left to do. All outputs by request; an error of one is raised unless `fail` is False."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            if fail and output.error is not None:
                raise output.error
            outputs.setdefault(output.request_id, []).append(output)
        each_step()
    if fail:
        assert engine.stats().errors == 0
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def generate(engine: LLMEngine, prompt: Sequence[int], **params) -> list[RequestOutput]:
    name = engine.add_request(prompt, SamplingParams(**{**GREEDY, "max_tokens": 16, **params}))
    return drain(engine)[name]


class LogitsTap:
    """Stands in for an engine's sampler and keeps the logits of every token that it chose, by request and position."""

    def __init__(self, engine: LLMEngine):
        self._sampler = engine.runner.sampler
        self.rows: dict[tuple[str, int], mx.array] = {}
        engine.runner.sampler = self  # type: ignore[assignment]

    def __call__(self, logits, sequences, positions):
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            self.rows[sequence.request_id, position] = logits[row]
        return self._sampler(logits, sequences, positions)

    def of(self, request_id: str) -> mx.array:
        """`[count, V]` in the order of positions."""
        return mx.stack([row for (name, _), row in sorted(self.rows.items()) if name == request_id])


def assert_nothing_held(engine: LLMEngine) -> None:
    blocks = engine.blocks
    assert blocks.num_holders == 0
    assert all(pool.num_used == 0 for pool in blocks.pools)
    assert blocks.states is None or blocks.states.num_used == 0
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
