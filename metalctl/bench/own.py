"""This program's own engine, one cell at a time."""

import random
import time
from typing import TYPE_CHECKING

from metalctl.bench.cells import Cell
from metalctl.engine.sequence import SamplingParams

if TYPE_CHECKING:
    from metalctl.engine.engine_thread import EngineThread
    from metalctl.engine.llm_engine import LLMEngine

NAME = "metalctl"


class OwnRuntime:
    name = NAME

    def __init__(self, thread: "EngineThread", seed: int):
        self._thread = thread
        self._random = random.Random(seed)

    def seconds(self, cell: Cell) -> float:
        """Seconds of one round, with new random tokens."""
        measure = self._reading if cell.prompt else self._writing
        return float(self._thread.call(lambda engine: measure(engine, cell)))

    def close(self) -> None:
        """The engine belongs to whoever made it."""

    def _reading(self, engine: "LLMEngine", cell: Cell) -> float:
        pasts = [self._tokens(engine, cell.depth) for _ in range(cell.batch)]
        if cell.depth:  # the prefix cache has them afterwards
            for past in pasts:
                engine.add_request(past, SamplingParams(temperature=0, max_tokens=1))
            _finish(engine)
        prompts = [past + self._tokens(engine, cell.prompt) for past in pasts]
        start = time.perf_counter()
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1))
        _finish(engine)
        return time.perf_counter() - start

    def _writing(self, engine: "LLMEngine", cell: Cell) -> float:
        """From the moment when every sequence has its first token."""
        params = SamplingParams(temperature=0, max_tokens=cell.generate + 1, ignore_eos=True)
        for _ in range(cell.batch):
            engine.add_request(self._tokens(engine, max(1, cell.depth)), params)
        begun: set[str] = set()
        start = time.perf_counter()
        while engine.has_work:
            for output in engine.step():
                _check(output.error)
                if output.request_id not in begun:
                    begun.add(output.request_id)
                    start = time.perf_counter()
        return time.perf_counter() - start

    def _tokens(self, engine: "LLMEngine", count: int) -> list[int]:
        return [self._random.randrange(engine.vocab_size) for _ in range(count)]


def _finish(engine: "LLMEngine") -> None:
    while engine.has_work:
        for output in engine.step():
            _check(output.error)


def _check(error: Exception | None) -> None:
    if error is not None:
        raise error
