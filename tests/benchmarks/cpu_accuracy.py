"""How far the CPU kernels are from float32: python tests/benchmarks/cpu_accuracy.py [REF] [--json]

The reference has the same weights, turned into float32 and multiplied in float32. Printed are the perplexity of both
over a fixed text of 4,000 tokens, and for ten prompts where greedy output leaves the reference's choice, and by how
much less likely the token was there (in nats).
"""

import argparse
import json
import math
import pydoc_data.topics
import re
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from metalctl.engine import acceleration
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.models.loader import load
from metalctl.engine.models.resolve import resolve
from metalctl.engine_start import kernel_cache
from metalctl.kernels.cpu import library

TOKENS, WINDOW, GREEDY = 4000, 500, 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "In 1969, humans",
    "To bake bread you need",
    "The opposite of hot is",
    "A list of planets:",
    "My favourite book is",
)


def fixed_text() -> str:
    """Python's own language reference: English prose that every machine with the same Python has."""
    topics = pydoc_data.topics.topics
    return re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))[: TOKENS * 8]


def to_float32(model: nn.Module) -> None:
    for parent in model.modules():
        for name, child in list(parent.children().items()):
            if isinstance(child, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
                setattr(parent, name, _floating(child))


def _floating(layer: Any) -> nn.Module:
    parts = layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    weight = mx.dequantize(*parts, group_size=layer.group_size, bits=layer.bits)
    if isinstance(layer, nn.QuantizedEmbedding):
        made: nn.Module = nn.Embedding(1, 1)
    else:
        made = nn.Linear(1, 1, bias="bias" in layer)
    made.weight = weight
    if "bias" in layer:
        made.bias = layer.bias.astype(mx.float32)
    return made


def pair(reference: str) -> tuple[LoadedModel, LoadedModel]:
    """The model in float32, and as it runs."""
    checkpoint = resolve(reference)
    exact = load(checkpoint)
    to_float32(exact.model)
    acceleration.prepare(kernel_cache(), lambda message: print(message, file=sys.stderr))
    acceleration.accelerate(exact.model)
    return exact, load(checkpoint)


def perplexity(model: nn.Module, ids: list[int]) -> float:
    total = 0.0
    for start in range(0, len(ids) - 1, WINDOW):
        window = ids[start : start + WINDOW + 1]
        logits = model(mx.array([window[:-1]]))[0].astype(mx.float32)
        likely = mx.take_along_axis(logits, mx.array(window[1:])[:, None], axis=-1)[:, 0]
        total += float((mx.logsumexp(logits, axis=-1) - likely).sum().item())
    return math.exp(total / (len(ids) - 1))


def greedy(model: nn.Module, ids: list[int], count: int = GREEDY) -> list[int]:
    cache, found, given = make_prompt_cache(model), list[int](), ids
    for _ in range(count):
        found.append(int(model(mx.array([given]), cache=cache)[0, -1].argmax().item()))
        given = found[-1:]
    return found


def departures(exact: nn.Module, ids: list[int], found: list[int]) -> Iterator[tuple[int, float]]:
    """Where a greedy choice is not the reference's, given all before it: (position, nats that it is less likely)."""
    logits = exact(mx.array([ids + found[:-1]]))[0, len(ids) - 1 :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(found)[:, None], axis=-1)[:, 0]
    for position, gap in enumerate((logits.max(axis=-1) - chosen).tolist()):  # type: ignore[arg-type, var-annotated]
        if gap > 0:
            yield position, gap


def measure(reference: str) -> dict[str, Any]:
    exact, fast = pair(reference)
    ids = fast.tokenizer.encode(fixed_text())[:TOKENS]
    found = perplexity(exact.model, ids), perplexity(fast.model, ids)
    gaps = {}
    for prompt in PROMPTS:
        tokens = fast.tokenizer.encode(prompt)
        gaps[prompt] = list(departures(exact.model, tokens, greedy(fast.model, tokens)))
    return {
        "kernels": library.description() if library.loaded() else None,
        "tokens": len(ids),
        "perplexity_float32": found[0],
        "perplexity": found[1],
        "difference": found[1] / found[0] - 1,
        "departures": gaps,
        "greedy_tokens": GREEDY * len(PROMPTS),
        "largest_gap": max((gap for some in gaps.values() for _, gap in some), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", nargs="?", default="smollm2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.reference)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"perplexity over {result['tokens']} tokens: {result['perplexity']:.3f} on {result['kernels']},")
    print(f"{result['perplexity_float32']:.3f} in float32 ({result['difference']:+.2%})")
    for prompt, some in result["departures"].items():
        print(f"{prompt!r}: " + (", ".join(f"token {at} by {gap:.2f}" for at, gap in some) or "the same"))


if __name__ == "__main__":
    main()
