"""Whether models in 16 bits are as fast as in 32 on this machine: python tests/benchmarks/dtypes.py

A model of SmolLM2's shape with random weights, stored in each type, in turn: reading 128 tokens, and writing 64.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from throughput import SHAPES, build

from metalctl.engine import acceleration
from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.sequence import SamplingParams
from metalctl.engine_start import before_mlx
from metalctl.output import Output
from tiny import CharacterTokenizer

DTYPES = ("float32", "float16", "bfloat16")


def engine(shape: str, dtype: str, bits: int | None) -> LLMEngine:
    model = build(shape, getattr(mx, dtype), bits)
    acceleration.accelerate(model)
    config = {"vocab_size": SHAPES[shape]["vocab_size"]}
    loaded = LoadedModel(model, CharacterTokenizer(), config, 4096, fingerprint=dtype)  # type: ignore[arg-type]
    return LLMEngine(loaded, EngineConfig(prefix_cache="off"))


def tokens_per_second(served: LLMEngine, seed: int, read: int, written: int) -> tuple[float, float]:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=written + 1, ignore_eos=True)
    served.add_request([rng.randrange(1, 49000) for _ in range(read)], params)
    usage = None
    while served.has_work:
        for output in served.step():
            usage = output.usage or usage
    assert usage is not None
    first = usage.time_to_first_token or 0.0
    return read / first, written / (usage.elapsed - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bits", type=int, help="quantised to so many bits, the rest in each type")
    arguments = parser.parse_args()
    before_mlx(Output())
    acceleration.prepare(Path(tempfile.gettempdir()) / "metalctl-kernels", lambda message: print(message, flush=True))
    engines = {dtype: engine(arguments.shape, dtype, arguments.bits) for dtype in DTYPES}
    found: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in DTYPES}
    for round_ in range(arguments.rounds + 1):
        for dtype, served in engines.items():
            speeds = tokens_per_second(served, round_, 128, 64)
            found[dtype] += [speeds] if round_ else []
    for dtype, all_speeds in found.items():
        reading, writing = (statistics.median(column) for column in zip(*all_speeds, strict=True))
        first = [statistics.median(column) for column in zip(*found["float32"], strict=True)]
        print(f"{dtype:8} reads {reading:8.1f} tok/s ({reading / first[0]:.2f}), "
              f"writes {writing:7.1f} ({writing / first[1]:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
