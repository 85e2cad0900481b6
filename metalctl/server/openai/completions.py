"""POST /v1/completions"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.engine.sequence import FinishReason, RequestOutput, TokenLogprobs, Usage
from metalctl.sampling import sampling_params
from metalctl.server.body import read
from metalctl.server.errors import bad_request, body, translate
from metalctl.server.generation import Generation, Prompt
from metalctl.server.ids import new_id
from metalctl.server.models import ServedModel
from metalctl.server.openai.chat import DONE
from metalctl.server.openai.logprobs import CompletionLogprobs, prompt_logprobs
from metalctl.server.openai.sampling import grammar, sampling
from metalctl.server.openai.types import REFUSED_COMPLETION, CompletionRequest
from metalctl.server.service import Service
from metalctl.server.streaming import EventStream, sse, until_disconnect

_MAX_TOKENS = 16  # the API's own default


async def completions(service: Service, request: Request) -> Response:
    asked = await read(request, CompletionRequest, REFUSED_COMPLETION)
    _check(asked)
    stack = AsyncExitStack()
    try:
        completion = await until_disconnect(request, Completion.open(service, stack, asked))
        if asked.stream:
            return EventStream(completion.chunks(), stack.pop_all().aclose)
        return JSONResponse(await until_disconnect(request, completion.whole()))
    finally:
        await stack.aclose()


def _check(asked: CompletionRequest) -> None:
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise bad_request("best_of is supported with the value of n only.", "best_of", "unsupported")
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request("max_tokens 0 is for echo: true.", "max_tokens")
    if asked.stream_options and not asked.stream:
        raise bad_request("stream_options is for stream: true.", "stream_options")


@dataclass
class _Choice:
    """One text on its way."""

    prompt: Prompt
    echo: str  # what is put in front of it
    logprobs: CompletionLogprobs | None
    text: str = ""
    reason: str | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    sent: int = 0  # tokens whose log-probabilities have been sent


class Completion:
    """One request's texts, for several prompts and several choices each, in OpenAI's form."""

    def __init__(self, asked: CompletionRequest, model: ServedModel, generation: Generation, choices: list[_Choice]):
        self._asked = asked
        self._model = model
        self._generation = generation
        self._choices = choices
        self._id = new_id("cmpl-")
        self._created = int(time.time())

    @classmethod
    async def open(cls, service: Service, stack: AsyncExitStack, asked: CompletionRequest) -> "Completion":
        model = await stack.enter_async_context(service.manager.use(asked.model))
        choices = await asyncio.to_thread(_choices, model, asked)
        generation = Generation(model, service.manager.metrics, [choice.prompt for choice in choices])
        stack.callback(generation.close)
        return cls(asked, model, generation, choices)

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                self._take(self._choices[index], output)
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._frame(), "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        options = self._asked.stream_options
        extra: dict[str, Any] = {"usage": None} if options and options.include_usage else {}
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for index, output in outputs:
                    yield self._chunk(index, self._take(self._choices[index], output), output, extra)
            if extra:
                yield sse({**self._frame(), "choices": [], "usage": self._usage()})
        except Exception as error:  # noqa: BLE001  the status is sent: the error becomes the last event
            yield sse(body(translate(error), "openai"))
            return
        yield DONE

    def _take(self, choice: _Choice, output: RequestOutput) -> str:
        """Note what came, and return what it adds to the text."""
        added = ""
        if output.prompt_logprobs is not None:
            choice.prompt_logprobs = output.prompt_logprobs
            self._echo_logprobs(choice)
        if choice.usage is None and not choice.text:
            added = choice.echo
        if self._asked.max_tokens != 0:
            added += output.text
            for entry in output.logprobs:
                if choice.logprobs is not None:
                    choice.logprobs.add(entry)
        choice.text += added
        if output.finished:
            length = output.finish_reason is FinishReason.LENGTH or self._asked.max_tokens == 0
            choice.reason, choice.usage = "length" if length else "stop", output.usage
        return added

    def _echo_logprobs(self, choice: _Choice) -> None:
        if choice.logprobs is None or not self._asked.echo or choice.prompt_logprobs is None:
            return
        for token, entry in zip(choice.prompt.token_ids, choice.prompt_logprobs, strict=True):
            choice.logprobs.add(None if entry is None else _limited(entry, self._asked.logprobs or 0), token)

    def _chunk(self, index: int, added: str, output: RequestOutput, extra: dict[str, Any]) -> bytes:
        choice = self._choices[index]
        record: dict[str, Any] = {"index": index, "text": added, "finish_reason": choice.reason}
        record["logprobs"] = None
        if choice.logprobs is not None:
            lists, sent = choice.logprobs.lists, choice.sent
            record["logprobs"] = {name: values[sent:] for name, values in lists.items()}
            choice.sent = len(lists["tokens"])
        if output.prompt_logprobs is not None and self._asked.prompt_logprobs is not None:
            record["prompt_logprobs"] = self._prompt_logprobs(choice)
        return sse({**self._frame(), "choices": [record], **extra})

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        lists = None if choice.logprobs is None else choice.logprobs.lists
        record = {"index": index, "text": choice.text, "finish_reason": choice.reason, "logprobs": lists}
        if self._asked.prompt_logprobs is not None:
            record["prompt_logprobs"] = self._prompt_logprobs(choice)
        return record

    def _prompt_logprobs(self, choice: _Choice) -> list[dict[str, Any] | None]:
        limit = self._asked.prompt_logprobs or 0
        entries = [entry and _limited(entry, limit) for entry in choice.prompt_logprobs or ()]
        return prompt_logprobs(self._model.tokenizer, entries)

    def _frame(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model.name}

    def _usage(self) -> dict[str, Any]:
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        each = self._asked.n or 1
        prompt = sum(usage.prompt_tokens for usage in usages[::each])
        output = 0 if self._asked.max_tokens == 0 else sum(usage.output_tokens for usage in usages)
        cached = {"cached_tokens": sum(usage.cached_tokens for usage in usages[::each])}
        totals = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return {**totals, "prompt_tokens_details": cached}


def _choices(model: ServedModel, asked: CompletionRequest) -> list[_Choice]:
    """Prompts times n, in the order of the API: all choices of the first prompt, then of the next."""
    values = sampling(asked, max(1, _MAX_TOKENS if asked.max_tokens is None else asked.max_tokens))
    values["logprobs"] = asked.logprobs
    wanted = [n for n in (asked.prompt_logprobs, asked.logprobs if asked.echo else None) if n is not None]
    values["prompt_logprobs"] = max(wanted, default=None)
    params = sampling_params(values, model.generation_defaults)
    source = grammar(asked.response_format)
    choices = []
    for ids in _prompts(model, asked):
        echo = model.tokenizer.decode(ids) if asked.echo else ""
        for index in range(asked.n or 1):
            own = params if params.seed is None or index == 0 else replace(params, seed=params.seed + index)
            compiled = model.compiler.compile(source) if source else None
            offset = len(echo) if values["prompt_logprobs"] is None else 0
            record = None if asked.logprobs is None else CompletionLogprobs(model.tokenizer, offset)
            choices.append(_Choice(Prompt(ids, own, compiled), echo, record))
    return choices


def _prompts(model: ServedModel, asked: CompletionRequest) -> list[list[int]]:
    """The prompts as tokens, whichever of the four forms they came in."""
    given: Any = asked.prompt
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    special = asked.add_special_tokens is not False
    return [
        model.tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _limited(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    return replace(entry, top=entry.top[:top])
