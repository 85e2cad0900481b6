"""Tiny models of real mlx-lm architectures with seeded weights, none of which is at a neutral value, and what is needed
to run them: a tokenizer of one character a token, and mlx-lm by itself as the reference."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache

from metalctl.engine.models.checkpoint import LoadedModel

VOCAB = 128

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

CONFIGS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 5.0},
}  # fmt: skip


def build(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """A model of the architecture `name`, evaluated, float32."""
    config = {**BASE, "model_type": name, **CONFIGS[name], **changes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    randomize(model, seed)
    return model


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Weights that make a random model decisive: matrices scaled by their width, the rest off its neutral value."""
    keys = iter(mx.random.split(mx.random.key(seed), 2000))

    def draw(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):  # packed weights
            return mx.random.randint(0, 2**31, array.shape, key=next(keys)).astype(array.dtype)
        noise = mx.random.normal(array.shape, key=next(keys)).astype(array.dtype)
        if array.ndim >= 2:
            return noise * (1.5 / array.shape[-1] ** 0.5)
        return 1 + 0.3 * noise if path.endswith("weight") else 0.3 * noise

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())


class CharacterTokenizer:
    """Token i is the character chr(i) for what can be printed, and its number in brackets otherwise."""

    vocab_size = VOCAB
    bos_token_id = None

    def __init__(self, eos: Sequence[int] = ()):
        self.eos_token_ids = frozenset(eos)

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) % VOCAB for character in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(map(self._text, ids))

    def detokenizer(self, _skip_special_tokens: bool = True) -> "CharacterTokenizer._Detokenizer":
        return self._Detokenizer(self)

    @staticmethod
    def _text(token: int) -> str:
        return chr(token) if 32 <= token < 127 else f"[{token}]"

    class _Detokenizer:
        def __init__(self, tokenizer: "CharacterTokenizer"):
            self._tokenizer = tokenizer

        def add(self, token_id: int) -> str:
            return self._tokenizer._text(token_id)

        def finish(self) -> str:
            return ""


def load(model: nn.Module, eos: Sequence[int] = (), context: int = 4096) -> LoadedModel:
    tokenizer = CharacterTokenizer(eos)
    return LoadedModel(model, tokenizer, {"vocab_size": VOCAB}, context, fingerprint="tiny")  # type: ignore[arg-type]


def reference(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    chunk: int | None = None,
    make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache,
) -> tuple[list[int], mx.array]:
    """Greedy tokens of the model run by itself, and the logits `[count, V]` that they were chosen from."""
    cache = make_cache(model)
    step = chunk or len(prompt)
    for start in range(0, len(prompt), step):
        logits = model(mx.array([prompt[start : start + step]]), cache=cache)[:, -1]
        mx.eval(logits)
    tokens, rows = [], []
    for _ in range(count):
        rows.append(logits[0])
        tokens.append(int(mx.argmax(logits[0]).item()))
        logits = model(mx.array([[tokens[-1]]]), cache=cache)[:, -1]
    return tokens, mx.stack(rows)


def prompt(length: int, seed: int = 0) -> list[int]:
    return mx.random.randint(1, VOCAB, (length,), key=mx.random.key(1000 + seed)).tolist()
