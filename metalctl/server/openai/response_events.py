"""A response of /v1/responses as items, and as the events that build them up."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from metalctl.server.chat import Answer, Chat, Delta, End
from metalctl.server.chat_format.pieces import Call, Words
from metalctl.server.errors import translate
from metalctl.server.ids import new_id
from metalctl.server.openai.logprobs import chat_logprobs
from metalctl.server.openai.response_types import ResponsesRequest
from metalctl.server.streaming import sse

Event = dict[str, Any]


class ResponseWriter:
    """One request's answer in the form of the responses API."""

    def __init__(self, asked: ResponsesRequest):
        self._asked = asked
        self._id = new_id("resp_")
        self._created = int(time.time())

    def whole(self, chat: Chat, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        assert answer.end is not None
        items = _Items(chat, with_logprobs=answer.logprobs != [])
        if answer.reasoning:
            items.write(Delta(0, Words("reasoning", answer.reasoning)))
        if answer.text or not answer.calls:
            items.write(Delta(0, Words("text", answer.text), tuple(answer.logprobs)))
        for call in answer.calls:
            items.write(Delta(0, call))
        items.close()
        return self._response(chat, items, answer.end)

    async def events(self, chat: Chat) -> AsyncGenerator[bytes, None]:
        items = _Items(chat, with_logprobs=True)
        numbers = iter(range(2**31))

        def send(event: Event) -> bytes:
            return sse({**event, "sequence_number": next(numbers)}, event["type"])

        end: End | None = None
        try:
            yield send({"type": "response.created", "response": self._response(chat, items)})
            yield send({"type": "response.in_progress", "response": self._response(chat, items)})
            async with aclosing(chat.events()) as events:
                async for event in events:
                    if isinstance(event, End):
                        end = event
                    else:
                        yield b"".join(map(send, items.write(event)))
            yield b"".join(map(send, items.close()))
            assert end is not None
            kind = "response.incomplete" if end.reason == "length" else "response.completed"
            yield send({"type": kind, "response": self._response(chat, items, end)})
        except Exception as error:  # noqa: BLE001  the status is sent: the error becomes the last event
            failure = {"code": "server_error", "message": translate(error).message}
            failed = {**self._response(chat, items), "status": "failed", "error": failure}
            yield send({"type": "response.failed", "response": failed})

    def _response(self, chat: Chat, items: "_Items", end: End | None = None) -> dict[str, Any]:
        asked = self._asked
        cut = end is not None and end.reason == "length"
        status = "in_progress" if end is None else "incomplete" if cut else "completed"
        given = asked.model_dump(
            exclude_none=True, by_alias=True, exclude={"input", "stream", "stream_options", "include"}
        )
        defaults: dict[str, Any] = {
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "reasoning": {"effort": None, "summary": None},
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": None,
            "truncation": "disabled",
            "user": None,
        }
        return {
            **defaults,
            **given,
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": chat.model.name,
            "output": [dict(item) for item in items.items],
            "previous_response_id": None,
            "store": False,
            "usage": None if end is None else _usage(end, chat, items),
        }


class _Items:
    """The output items so far. `write` and `close` give the events that tell of the change."""

    def __init__(self, chat: Chat, with_logprobs: bool):
        self.items: list[dict[str, Any]] = []
        self._chat = chat
        self._with_logprobs = with_logprobs
        self._open: str | None = None

    def write(self, delta: Delta) -> list[Event]:
        match delta.piece:
            case Words(kind="reasoning"):
                return [*self._begin("reasoning"), *self._reason(delta.piece.text)]
            case Words():
                return [*self._begin("message"), *self._say(delta)]
            case Call():
                return [*self.close(), *self._call(delta.piece)]
        return []

    def close(self) -> list[Event]:
        """End the item that is being written."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        item = self.items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        done = {"type": "response.reasoning_text.done", **self._at(part=True), "text": part["text"]}
        if kind == "message":
            done = {**done, "type": "response.output_text.done", "logprobs": part["logprobs"]}
        ended = {"type": "response.content_part.done", **self._at(part=True), "part": dict(part)}
        return [done, ended, {"type": "response.output_item.done", **self._at(), "item": dict(item)}]

    def _begin(self, kind: str) -> list[Event]:
        if self._open == kind:
            return []
        closed = self.close()
        self._open = kind
        base = {"id": new_id("msg_" if kind == "message" else "rs_"), "type": kind, "status": "in_progress"}
        self.items.append({**base, "role": "assistant"} if kind == "message" else {**base, "summary": []})
        added = {"type": "response.output_item.added", **self._at(), "item": {**self.items[-1], "content": []}}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"] = [part]
        return [*closed, added, {"type": "response.content_part.added", **self._at(part=True), "part": dict(part)}]

    def _reason(self, text: str) -> Iterator[Event]:
        self.items[-1]["content"][0]["text"] += text
        yield {"type": "response.reasoning_text.delta", **self._at(part=True), "delta": text}

    def _say(self, delta: Delta) -> Iterator[Event]:
        assert isinstance(delta.piece, Words)
        logprobs = chat_logprobs(self._chat.model.tokenizer, delta.logprobs)["content"] if self._with_logprobs else []
        part = self.items[-1]["content"][0]
        part["text"] += delta.piece.text
        part["logprobs"] += logprobs
        event = {"type": "response.output_text.delta", **self._at(part=True), "delta": delta.piece.text}
        yield {**event, "logprobs": logprobs}

    def _call(self, call: Call) -> Iterator[Event]:
        base = {"id": new_id("fc_"), "type": "function_call", "call_id": call.id or new_id("call_"), "name": call.name}
        self.items.append({**base, "arguments": call.arguments, "status": "completed"})
        begun = {**base, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", **self._at(), "item": begun}
        yield {"type": "response.function_call_arguments.delta", **self._at(name=True), "delta": call.arguments}
        done = {"type": "response.function_call_arguments.done", **self._at(name=True), "name": call.name}
        yield {**done, "arguments": call.arguments}
        yield {"type": "response.output_item.done", **self._at(), "item": dict(self.items[-1])}

    def _at(self, part: bool = False, name: bool = False) -> dict[str, Any]:
        """Where an event happens: in the last item."""
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if part or name:
            place["item_id"] = self.items[-1]["id"]
        return {**place, "content_index": 0} if part else place


def _usage(end: End, chat: Chat, items: _Items) -> dict[str, Any]:
    usage = end.usage
    thoughts = "".join(item["content"][0]["text"] for item in items.items if item["type"] == "reasoning")
    reasoning = min(len(chat.model.tokenizer.encode(thoughts)), usage.output_tokens) if thoughts else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
