"""POST /v1/responses"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from metalctl.engine import grammar as grammars
from metalctl.server.body import read
from metalctl.server.chat_format.tool_grammars import ToolChoice
from metalctl.server.errors import not_supported
from metalctl.server.openai.response_events import ResponseWriter
from metalctl.server.openai.response_types import (
    REFUSED_RESPONSES,
    FunctionCall,
    FunctionCallOutput,
    Media,
    Message,
    NamedTool,
    Reasoning,
    Refusal,
    ResponsesRequest,
    SchemaFormat,
)
from metalctl.server.openai.types import ObjectFormat
from metalctl.server.service import Service
from metalctl.server.task import ChatTask


async def responses(service: Service, request: Request) -> Response:
    asked = await read(request, ResponsesRequest, REFUSED_RESPONSES)
    writer = ResponseWriter(asked)
    return await service.chat(
        request,
        asked.model,
        task_of(asked),
        whole=writer.whole,
        pieces=writer.events if asked.stream else None,
    )


def task_of(asked: ResponsesRequest) -> ChatTask:
    logprobs = asked.top_logprobs or 0
    sampling = {
        "temperature": asked.temperature,
        "top_p": max(asked.top_p, 1e-9) if asked.top_p is not None else None,
        "max_tokens": asked.max_output_tokens,
        "logprobs": logprobs if asked.top_logprobs or wants_logprobs(asked) else None,
    }
    return ChatTask(
        messages=_messages(asked),
        tools=[_tool(tool.model_dump(exclude_none=True)) for tool in asked.tools or []],
        tool_choice=_tool_choice(asked),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        sampling=sampling,
        grammar=_grammar(asked),
        effort=asked.reasoning.effort if asked.reasoning else None,
    )


def wants_logprobs(asked: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (asked.include or [])


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": function.pop("type"), "function": function}


def _tool_choice(asked: ResponsesRequest) -> ToolChoice:
    if isinstance(asked.tool_choice, NamedTool):
        return ToolChoice("named", asked.tool_choice.name)
    return ToolChoice(asked.tool_choice or "auto")


def _grammar(asked: ResponsesRequest) -> str | None:
    match asked.text and asked.text.format:
        case ObjectFormat():
            return grammars.any_object()
        case SchemaFormat(schema_=schema):
            return grammars.json_schema(schema)
    return None


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """Items as messages: reasoning and calls belong to the assistant's message that they stand beside."""
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for index, item in enumerate(asked.input):
        _append(messages, item, f"input.{index}")
    return messages


def _append(messages: list[dict[str, Any]], item: Any, param: str) -> None:
    match item:
        case Message(role="assistant"):
            _assistant(messages, "content")["content"] = _text(item.content, param)
        case Message():
            messages.append({"role": item.role, "content": _text(item.content, param)})
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case FunctionCallOutput():
            content = _text(item.output, param)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case Reasoning():
            text = "\n".join(part.text for part in item.content or item.summary)
            _assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text


def _assistant(messages: list[dict[str, Any]], *empty: str) -> dict[str, Any]:
    """The assistant's message at the end, or a new one where that has one of `empty` already."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(last.get(key) for key in empty):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | list[Any], param: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if isinstance(part, Media):
            raise not_supported(f"{part.type} parts are", param)
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
