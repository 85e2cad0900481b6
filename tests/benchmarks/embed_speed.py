"""Texts per second of metalctl and of the sentence-transformers library, in turns, on the same cores and texts.

    python tests/benchmarks/embed_speed.py MODEL_FOLDER PYTHON

PYTHON is the interpreter of an environment that has sentence-transformers. Both programs load the model, warm up, and
then embed all texts whenever they are told to; best and median of the rounds are printed, in wall time, and in the time
that the processor spent, which other programs on the machine disturb less.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS = 3
TEXTS = Path(__file__).parents[1] / "engine" / "embedding"

PEER = """
import sys, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads({cores})
model = SentenceTransformer({model!r}, device="cpu")
embed = lambda texts: model.encode(texts, batch_size=32)
"""

OURS = """
import sys
from metalctl.kernels import blas
blas.preload()
from metalctl.engine import acceleration
from metalctl.engine.embedding.load import load_embedder
from metalctl.engine.models.resolve import resolve
from metalctl.engine_start import kernel_cache
acceleration.prepare(kernel_cache(), lambda message: None)
embed = load_embedder(resolve({model!r}, offline=True)).embed
"""

LOOP = """
import json, time
sys.path.insert(0, {texts!r})
from texts import reference_texts
texts = reference_texts() * {times}
embed(texts)
print("ready", flush=True)
for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    embed(texts)
    print(json.dumps([len(texts) / (time.perf_counter() - wall), len(texts) / (time.process_time() - cpu)]), flush=True)
"""


class Program:
    def __init__(self, python: str, code: str):
        self._process: Any = subprocess.Popen(
            [python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{python} does not run the model")
        self.rounds: list[tuple[float, float]] = []

    def round(self) -> None:
        """Texts per second of wall time and of processor time."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.rounds.append(tuple(json.loads(self._process.stdout.readline())))

    def report(self, name: str) -> None:
        for what, values in zip(("wall", "processor"), zip(*self.rounds, strict=True), strict=True):
            print(f"{name:<24}{what:<10} best {max(values):7.1f}  median {statistics.median(values):7.1f} texts/s")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def main(model: str, python: str) -> None:
    from metalctl.kernels.cores import usable_cores

    loop = LOOP.format(texts=str(TEXTS), times=2)
    programs = {
        "metalctl": Program(sys.executable, OURS.format(model=model) + loop),
        "sentence-transformers": Program(python, PEER.format(model=model, cores=usable_cores()) + loop),
    }
    for _ in range(ROUNDS):
        for program in programs.values():
            time.sleep(0.5)
            program.round()
    for name, program in programs.items():
        program.report(name)
        program.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
