"""Decoder models of mlx-lm as makers of vectors: the states of their tokens before the output projection."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalctl.engine.embedding.encoder import window_mask
from metalctl.engine.errors import CheckpointError, UnsupportedModelError

Hidden = Callable[[mx.array, mx.array, mx.array | None], mx.array]

_BODIES = ("model", "transformer", "backbone", "gpt_neox")


def causal(model: nn.Module) -> Hidden:
    """The states of a model whose tokens see what comes before them only: padding on the right changes nothing."""
    body = _body(model)

    def hidden(ids: mx.array, types: mx.array, present: mx.array | None) -> mx.array:
        return body(ids)

    return hidden


def bidirectional_gemma(model: Any, config: Mapping[str, Any]) -> Hidden:
    """The states of a Gemma 3 whose tokens see each other both ways, as EmbeddingGemma's do.

    Layers with a window of w see `w // 2` tokens to either side.
    """
    body = model.model
    window = int(config.get("sliding_window") or 512) // 2
    kinds = config.get("layer_types")
    pattern = body.sliding_window_pattern
    sliding = [kinds[i] == "sliding_attention" if kinds else (i + 1) % pattern != 0 for i in range(len(body.layers))]

    def hidden(ids: mx.array, types: mx.array, present: mx.array | None) -> mx.array:
        x = body.embed_tokens(ids)
        x = x * mx.array(model.args.hidden_size**0.5, x.dtype)
        everywhere, nearby = (window_mask(present, reach, ids.shape[1]) for reach in (None, window))
        for layer, is_sliding in zip(body.layers, sliding, strict=True):
            x = layer(x, nearby if is_sliding else everywhere, None)
        return body.norm(x)

    return hidden


def hidden_of(model: nn.Module, config: Mapping[str, Any]) -> Hidden:
    """The way in which a loaded model of mlx-lm makes states. Raises UnsupportedModelError."""
    text = config.get("text_config") or config
    if not (text.get("use_bidirectional_attention") or text.get("is_causal") is False):
        return causal(model)
    if config.get("model_type") != "gemma3_text":
        kind = config.get("model_type")
        raise UnsupportedModelError(f"Models of the type {kind!r} that see both ways are not known here.")
    return bidirectional_gemma(model, config)


def _body(model: nn.Module) -> nn.Module:
    """The part of a model that gives the states which its output projection reads."""
    outer = model.language_model if "language_model" in model else model
    for name in _BODIES:
        body = outer.get(name) if isinstance(outer, nn.Module) else None
        if isinstance(body, nn.Module):
            return body
    raise UnsupportedModelError(
        f"The states of {type(model).__module__.rpartition('.')[2]} cannot be read.", "Use an embedding model."
    )


def load_decoder(folder: Path, where: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of mlx-lm and its config, from a folder that may leave out the output projection and the first part of
    the tensors' names, as embedding checkpoints do. Raises CheckpointError."""
    from mlx_lm.utils import _get_classes, load_model

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model, args = _get_classes(config)
        return type(model.__name__, (_Headless, model), {}), args

    try:
        model, config = load_model(folder, lazy=True, get_model_classes=classes)
        mx.eval(model.parameters())
    except (ValueError, KeyError, TypeError, RuntimeError, FileNotFoundError) as error:
        raise CheckpointError(
            f"{where} cannot be loaded: {error}", "The files may be incomplete: fetch the model again."
        ) from error
    return model, config


class _Headless(nn.Module):
    """Mixed into a model of mlx-lm: takes weights as embedding checkpoints name them."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if not any(name.startswith(("model.", "lm_head.")) for name in weights):
            weights = {f"model.{name}": array for name, array in weights.items()}
        sanitize = getattr(super(), "sanitize", None)
        weights = sanitize(weights) if sanitize else weights
        if "lm_head" in self and not any(name.startswith("lm_head.") for name in weights):
            self.pop("lm_head")
        return weights
