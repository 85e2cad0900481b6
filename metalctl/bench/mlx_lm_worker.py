"""mlx-lm as it is, on MLX as it is, timing the cells that come in on stdin (see peers.Worker)."""

import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from metalctl.bench.cells import Cell
from metalctl.bench.peers import NotSupported


class MlxLm:
    def __init__(self, checkpoint: dict[str, Any]):
        from metalctl.engine.models.checkpoint import Checkpoint
        from metalctl.engine.models.loader import load

        files = tuple(map(Path, checkpoint["files"]))
        loaded = load(Checkpoint("", checkpoint["format"], Path(checkpoint["path"]), files))
        self.model = loaded.model
        self.vocabulary = len(loaded.tokenizer) if hasattr(loaded.tokenizer, "__len__") else 1000
        self.generate = importlib.import_module("mlx_lm.generate")  # a function of that name hides the module
        self.random = random.Random(0)

    def seconds(self, cell: Cell) -> float:
        if cell.batch > 1:
            return self._batch(cell)
        return self._reading(cell) if cell.prompt else self._writing(cell)

    def _reading(self, cell: Cell) -> float:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.model)
        if cell.depth:
            next(self.generate.generate_step(self._tokens(cell.depth), self.model, max_tokens=1, prompt_cache=cache))
        start = time.perf_counter()
        next(self.generate.generate_step(self._tokens(cell.prompt), self.model, max_tokens=1, prompt_cache=cache))
        return time.perf_counter() - start

    def _writing(self, cell: Cell) -> float:
        steps = self.generate.generate_step(self._tokens(max(1, cell.depth)), self.model, max_tokens=cell.generate + 1)
        next(steps)
        start = time.perf_counter()
        for _ in steps:
            pass
        return time.perf_counter() - start

    def _batch(self, cell: Cell) -> float:
        if cell.prompt or cell.depth:
            raise NotSupported("mlx-lm reads the prompts of a batch in its own order")
        generator = self.generate.BatchGenerator(
            self.model, max_tokens=cell.generate + 1, completion_batch_size=cell.batch
        )
        generator.insert([self._tokens(1).tolist() for _ in range(cell.batch)], [cell.generate + 1] * cell.batch)
        begun, left, start = 0, cell.batch, time.perf_counter()
        while left:
            _, responses = generator.next()
            if begun < cell.batch and responses:
                begun = max(begun, len(responses))
                start = time.perf_counter()
            left -= sum(response.finish_reason is not None for response in responses)
        seconds = time.perf_counter() - start
        generator.close()
        return seconds

    def _tokens(self, count: int) -> Any:
        import mlx.core as mx

        return mx.array([self.random.randrange(self.vocabulary) for _ in range(count)])


def main(make: Any) -> None:
    """Answers the first line when `make` is ready, and then one line for each cell."""
    runtime = make(json.loads(sys.stdin.readline()))
    answer: dict[str, Any] = {}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        try:
            answer = {"seconds": runtime.seconds(Cell(**json.loads(line)))}
        except NotSupported as error:
            answer = {"missing": str(error)}


if __name__ == "__main__":
    main(MlxLm)
