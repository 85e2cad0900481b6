"""POST /v1/chat/completions"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from metalctl.engine.sequence import Usage
from metalctl.server.body import read
from metalctl.server.chat import Answer, Chat, Delta, End
from metalctl.server.chat_format.pieces import Call, Words
from metalctl.server.chat_format.tool_grammars import ToolChoice
from metalctl.server.errors import bad_request, body, not_supported, translate
from metalctl.server.ids import new_id
from metalctl.server.openai.logprobs import chat_logprobs
from metalctl.server.openai.sampling import grammar, sampling
from metalctl.server.openai.types import (
    REFUSED_CHAT,
    ChatRequest,
    Content,
    MediaPart,
    Message,
    NamedTool,
    RefusalPart,
)
from metalctl.server.service import Service
from metalctl.server.streaming import sse
from metalctl.server.task import ChatTask

DONE = b"data: [DONE]\n\n"
_RESERVED = {"messages", "tools", "add_generation_prompt", "template"}


async def chat_completions(service: Service, request: Request) -> Response:
    asked = await read(request, ChatRequest, REFUSED_CHAT)
    renderer = _Renderer(asked)
    return await service.chat(
        request,
        asked.model,
        task_of(asked),
        whole=renderer.whole,
        pieces=renderer.chunks if asked.stream else None,
    )


def task_of(asked: ChatRequest) -> ChatTask:
    if asked.stream_options and not asked.stream:
        raise bad_request("stream_options is for stream: true.", "stream_options")
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request("top_logprobs is for logprobs: true.", "top_logprobs")
    values = sampling(asked, _max_tokens(asked))
    values["logprobs"] = (asked.top_logprobs or 0) if asked.logprobs else None
    if asked.continue_final_message and asked.messages[-1].role != "assistant":
        raise bad_request("continue_final_message is for a last message of the assistant.", "continue_final_message")
    return ChatTask(
        messages=[message_of(message, index) for index, message in enumerate(asked.messages)],
        tools=[tool.model_dump(exclude_none=True) for tool in asked.tools or []],
        tool_choice=_tool_choice(asked),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        sampling=values,
        n=asked.n or 1,
        grammar=grammar(asked.response_format),
        variables=_variables(asked),
        effort=asked.reasoning_effort,
        continues=bool(asked.continue_final_message),
    )


def message_of(message: Message, index: int) -> dict[str, Any]:
    """In the form that templates take, with text for content."""
    values = message.model_dump(exclude_none=True, exclude={"annotations", "refusal", "name"})
    values["content"] = text_of(message.content, f"messages.{index}.content")
    if message.name is not None:
        values["name"] = message.name
    return values


def text_of(content: Content | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if isinstance(part, MediaPart):
            raise not_supported(f"{part.type} parts are", param)
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)  # type: ignore[union-attr]


def usage_of(answers: list[Usage]) -> dict[str, Any]:
    """Of the choices of one request: their prompt counts once."""
    prompt, output = answers[0].prompt_tokens, sum(usage.output_tokens for usage in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }


def _max_tokens(asked: ChatRequest) -> int | None:
    both = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(both) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    return next(iter(both), None)


def _tool_choice(asked: ChatRequest) -> ToolChoice:
    if isinstance(asked.tool_choice, NamedTool):
        return ToolChoice("named", asked.tool_choice.function.name)
    return ToolChoice(asked.tool_choice or "auto")


def _variables(asked: ChatRequest) -> dict[str, Any]:
    variables = asked.chat_template_kwargs or {}
    for name in variables.keys() & _RESERVED:
        raise bad_request(f"{name} is not for chat_template_kwargs.", f"chat_template_kwargs.{name}")
    return dict(variables)


class _Renderer:
    """One request's answers in OpenAI's form."""

    def __init__(self, asked: ChatRequest):
        self._asked = asked
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())

    def whole(self, chat: Chat, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(chat, index, answer) for index, answer in enumerate(answers)]
        usage = usage_of([answer.usage for answer in answers])
        return {**self._frame(chat, "chat.completion"), "choices": choices, "usage": usage}

    async def chunks(self, chat: Chat) -> AsyncGenerator[bytes, None]:
        ends: list[End] = []
        counts = [0] * chat.task.n  # of tool calls
        with_usage = self._asked.stream_options is not None and self._asked.stream_options.include_usage
        extra = {"usage": None} if with_usage else {}
        try:
            for index in range(chat.task.n):
                yield self._chunk(chat, extra, index, {"role": "assistant", "content": ""})
            async with aclosing(chat.events()) as events:
                async for event in events:
                    if isinstance(event, End):
                        ends.append(event)
                        yield self._chunk(chat, extra, event.choice, {}, event.reason)
                    else:
                        delta = _delta(event, counts)
                        yield self._chunk(chat, extra, event.choice, delta, logprobs=self._logprobs(chat, event))
            if with_usage:
                usage = usage_of([end.usage for end in ends])
                yield sse({**self._frame(chat, "chat.completion.chunk"), "choices": [], "usage": usage})
        except Exception as error:  # noqa: BLE001  the status is sent: the error becomes the last event
            yield sse(body(translate(error), "openai"))
            return
        yield DONE

    def _frame(self, chat: Chat, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": chat.model.name}

    def _chunk(
        self,
        chat: Chat,
        extra: dict[str, Any],
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse({**self._frame(chat, "chat.completion.chunk"), "choices": [choice], **extra})

    def _logprobs(self, chat: Chat, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(chat.model.tokenizer, delta.logprobs) if self._asked.logprobs else None

    def _choice(self, chat: Chat, index: int, answer: Answer) -> dict[str, Any]:
        assert answer.end is not None
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        else:
            message["content"] = answer.text
        logprobs = chat_logprobs(chat.model.tokenizer, answer.logprobs) if self._asked.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.end.reason}


def _delta(event: Delta, counts: list[int]) -> dict[str, Any]:
    match event.piece:
        case Words(kind="reasoning"):
            return {"reasoning_content": event.piece.text}
        case Words():
            return {"content": event.piece.text}
        case Call():
            counts[event.choice] += 1
            return {"tool_calls": [{"index": counts[event.choice] - 1, **_call(event.piece)}]}
    return {}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or new_id("call_"), "type": "function", "function": function}
