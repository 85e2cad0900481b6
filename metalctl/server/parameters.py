"""Every parameter of the published APIs: served, or refused with the reason. The documentation is made from this."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from metalctl.server.anthropic.types import REFUSED as REFUSED_MESSAGES
from metalctl.server.anthropic.types import CountRequest, MessagesRequest
from metalctl.server.embeddings import EmbeddingsRequest, OllamaEmbedRequest, RerankRequest
from metalctl.server.ollama.types import REFUSED_GENERATE, REFUSED_OPTIONS, GenerateRequest, Options, ShowRequest
from metalctl.server.ollama.types import ChatRequest as OllamaChatRequest
from metalctl.server.openai.models import DetokenizeRequest, TokenizeRequest
from metalctl.server.openai.response_types import REFUSED_RESPONSES, ResponsesRequest
from metalctl.server.openai.types import REFUSED_CHAT, REFUSED_COMPLETION, ChatRequest, CompletionRequest


@dataclass(frozen=True)
class Route:
    """What one kind of request may hold. `refused` are published parameters that get a 400 with the reason."""

    path: str
    served: type[BaseModel]
    refused: Mapping[str, str]

    def names(self) -> set[str]:
        return {*self.served.model_fields, *self.refused}


ROUTES = (
    Route("/v1/chat/completions", ChatRequest, REFUSED_CHAT),
    Route("/v1/completions", CompletionRequest, REFUSED_COMPLETION),
    Route("/v1/responses", ResponsesRequest, REFUSED_RESPONSES),
    Route("/v1/embeddings", EmbeddingsRequest, {}),
    Route("/v1/rerank", RerankRequest, {}),
    Route("/v1/messages", MessagesRequest, REFUSED_MESSAGES),
    Route("/v1/messages/count_tokens", CountRequest, REFUSED_MESSAGES),
    Route("/api/chat", OllamaChatRequest, {}),
    Route("/api/generate", GenerateRequest, REFUSED_GENERATE),
    Route("/api/chat and /api/generate: options", Options, REFUSED_OPTIONS),
    Route("/api/embed", OllamaEmbedRequest, {}),
    Route("/api/show", ShowRequest, {}),
    Route("/tokenize", TokenizeRequest, {}),
    Route("/detokenize", DetokenizeRequest, {}),
)


def markdown() -> str:
    """The tables of docs/api.md."""
    return "\n".join(line for route in ROUTES for line in _table(route))


def _table(route: Route) -> Iterator[str]:
    yield f"### `{route.path}`\n"
    yield "| parameter | takes | |"
    yield "| --- | --- | --- |"
    for name, field in route.served.model_fields.items():
        needed = "**required** " if field.is_required() else ""
        yield f"| `{name}` | {_taken(route.served, name)} | {needed}{field.description or ''} |"
    for name, reason in sorted(route.refused.items()):
        yield f"| `{name}` | refused | {reason[0].upper()}{reason[1:]} |"
    yield ""


def _taken(model: type[BaseModel], name: str) -> str:
    schema = model.model_json_schema(by_alias=True)
    return _kind(schema["properties"][name], schema.get("$defs", {})).replace("|", "\\|")


def _kind(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        return "object"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_kind(part, definitions) for part in schema[key] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}), definitions)}"
    return {"boolean": "true, false"}.get(kind, kind) + _range(schema)


def _range(schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None and high is None:
        return ""
    if high is not None and abs(high) >= 2**31:
        return "" if low is None or abs(low) >= 2**31 else f" ≥ {low:g}"
    return f" {low:g} to {high:g}" if high is not None and low is not None else f" > {low:g}" if low is not None else ""


if __name__ == "__main__":
    sys.stdout.write(markdown())
