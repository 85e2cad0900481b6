"""Generated tokens per second against mlx-lm's batch generator, on the same weights in the same process:

    python tests/benchmarks/throughput.py --shape qwen3-0.6b --streams 1 8 32 [--bits 4] [--json FILE]

Weights are random; what counts is the shape. Each round sends twice as many requests as there are streams, prompts of
100 to 400 tokens, 128 new tokens each; a smaller round of the same kind comes first, uncounted. The two engines take
turns, and each is measured as a whole: prompts are read within the time. `--prefill N` times one prompt of N tokens
to its first token instead.
"""

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator

from metalctl.engine import acceleration
from metalctl.engine.config import EngineConfig
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.sequence import SamplingParams
from tiny import CharacterTokenizer

QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072, "head_dim": 128}
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-0.6b": {**QWEN3, "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
                   "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-8b": {**QWEN3, "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
                 "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "vocab_size": 151936, "tie_word_embeddings": False},
    "gemma3-1b": {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26,
                  "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                  "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6},
    "qwen3-next-small": {**QWEN3, "model_type": "qwen3_next", "hidden_size": 1024, "num_hidden_layers": 12,
                         "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
                         "head_dim": 256, "vocab_size": 151936, "tie_word_embeddings": False,
                         "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 128,
                         "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 16,
                         "num_experts_per_tok": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
                         "shared_expert_intermediate_size": 512, "mlp_only_layers": [],
                         "partial_rotary_factor": 0.25, "norm_topk_prob": True, "full_attention_interval": 4,
                         "max_position_embeddings": 131072},
    "smollm2-135m": {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
                     "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    "tiny": {**QWEN3, "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
             "tie_word_embeddings": True},
}  # fmt: skip

Round = list[list[int]]


def build(shape: str, dtype: mx.Dtype, bits: int | None) -> nn.Module:
    config = SHAPES[shape]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda x: (0.02 * mx.random.normal(x.shape)).astype(dtype), model.parameters()))
    if hasattr(model, "sanitize") and shape.startswith("gemma3"):
        model.sanitize({})  # ties the output projection to the embedding
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    model.eval()
    return model


def accelerated(model: nn.Module, shape: str, dtype: mx.Dtype, bits: int | None) -> nn.Module:
    """Another model with the same weights, with the layers that metalctl serves it with; `model` stays mlx-lm's own."""
    twin = build(shape, dtype, bits)
    twin.update(model.parameters())
    acceleration.accelerate(twin)
    return twin


def prompts(count: int, vocab: int, seed: int) -> Round:
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab) for _ in range(rng.randint(100, 400))] for _ in range(count)]


def ours(engine: LLMEngine, round_: Round, new: int) -> float:
    """Seconds until every request has its `new` tokens."""
    start = time.perf_counter()
    for tokens in round_:
        engine.add_request(tokens, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    done = 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            done += len(output.token_ids)
    assert done == len(round_) * new
    return time.perf_counter() - start


def theirs(model: nn.Module, streams: int, round_: Round, new: int) -> float:
    start = time.perf_counter()
    generator = BatchGenerator(model, max_tokens=new, completion_batch_size=streams, prefill_batch_size=min(streams, 8))
    generator.insert(round_, [new] * len(round_))
    left = len(round_)
    while left:
        _, responses = generator.next()
        left -= sum(response.finish_reason is not None for response in responses)
    seconds = time.perf_counter() - start
    generator.close()
    return seconds


def compare(name: str, run: dict[str, Callable[[int], float]], tokens: int, repeats: int) -> dict[str, object]:
    """Both in turn, `repeats` times after a warm-up; tokens per second by the best round of each."""
    for who, call in run.items():
        start = time.perf_counter()
        call(-1)
        print(f"{name}: warm-up of {who} {time.perf_counter() - start:.1f} s", flush=True)
    best = dict.fromkeys(run, float("inf"))
    for repeat in range(repeats):
        for who, call in run.items():
            best[who] = min(best[who], call(repeat))
    row: dict[str, object] = {"case": name, **{who: tokens / seconds for who, seconds in best.items()}}
    row["ratio"] = best["mlx-lm"] / best["metalctl"]
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--bits", type=int)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="without the compiled decode step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = build(arguments.shape, getattr(mx, arguments.dtype), arguments.bits)
    vocab = int(SHAPES[arguments.shape]["vocab_size"])  # type: ignore[call-overload]
    tokenizer = CharacterTokenizer()
    ours_model = accelerated(model, arguments.shape, getattr(mx, arguments.dtype), arguments.bits)
    loaded = LoadedModel(ours_model, tokenizer, {"vocab_size": vocab}, 65536, fingerprint="random")  # type: ignore[arg-type]
    label = f"{arguments.shape} {f'{arguments.bits}-bit' if arguments.bits else arguments.dtype}"
    rows = []

    def engine(seats: int) -> LLMEngine:
        config = EngineConfig(
            max_num_seqs=seats, max_num_batched_tokens=arguments.chunk, prefix_cache="off",
            compile_decode=False if arguments.eager else None,
        )  # fmt: skip
        return LLMEngine(loaded, config)

    for streams in arguments.streams:
        served = engine(streams)

        def round_of(repeat: int, streams: int = streams) -> Round:
            return prompts(2 * streams if repeat >= 0 else streams + 1, vocab, 100 * streams + repeat)

        run = {
            "mlx-lm": lambda repeat, n=streams: theirs(model, n, round_of(repeat, n), arguments.new),
            "metalctl": lambda repeat, n=streams, e=served: ours(e, round_of(repeat, n), arguments.new),
        }
        tokens = 2 * streams * arguments.new
        rows.append(compare(f"{label}, {streams} streams", run, tokens, arguments.repeats))
    for length in arguments.prefill:
        served = engine(1)
        texts = {r: [random.Random(r).choices(range(1, vocab), k=length)] for r in range(-1, arguments.repeats)}
        run = {
            "mlx-lm": lambda repeat, texts=texts: theirs(model, 1, texts[repeat], 1),
            "metalctl": lambda repeat, texts=texts, e=served: ours(e, texts[repeat], 1),
        }
        rows.append(compare(f"{label}, prompt of {length}", run, length, arguments.repeats))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": mx.device_info(), "mlx": mx.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
