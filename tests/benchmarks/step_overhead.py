"""What a step of the engine costs beside the model: python tests/benchmarks/step_overhead.py [--write] [--json]

The models are of one or two layers of a few numbers, so that nearly all of a step is the engine's own. A step is
`LLMEngine.step` while so many sequences decode: scheduling, block tables, the arrays made of them, masks, writing to
the pools and gathering from them, the sampler, reading tokens back, detokenising with a real tokenizer, outputs.

What the model alone takes is measured in the same process: the same weights and the same batch, one step ahead as in
the engine, each result waited for, and nothing sampled. Without the CPU kernels its past is in mlx-lm's own caches of
that batch. With them the layers read the pools by themselves, so it runs over pools whose tables and masks are ready.
The two take turns, and the round with the lowest median counts, since what else the machine does only adds. The
engine's share is the difference. Reading prompts is not in it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import mlx.core as mx
from byte_tokenizer import byte_tokenizer
from mlx_lm.models.cache import make_prompt_cache

import tiny
from metalctl.engine import acceleration
from metalctl.engine.cache import forward
from metalctl.engine.cache.block_manager import BlockTable
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.sequence import SamplingParams
from metalctl.engine_start import kernel_cache
from tests.engine.architectures import zoo

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"
SMALL = {"hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 4, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "attention": lambda: tiny.build("llama", **SMALL),
    "attention, window": lambda: tiny.build(
        "mistral", **{**SMALL, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "attention, recurrent": lambda: zoo.build(
        "lfm2", hidden_size=16, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2, block_dim=16,
        block_ff_dim=16, layer_types=["conv", "full_attention"]
    ),
}  # fmt: skip
PROMPT = 20
ROUNDS = 8
WARM_UP = 10


def seconds(model: Any, count: int, steps: int, native: bool, **params: Any) -> tuple[float, float]:
    """Of a step with `count` sequences, and of the model alone on that batch."""
    most = 2 * PROMPT + count + ROUNDS * (WARM_UP + steps)
    loaded = LoadedModel(model, byte_tokenizer(), {"vocab_size": tiny.VOCAB}, 8192, fingerprint="tiny")
    engine = LLMEngine(loaded, EngineConfig(max_num_seqs=count, kv_cache_bytes=1 << 30))
    for index in range(count):
        engine.add_request(
            tiny.prompt(PROMPT, index), SamplingParams(ignore_eos=True, max_tokens=most - PROMPT, **params)
        )
    while engine.scheduler.waiting:
        engine.step()
    assert len(engine.scheduler.running) == count
    alone = over_pools(engine, count) if native else over_own_caches(model, count)
    ways: tuple[Callable[[], object], ...] = (engine.step, lambda: next(alone))
    own, its = zip(*([median(way, steps) for way in ways] for _ in range(ROUNDS)), strict=True)
    return min(own), min(its)


def median(step: Callable[[], object], steps: int) -> float:
    for _ in range(WARM_UP):
        step()
    times = [time.perf_counter()]
    for _ in range(steps):
        step()
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(times))


def ahead(compute: Callable[[], list[mx.array]]) -> Iterator[None]:
    """Send one forward after another to the device, and wait for the one before."""
    previous: list[mx.array] = []
    while True:
        sent = compute()
        mx.async_eval(*sent)
        mx.eval(*previous)
        previous = sent[:1]
        yield


def over_own_caches(model: Any, count: int) -> Iterator[None]:
    cache = make_prompt_cache(model)
    model(mx.array([tiny.prompt(PROMPT, index) for index in range(count)]), cache=cache)
    tokens = mx.ones((count, 1), mx.int32)
    mx.eval(tokens, [part.state for part in cache])
    return ahead(lambda: [model(tokens, cache=cache), *(array for part in cache for array in part.state)])


def over_pools(engine: LLMEngine, count: int) -> Iterator[None]:
    caches, size, layout = CacheSet(engine.layout, 16), 16, engine.layout
    blocks = -(-(PROMPT + 1) // size)
    for cache in (*caches.kv, *caches.states):
        cache.resize(1 + count * blocks)
    rows = [BlockTable(0, [1 + row * blocks + block for block in range(blocks)]) for row in range(count)]
    slots = list(range(1, count + 1)) if layout.has_states else None
    step = forward.batch(layout.groups, [[row] * len(layout.groups) for row in rows], size, [PROMPT] * count, slots)
    tokens = mx.ones((count, 1), mx.int32)

    def compute() -> list[mx.array]:
        step.masks.clear()
        return [caches.call(engine.runner.model, tokens, step), *caches.arrays]

    return ahead(compute)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for native in (False, True):
        if native:
            acceleration.prepare(kernel_cache(), lambda notice: print(notice, file=sys.stderr))
        for name, build in MODELS.items():
            for count in arguments.sequences:
                model = build()
                if native:
                    acceleration.accelerate(model)
                step, alone = seconds(model, count, arguments.steps, native, temperature=arguments.temperature)
                status = acceleration.status() if native else "none"
                rows.append({"model": name, "kernels": status, "sequences": count, "step_ms": step * 1e3,
                             "alone_ms": alone * 1e3, "engine_ms": (step - alone) * 1e3})  # fmt: skip
                print(_line(rows[-1]), file=sys.stderr)
    return rows


def _line(row: dict[str, Any]) -> str:
    cells = (row["model"], row["kernels"].split(",")[0], str(row["sequences"]))
    return "| " + " | ".join((*cells, *(f"{row[name]:.2f}" for name in ("step_ms", "alone_ms", "engine_ms")))) + " |"


def table(rows: list[dict[str, Any]]) -> str:
    versions = f"MLX {version('mlx')}, mlx-lm {version('mlx-lm')}, Python {sys.version.split()[0]}"
    return "\n".join(
        [
            f"{datetime.now(UTC):%Y-%m-%d}, {rows[-1]['kernels']}; {versions}:",
            "",
            "| layers | kernels | sequences | step, ms | the model alone, ms | the engine's share, ms |",
            "| --- | --- | --- | --- | --- | --- |",
            *map(_line, rows),
        ]
    )


def write(text: str) -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=40, help=f"in each of {ROUNDS} rounds")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    arguments = parser.parse_args()
    mx.disable_compile()  # as the program does on a CPU
    rows = measure(arguments)
    print(json.dumps(rows) if arguments.json else table(rows))
    if arguments.write:
        write(table(rows))


if __name__ == "__main__":
    main()
