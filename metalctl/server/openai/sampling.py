"""OpenAI's parameters in the engine's words."""

from collections.abc import Mapping
from typing import Any

from metalctl.engine import grammar as grammars
from metalctl.server.errors import bad_request
from metalctl.server.openai.types import (
    GrammarFormat,
    ObjectFormat,
    ResponseFormat,
    Sampling,
    SchemaFormat,
)

_SAME = (
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)
_TOKENS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
_ALMOST_ZERO = 1e-9


def sampling(body: Sampling, max_tokens: int | None) -> dict[str, Any]:
    """By the names of SamplingParams; None for what was not given."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    values |= {name: tuple(ids) if (ids := getattr(body, name)) else None for name in _TOKENS}
    return values | {
        "max_tokens": max_tokens,
        "stop": stop_strings(body.stop),
        "top_p": max(body.top_p, _ALMOST_ZERO) if body.top_p is not None else None,
        "top_k": max(body.top_k, 0) if body.top_k is not None else None,
        "logit_bias": _bias(body.logit_bias),
    }


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if not stop:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def grammar(format_: ResponseFormat | None) -> str | None:
    """The grammar that a response_format asks for; None for free text."""
    match format_:
        case ObjectFormat():
            return grammars.any_object()
        case SchemaFormat():
            return grammars.json_schema(format_.json_schema.schema_)
        case GrammarFormat():
            make = grammars.lark if format_.grammar.syntax == "lark" else grammars.regex
            return make(format_.grammar.definition)
    return None


def _bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    if not bias:
        return None
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in bias):
        raise bad_request("logit_bias must have token ids for keys.", "logit_bias")
    return tuple((int(key), value) for key, value in bias.items())
