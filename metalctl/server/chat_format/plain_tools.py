"""Tools for models whose template knows nothing of them: described in the system prompt, called between tags."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """\
You can call functions. These are they, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between these tags, and nothing after it:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def describe(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `tools`, calls and results written out as text, in roles that every template knows."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    if plain and plain[0]["role"] == "system":
        first, rest = plain[0], plain[1:]
        return [{**first, "content": f"{first['content']}\n\n{introduction}"}, *rest]
    return [{"role": "system", "content": introduction}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls") or []
    if not calls:
        return dict(message)
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([message["content"], *written] if message.get("content") else written)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
