"""What a step of the engine costs beside the model: python tests/benchmarks/step_overhead.py [--json]

The model is one layer of four numbers, so that nearly all of a step is the engine's own: scheduling, tables, the
sampler's graph, reading tokens, text. Prints, for each number of sequences, the median milliseconds of a step, the
model's own share (the same forward called in a loop), and the difference.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import mlx.core as mx

import tiny
from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sequence import SamplingParams

SHAPE = {"hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 4, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}  # fmt: skip


def measure(count: int, steps: int, **params: object) -> tuple[float, float]:
    """Median seconds of a decode step with `count` sequences, and of the model's own forward of that batch."""
    model = tiny.build("llama", **SHAPE)
    engine = LLMEngine(tiny.load(model), EngineConfig(max_num_seqs=count, kv_cache_bytes=1 << 26))
    for index in range(count):
        engine.add_request(tiny.prompt(20, index), SamplingParams(temperature=0, max_tokens=steps + 50, **params))
    while len(engine.scheduler.running) < count:
        engine.step()
    for _ in range(10):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times), _forward(model, count)


def _forward(model: object, count: int, repeats: int = 100) -> float:
    tokens = mx.zeros((count, 1), mx.int32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(mx.argmax(model(tokens), axis=-1))  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for count in arguments.sequences:
        step, forward = measure(count, arguments.steps)
        rows.append({"sequences": count, "step_ms": step * 1e3, "forward_ms": forward * 1e3})
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'sequences':>9}  {'step ms':>8}  {'forward ms':>10}  {'engine ms':>9}")
    for row in rows:
        own = row["step_ms"] - row["forward_ms"]
        print(f"{row['sequences']:>9}  {row['step_ms']:>8.3f}  {row['forward_ms']:>10.3f}  {own:>9.3f}")


if __name__ == "__main__":
    main()
