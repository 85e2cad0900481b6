"""The server's description of itself, from the table of its routes."""

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from metalctl.server.answers import AnthropicError, OllamaError, OpenAIError
from metalctl.server.errors import dialect_of
from metalctl.version import __version__

if TYPE_CHECKING:
    from metalctl.server.app import Entry

_ERRORS = {"openai": OpenAIError, "anthropic": AnthropicError, "ollama": OllamaError}
_STREAMS = {"openai": "text/event-stream", "anthropic": "text/event-stream", "ollama": "application/x-ndjson"}

_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def document(entries: "tuple[Entry, ...]") -> dict[str, Any]:
    """OpenAPI 3.1."""
    models = {model for entry in entries for model in (entry.body, entry.answer) if model is not None}
    wanted = [(model, "validation") for model in sorted({*models, *_ERRORS.values()}, key=repr)]
    references, schemas = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for entry in entries:
        path = entry.path.replace(":path", "")
        paths.setdefault(path, {})[entry.method.lower()] = _operation(entry, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "metalctl", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(entry: "Entry", references: Any) -> dict[str, Any]:
    def schema(model: Any) -> dict[str, Any]:
        return {"application/json": {"schema": references[model, "validation"]}}

    dialect = dialect_of(entry.path)
    answered = schema(entry.answer) if entry.answer else {"text/plain": {"schema": {"type": "string"}}}
    if entry.streams:
        answered[_STREAMS[dialect]] = {"schema": {"type": "string"} if dialect == "ollama" else _EVENT}
    operation: dict[str, Any] = {
        "operationId": entry.handler.__module__.rpartition(".")[2] + "_" + entry.handler.__name__,
        "tags": [entry.group],
        "responses": {
            "200": {"description": "The answer.", "content": answered},
            "default": {"description": "What went wrong.", "content": schema(_ERRORS[dialect])},
        },
    }
    if entry.may_be_503:
        operation["responses"]["503"] = operation["responses"]["200"]
    if "{name" in entry.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if entry.body is not None:
        operation["requestBody"] = {"required": True, "content": schema(entry.body)}
    return operation
