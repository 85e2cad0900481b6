"""llama.cpp through llama-cpp-python, timing the cells that come in on stdin (see peers.Worker)."""

import random
import time
from typing import Any

from metalctl.bench.cells import Cell
from metalctl.bench.mlx_lm_worker import main
from metalctl.bench.peers import NotSupported


class LlamaCpp:
    def __init__(self, start: dict[str, Any]):
        import llama_cpp  # type: ignore[import-not-found]

        threads = start["threads"]
        self.llama = llama_cpp.Llama(
            start["path"],
            n_ctx=start["context"],
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.random = random.Random(0)

    def seconds(self, cell: Cell) -> float:
        if cell.batch > 1:
            raise NotSupported("llama-cpp-python runs one sequence")
        self.llama.reset()
        if cell.depth or cell.generate:
            self.llama.eval(self._tokens(max(1, cell.depth)))
        pieces = [self._tokens(cell.prompt)] if cell.prompt else [self._tokens(1) for _ in range(cell.generate)]
        start = time.perf_counter()
        for piece in pieces:
            self.llama.eval(piece)
        return time.perf_counter() - start

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.llama.n_vocab()) for _ in range(count)]


if __name__ == "__main__":
    main(LlamaCpp)
