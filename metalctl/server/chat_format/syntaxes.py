"""How models write tool calls. Each syntax turns what stands between two markers into calls, or raises ValueError.

mlx-lm's parsers are used for the formats that they read rightly; imported when they are needed, since that takes long.
"""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metalctl.server.chat_format.pieces import Call, make_call

Tools = Sequence[Mapping[str, Any]]
Parse = Callable[[str, Tools], list[Call]]

# What a parser may raise at a text that is not what it expects.
UNPARSABLE = (ValueError, KeyError, IndexError, AttributeError, TypeError, SyntaxError, RecursionError)


@dataclass(frozen=True)
class Syntax:
    """`end` "" means that calls go on to the end of the answer. With `quoted` an end inside a JSON string is text."""

    start: str
    end: str
    parse: Parse
    quoted: bool = False


def json_calls(text: str, _tools: Tools = ()) -> list[Call]:
    """An object, or a list or lines of objects, with the name of a tool and its arguments under any usual key."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    position = 0
    while position < len(text):
        if text[position].isspace() or text[position] in ";,":
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        found.extend(value if isinstance(value, list) else [value])
    calls = [_from_object(value) for value in found]
    if not calls:
        raise ValueError("no tool call")
    return calls


def _from_object(value: Any) -> Call:
    if not isinstance(value, dict):
        raise ValueError("not a tool call")
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((inner[key] for key in ("name", "tool_name", "function") if key in inner), None)
    arguments: Any = next((inner[key] for key in ("arguments", "parameters", "args") if key in inner), {})
    return make_call(name, {} if arguments is None else arguments, value.get("id"))


def _mlx_lm(module: str) -> Parse:
    def parse(text: str, tools: Tools) -> list[Call]:
        parser = importlib.import_module(f"mlx_lm.tool_parsers.{module}")
        found = parser.parse_tool_call(text, list(tools))
        calls = found if isinstance(found, list) else [found]
        return [make_call(call["name"], call["arguments"], call.get("id")) for call in calls]

    return parse


_qwen3_coder = _mlx_lm("qwen3_coder")
_glm = _mlx_lm("glm47")


def _tagged(text: str, tools: Tools) -> list[Call]:
    """Between <tool_call> tags families write JSON, functions as XML, or pairs of keys and values."""
    body = text.strip()
    if body.startswith(("{", "[")):
        return json_calls(body)
    if "<function=" in body:
        return _qwen3_coder(body, tools)
    if "<arg_key>" in body or body in _names(tools):
        return _glm(body, tools)
    raise ValueError("not a tool call")


def _names(tools: Tools) -> set[str]:
    return {str(tool.get("function", {}).get("name")) for tool in tools}


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<old>[^\n]+)\n```json\n(?P<fenced>.*?)\n?```"
    r"|(?P<name>[^<]+)<｜tool▁sep｜>(?P<plain>.*?))\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _deepseek(text: str, _tools: Tools) -> list[Call]:
    calls = [
        make_call(match["old"] or match["name"], match["plain"] if match["old"] is None else match["fenced"])
        for match in _DEEPSEEK.finditer(text)
    ]
    if not calls:
        raise ValueError("no tool call")
    return calls


def _mistral(text: str, tools: Tools) -> list[Call]:
    return json_calls(text) if text.lstrip().startswith("[{") else _mlx_lm("mistral")(text, tools)


# The first whose beginning stands in a model's template is the model's.
SYNTAXES = (
    Syntax("<minimax:tool_call>", "</minimax:tool_call>", _mlx_lm("minimax_m2")),
    Syntax("<|tool_call>", "<tool_call|>", _mlx_lm("gemma4")),
    Syntax("<start_function_call>", "<end_function_call>", _mlx_lm("function_gemma")),
    Syntax("<longcat_tool_call>", "</longcat_tool_call>", _mlx_lm("longcat")),
    Syntax("<|tool_call_start|>", "<|tool_call_end|>", _mlx_lm("pythonic")),
    Syntax("<seed:tool_call>", "</seed:tool_call>", _qwen3_coder),
    Syntax("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _mlx_lm("kimi_k2")),
    Syntax("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _mlx_lm("kimi_k3")),
    Syntax("<atem:function_calls>", "</atem:function_calls>", _mlx_lm("muse_spark")),
    Syntax("<function name=", "</function>", _mlx_lm("minicpm5")),
    Syntax("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
    Syntax("[TOOL_CALLS]", "", _mistral),
    Syntax("<TOOLCALL>", "</TOOLCALL>", json_calls, quoted=True),
    Syntax("<|START_ACTION|>", "<|END_ACTION|>", json_calls, quoted=True),
    Syntax("<tool_calls>", "</tool_calls>", json_calls, quoted=True),
    Syntax("<|tool_call|>", "<|/tool_call|>", json_calls, quoted=True),
    Syntax("<tool_call>", "</tool_call>", _tagged, quoted=True),
)
TAGGED = SYNTAXES[-1]
BARE = Syntax("<|python_tag|>", "", json_calls)  # Llama 3: also without the marker, as all of the answer


def syntax_of(templates: str) -> Syntax:
    """What a model's chat templates say of its tool calls; the commonest form when they say nothing."""
    for syntax in SYNTAXES:
        if syntax.start in templates:
            return syntax
    return BARE if "<|python_tag|>" in templates or "ipython" in templates else TAGGED
