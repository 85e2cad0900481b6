"""POST /v1/messages and /v1/messages/count_tokens"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.engine import grammar as grammars
from metalctl.engine.sequence import Usage
from metalctl.server.anthropic.types import (
    REFUSED,
    CountRequest,
    MediaBlock,
    Message,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from metalctl.server.body import read
from metalctl.server.chat import Answer, Chat, Delta, End
from metalctl.server.chat_format.pieces import Call, Words
from metalctl.server.chat_format.tool_grammars import ToolChoice
from metalctl.server.errors import bad_request, body, not_supported, translate
from metalctl.server.ids import new_id
from metalctl.server.prepare import prepare
from metalctl.server.service import Service
from metalctl.server.streaming import sse
from metalctl.server.task import ChatTask

PING = sse({"type": "ping"}, "ping")
_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(service: Service, request: Request) -> Response:
    asked = await read(request, MessagesRequest, REFUSED)
    return await service.chat(
        request,
        asked.model,
        _with_sampling(task_of(asked), asked),
        whole=_whole,
        pieces=_events if asked.stream else None,
        silence=PING,
    )


async def count_tokens(service: Service, request: Request) -> Response:
    asked = await read(request, CountRequest, REFUSED)
    async with service.manager.use(asked.model) as model:
        prepared = await asyncio.to_thread(prepare, model, task_of(asked))
    return JSONResponse({"input_tokens": len(prepared.token_ids)})


def task_of(asked: CountRequest) -> ChatTask:
    """What both routes have in common."""
    system = asked.system if isinstance(asked.system, str) else "\n\n".join(part.text for part in asked.system or [])
    converted = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(asked.messages):
        converted += _converted(message, f"messages.{index}.content")
    choice = asked.tool_choice
    format_ = asked.output_config.format if asked.output_config else None
    return ChatTask(
        messages=converted,
        tools=[_tool(tool) for tool in asked.tools or []],
        tool_choice=ToolChoice(_CHOICES[choice.type], choice.name) if choice else ToolChoice(),  # type: ignore[arg-type]
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        grammar=grammars.json_schema(format_.schema_) if format_ else None,
        effort=_effort(asked),
        effort_is_a_wish=True,
        continues=asked.messages[-1].role == "assistant",
        clamp=True,
    )


def _with_sampling(task: ChatTask, asked: MessagesRequest) -> ChatTask:
    if asked.tool_choice and asked.tool_choice.type == "tool" and not asked.tool_choice.name:
        raise bad_request("tool_choice of type tool needs a name.", "tool_choice.name")
    values = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": max(asked.top_p, 1e-9) if asked.top_p is not None else None,
        "top_k": asked.top_k,
        "stop": tuple(asked.stop_sequences or ()) or None,
    }
    return replace(task, sampling=values)


def _effort(asked: CountRequest) -> str | None:
    if asked.thinking is not None:
        if asked.thinking.type == "disabled":
            return "none"
        return (asked.output_config and asked.output_config.effort) or "medium"
    return asked.output_config.effort if asked.output_config else None


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _converted(message: Message, param: str) -> list[dict[str, Any]]:
    """In the form that templates take: results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    rest = [block for block in message.content if not isinstance(block, ToolResultBlock)]
    converted = [_result(block, param) for block in results]
    if rest or not results:
        converted.append(_blocks(message.role, rest, param))
    return converted


def _result(block: ToolResultBlock, param: str) -> dict[str, Any]:
    text = block.content if isinstance(block.content, str) else _text(block.content or [], param)
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _blocks(role: str, blocks: list[Any], param: str) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": role, "content": _text(blocks, param)}
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        converted["tool_calls"] = [_call(block) for block in calls]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        converted["reasoning_content"] = "\n".join(thoughts)
    return converted


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(blocks: list[Any], param: str) -> str:
    for block in blocks:
        if isinstance(block, MediaBlock):
            raise not_supported(f"{block.type} blocks are", param)
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _whole(chat: Chat, answers: list[Answer]) -> dict[str, Any]:
    (answer,) = answers
    assert answer.end is not None
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    content += [_tool_use(call) for call in answer.calls]
    return {**_message(chat), "content": content, **_stop(answer.end), "usage": _usage(answer.usage)}


async def _events(chat: Chat) -> AsyncGenerator[bytes, None]:
    writer = _BlockWriter()
    usage = {"input_tokens": chat.prompt_tokens, "output_tokens": 0}
    empty = {**_message(chat), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    try:
        yield sse({"type": "message_start", "message": empty}, "message_start")
        async with aclosing(chat.events()) as events:
            async for event in events:
                if isinstance(event, End):
                    yield writer.close()
                    delta = {"type": "message_delta", "delta": _stop(event), "usage": _usage(event.usage)}
                    yield sse(delta, "message_delta")
                else:
                    yield writer.write(event)
        yield sse({"type": "message_stop"}, "message_stop")
    except Exception as error:  # noqa: BLE001  the status is sent: the error becomes the last event
        yield sse(body(translate(error), "anthropic"), "error")


class _BlockWriter:
    """Opens and closes content blocks as the kind of what comes changes."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def write(self, event: Delta) -> bytes:
        match event.piece:
            case Words(kind="reasoning"):
                opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": event.piece.text})
            case Words():
                opened = self._open("text", {"type": "text", "text": ""})
                return opened + self._delta({"type": "text_delta", "text": event.piece.text})
            case Call():
                opened = self.close() + self._open("tool_use", {**_tool_use(event.piece), "input": {}})
                return opened + self._delta({"type": "input_json_delta", "partial_json": event.piece.arguments})
        return b""

    def close(self) -> bytes:
        if self._kind is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._kind == "thinking" else b""
        self._kind = None
        return signed + sse({"type": "content_block_stop", "index": self._index}, "content_block_stop")

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        closed = self.close()
        self._kind = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + sse(start, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")


def _message(chat: Chat) -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": chat.model.name}


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": json.loads(call.arguments)}


def _stop(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop_string is not None else _REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens that the cache had are counted by themselves."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output_tokens,
    }
