"""What a request says of tools, as a grammar of its answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from metalctl.engine import grammar as grammars
from metalctl.server.chat_format.formats import ChatFormat
from metalctl.server.chat_format.syntaxes import Tools
from metalctl.server.errors import bad_request

_ANYTHING: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolChoice:
    """`name` is set with mode "named"."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


AUTO = ToolChoice()


def grammar_for(
    choice: ToolChoice, tools: Tools, parallel: bool, answer: str | None, format_: ChatFormat
) -> str | None:
    """The grammar of an answer, where `answer` is that of its text; None: it is free.

    A demanded call is JSON by itself. Otherwise the answer is what `answer` describes, or calls in the model's own
    form; and when a tool is strict, its arguments keep to its schema, if the model writes calls as JSON.
    """
    if choice.is_forced:
        return _forced(choice, tools, parallel)
    if answer is not None:
        return grammars.or_marked(answer, format_.marker) if tools else answer
    if any(tool["function"].get("strict") for tool in tools) and format_.calls_are_json:
        return grammars.text_with(format_.marker, [_variant(tool["function"]) for tool in tools])
    return None


def _variant(function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """A call as templates of this form show it, in three parts: before its arguments, their schema, and after."""
    schema = function.get("parameters") or _ANYTHING
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'\n{{"name": {name}, "arguments": ', schema if function.get("strict") else _ANYTHING, "}\n</tool_call>"


def _forced(choice: ToolChoice, tools: Tools, parallel: bool) -> str:
    """The grammar of the calls that the request demands."""
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise bad_request("tool_choice demands a call, but there are no tools.", "tool_choice")
    if choice.name is not None and choice.name not in names:
        raise bad_request(f"tool_choice names {choice.name!r}, which is not among the tools.", "tool_choice")
    wanted = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    parameters = [tool["function"].get("parameters") or _ANYTHING for tool in wanted]
    definitions = {f"tool_{i}": _moved(schema, f"#/$defs/tool_{i}") for i, schema in enumerate(parameters)}
    call = {"anyOf": [_call_schema(tool["function"]["name"], f"tool_{i}") for i, tool in enumerate(wanted)]}
    if choice.mode == "named" or not parallel:
        return grammars.json_schema({**call, "$defs": definitions})
    return grammars.json_schema({"type": "array", "items": call, "minItems": 1, "$defs": definitions})


def _call_schema(name: str, definition: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{definition}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema that stands at `root` of another: its references to itself point there."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
