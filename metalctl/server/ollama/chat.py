"""POST /api/chat and /api/generate"""

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from metalctl.engine import grammar as grammars
from metalctl.engine.sequence import TokenLogprobs, Usage
from metalctl.server.body import check, read
from metalctl.server.chat import Answer, Chat, End
from metalctl.server.chat_format.pieces import Call, Words
from metalctl.server.durations import keep_alive
from metalctl.server.errors import bad_request, body, translate
from metalctl.server.ollama.types import (
    REFUSED_GENERATE,
    REFUSED_OPTIONS,
    CalledFunction,
    ChatRequest,
    GenerateRequest,
    Message,
    Options,
    Request,
)
from metalctl.server.openai.logprobs import chat_logprobs
from metalctl.server.service import Service
from metalctl.server.streaming import ndjson
from metalctl.server.task import ChatTask

_NDJSON = "application/x-ndjson"
# How a text, reasoning and calls become part of a line; the two routes differ in that alone.
Shape = Callable[[str, str, list[Call]], dict[str, Any]]


async def chat(service: Service, request: HttpRequest) -> Response:
    asked = await read(request, ChatRequest)
    if not asked.messages:
        return await _load_only(service, asked, {"message": {"role": "assistant", "content": ""}})
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or []]
    messages = [_message(message) for message in asked.messages]
    return await _answer(service, request, asked, _task(asked, messages=messages, tools=tools), _as_message)


async def generate(service: Service, request: HttpRequest) -> Response:
    asked = await read(request, GenerateRequest, REFUSED_GENERATE)
    if not asked.prompt:
        return await _load_only(service, asked, {"response": ""})
    if asked.raw:
        if asked.system:
            raise bad_request("system is for prompts with a template; raw has none.", "system")
        return await _answer(service, request, asked, _task(asked, messages=(), raw=asked.prompt), _as_response)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    messages = [*system, {"role": "user", "content": asked.prompt}]
    return await _answer(service, request, asked, _task(asked, messages=messages), _as_response)


async def _answer(service: Service, request: HttpRequest, asked: Request, task: ChatTask, shape: Shape) -> Response:
    writer = _Writer(asked, shape)
    streams = asked.stream is not False
    return await service.chat(
        request,
        asked.model,
        task,
        whole=writer.whole,
        pieces=writer.lines if streams else None,
        keep_alive=keep_alive(asked.keep_alive),
        silence=None,
        media_type=_NDJSON,
    )


async def _load_only(service: Service, asked: Request, empty: dict[str, Any]) -> Response:
    """Without a prompt the model is loaded, or unloaded by a keep_alive of 0."""
    seconds = keep_alive(asked.keep_alive)
    async with service.manager.use(asked.model, seconds) as model:
        reason = "unload" if seconds == 0 else "load"
        return JSONResponse({"model": model.name, "created_at": _now(), **empty, "done": True, "done_reason": reason})


def _task(asked: Request, **task: Any) -> ChatTask:
    options = check(asked.options or {}, Options, REFUSED_OPTIONS)
    predict = options.num_predict if options.num_predict is not None and options.num_predict >= 1 else None
    sampling = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": max(options.top_p, 1e-9) if options.top_p is not None else None,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": options.seed,
        "max_tokens": predict,
        "stop": tuple(options.stop or ()) or None,
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }
    format_ = _grammar(asked.format)
    return ChatTask(
        **task, sampling=sampling, grammar=format_, effort=_effort(asked.think), clamp=True, context=options.num_ctx
    )


def _grammar(format_: str | dict[str, Any] | None) -> str | None:
    if isinstance(format_, dict):
        return grammars.json_schema(format_)
    return grammars.any_object() if format_ == "json" else None


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, bool):
        return "medium" if think else "none"
    return think


def _message(message: Message) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        converted["reasoning_content"] = message.thinking
    if message.tool_calls:
        converted["tool_calls"] = [_for_template(call.function) for call in message.tool_calls]
    if message.tool_name:
        converted["name"] = message.tool_name
    if message.tool_call_id:
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _for_template(called: CalledFunction) -> dict[str, Any]:
    function = {"name": called.name, "arguments": json.dumps(called.arguments, ensure_ascii=False)}
    return {"id": "", "type": "function", "function": function}


def _as_message(text: str, reasoning: str, calls: list[Call]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls
        ]
    return {"message": message}


def _as_response(text: str, reasoning: str, _calls: list[Call]) -> dict[str, Any]:
    return {"response": text} | ({"thinking": reasoning} if reasoning else {})


class _Writer:
    """One request's answer in Ollama's form."""

    def __init__(self, asked: Request, shape: Shape):
        self._asked = asked
        self._shape = shape

    def whole(self, chat: Chat, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        assert answer.end is not None
        content = self._shape(answer.text, answer.reasoning, answer.calls)
        return {**self._frame(chat), **content, **self._logprobs(chat, answer.logprobs), **_done(answer.end)}

    async def lines(self, chat: Chat) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(chat.events()) as events:
                async for event in events:
                    yield ndjson({**self._frame(chat), **self._line(chat, event)})
        except Exception as error:  # noqa: BLE001  the status is sent: the error becomes the last line
            yield ndjson(body(translate(error), "ollama"))

    def _line(self, chat: Chat, event: Any) -> dict[str, Any]:
        if isinstance(event, End):
            return {**self._shape("", "", []), **_done(event)}
        logprobs = self._logprobs(chat, event.logprobs)
        match event.piece:
            case Words(kind="reasoning"):
                content = self._shape("", event.piece.text, [])
            case Words():
                content = self._shape(event.piece.text, "", [])
            case Call():
                content = self._shape("", "", [event.piece])
            case _:
                content = self._shape("", "", [])
        return {**content, "done": False, **logprobs}

    def _frame(self, chat: Chat) -> dict[str, Any]:
        return {"model": chat.model.name, "created_at": _now()}

    def _logprobs(self, chat: Chat, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(chat.model.tokenizer, tokens)["content"]} if self._asked.logprobs else {}


def _done(end: End) -> dict[str, Any]:
    reason = "length" if end.reason == "length" else "stop"
    return {"done": True, "done_reason": reason, **_durations(end.usage)}


def _durations(usage: Usage) -> dict[str, int]:
    """In nanoseconds, as Ollama has them."""
    first = usage.time_to_first_token or usage.elapsed
    times = {
        "total_duration": usage.elapsed,
        "load_duration": 0.0,
        "prompt_eval_duration": first - (usage.queue_time or 0.0),
        "eval_duration": usage.elapsed - first,
    }
    counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.output_tokens}
    return {name: round(seconds * 1e9) for name, seconds in times.items()} | counts


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
