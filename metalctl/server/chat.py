"""A conversation to be continued, whatever API it came by: what is asked, how it is prepared, what comes back."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from metalctl.engine.errors import CheckpointError, UsageError
from metalctl.engine.grammar import Preamble
from metalctl.engine.sequence import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, Usage
from metalctl.sampling import sampling_params
from metalctl.server.chat_format.formats import AnswerParser
from metalctl.server.chat_format.pieces import Call, Piece, Words
from metalctl.server.chat_format.plain_tools import describe
from metalctl.server.chat_format.tool_grammars import AUTO, ToolChoice, grammar_for
from metalctl.server.errors import bad_request
from metalctl.server.generation import Generation, Prompt
from metalctl.server.models import ModelManager, ServedModel

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class ChatTask:
    """What every API's chat request comes down to.

    `messages` and `tools` are in OpenAI's form. `sampling` has the names of SamplingParams, with None for what was not
    given. `grammar` is one of metalctl.engine.grammar. `variables` reach the chat template. With `clamp`, max_tokens is
    lowered to what the context still holds.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    grammar: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None  # of reasoning; "none" asks for no reasoning
    effort_is_a_wish: bool = False  # a model without that switch answers all the same
    clamp: bool = False
    context: int | None = None  # tokens that prompt and answer may have, if that is less than the model's
    raw: str | None = None  # a prompt that is taken as it is, instead of messages
    continues: bool = False  # the last message is the beginning of the answer


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one of the answers, with the log-probabilities of the tokens that came since the last."""

    choice: int
    piece: Piece | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """One of the answers is complete."""

    choice: int
    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    usage: Usage


@dataclass
class Answer:
    """One answer as a whole."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: End | None = None

    def add(self, event: Delta | End) -> None:
        if isinstance(event, End):
            self.end = event
            return
        self.logprobs += event.logprobs
        match event.piece:
            case Call():
                self.calls.append(event.piece)
            case Words(kind="reasoning"):
                self.reasoning += event.piece.text
            case Words():
                self.text += event.piece.text

    @property
    def usage(self) -> Usage:
        assert self.end is not None
        return self.end.usage


@dataclass(frozen=True)
class _Prepared:
    prompt: str
    token_ids: list[int]
    params: SamplingParams
    grammar: str | None
    preamble: Preamble | None


class Chat:
    """A task on its way. `open` prepares and submits it, so that what is wrong with it is raised before any answer."""

    def __init__(self, model: ServedModel, task: ChatTask, prepared: _Prepared, generation: Generation):
        self.model = model
        self.task = task
        self.prompt_tokens = len(prepared.token_ids)
        self._generation = generation
        self._parsers = [_parser(model, task, prepared.prompt) for _ in range(task.n)]
        self._pending: list[tuple[TokenLogprobs, ...]] = [()] * task.n
        self._called: set[int] = set()

    @classmethod
    async def open(
        cls,
        manager: ModelManager,
        stack: AsyncExitStack,
        name: str | None,
        task: ChatTask,
        keep_alive: float | None = None,
    ) -> "Chat":
        """`stack` holds the model and ends the generation when it is closed."""
        model = await stack.enter_async_context(manager.use(name, keep_alive))
        prepared = await asyncio.to_thread(prepare, model, task)
        prompts = await asyncio.to_thread(_prompts, model, task, prepared)
        generation = Generation(model, manager.metrics, prompts)
        stack.callback(generation.close)
        return cls(model, task, prepared, generation)

    async def events(self) -> AsyncGenerator[Delta | End, None]:
        """The answers piece by piece, each closed by its End."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for choice, output in outputs:
                for event in self._read(choice, output):
                    yield event

    async def answers(self) -> list[Answer]:
        answers = [Answer() for _ in range(self.task.n)]
        async with aclosing(self.events()) as events:
            async for event in events:
                answers[event.choice].add(event)
        return answers

    def _read(self, choice: int, output: RequestOutput) -> list[Delta | End]:
        parser = self._parsers[choice]
        pieces = parser.feed(output.text)
        if output.finished:
            pieces = pieces + parser.finish(cut=output.finish_reason is FinishReason.LENGTH)
        deltas = self._deltas(choice, self._permitted(choice, pieces), output.logprobs)
        if output.finished:
            return [*deltas, *self._rest(choice), self._end(choice, output)]
        return list(deltas)

    def _permitted(self, choice: int, pieces: list[Piece]) -> list[Piece]:
        """Without parallel calls an answer ends with its first."""
        permitted: list[Piece] = []
        for piece in pieces:
            if choice in self._called and not self.task.parallel_tool_calls:
                break
            permitted.append(piece)
            if isinstance(piece, Call):
                self._called.add(choice)
                if not self.task.parallel_tool_calls:
                    self._generation.stop(choice)
        return permitted

    def _deltas(self, choice: int, pieces: list[Piece], logprobs: tuple[TokenLogprobs, ...]) -> list[Delta]:
        pending = self._pending[choice] + logprobs
        deltas = []
        for piece in pieces:
            deltas.append(Delta(choice, piece, pending))
            pending = ()
        self._pending[choice] = pending
        return deltas

    def _rest(self, choice: int) -> list[Delta]:
        pending, self._pending[choice] = self._pending[choice], ()
        return [Delta(choice, None, pending)] if pending else []

    def _end(self, choice: int, output: RequestOutput) -> End:
        assert output.usage is not None
        if output.finish_reason is FinishReason.LENGTH:
            return End(choice, "length", None, output.usage)
        stopped = output.stop_reason if isinstance(output.stop_reason, str) else None
        return End(choice, "tool_calls" if choice in self._called else "stop", stopped, output.usage)


def prepare(model: ServedModel, task: ChatTask) -> _Prepared:
    """Render, tokenise, and read the parameters. Takes long for a long prompt: not for the event loop.

    Raises UsageError and ApiError.
    """
    format_ = model.format
    tools = [] if task.tool_choice.mode == "none" else list(task.tools)
    prompt, ids = _raw(model, task.raw) if task.raw is not None else _rendered(model, task, tools)
    grammar = grammar_for(task.tool_choice, tools, task.parallel_tool_calls, task.grammar, format_)
    params = _params(model, task, len(ids))
    if params.skip_special_tokens and format_.hides_markers(bool(tools)):
        params = replace(params, skip_special_tokens=False)
    return _Prepared(prompt, ids, params, grammar, format_.preamble(prompt) if grammar else None)


def _raw(model: ServedModel, text: str) -> tuple[str, list[int]]:
    return text, model.tokenizer.encode(text, add_special_tokens=True, parse_special=True)


def _rendered(model: ServedModel, task: ChatTask, tools: list[Tool]) -> tuple[str, list[int]]:
    """The conversation as the model's template writes it, and its tokens."""
    format_, tokenizer = model.format, model.tokenizer
    messages = [_for_template(message, format_.takes_developer) for message in task.messages]
    if not format_.takes_tools:
        messages, tools = describe(messages, tools), []
    variables = {**_effort(model, task), **task.variables, "add_generation_prompt": not task.continues}
    try:
        prompt = tokenizer.render_chat_template(messages, tools=tools or None, **variables)
    except CheckpointError as error:
        raise bad_request(error.message, "messages", "template") from error
    if task.continues:
        prompt = _cut_after(prompt, str(messages[-1]["content"]))
    ids = tokenizer.encode(prompt, parse_special=True)
    if tokenizer.chat_bos_id is not None and ids[:1] != [tokenizer.chat_bos_id]:
        ids.insert(0, tokenizer.chat_bos_id)
    return prompt, ids


def _params(model: ServedModel, task: ChatTask, prompt_tokens: int) -> SamplingParams:
    params = sampling_params(task.sampling, model.generation_defaults)
    limit = model.context_length
    if task.context is not None:
        if task.context > limit:
            raise bad_request(f"num_ctx is {task.context}, but the context of this model holds {limit}.", "num_ctx")
        if prompt_tokens >= task.context:
            raise bad_request(f"the prompt has {prompt_tokens} tokens, but num_ctx is {task.context}.", "num_ctx")
        limit = task.context
    wanted = params.max_tokens if task.context is None else params.max_tokens or limit
    if task.clamp and wanted is not None and limit > prompt_tokens:
        params = replace(params, max_tokens=min(wanted, limit - prompt_tokens))
    return params


_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def _effort(model: ServedModel, task: ChatTask) -> dict[str, Any]:
    """The template's variables for an effort of reasoning."""
    effort = task.effort
    if effort is None:
        return {}
    if not model.format.can_switch_reasoning:
        if effort == "none" or task.effort_is_a_wish:
            return {}
        raise bad_request("this model has no switch for its reasoning.", "reasoning_effort", "unsupported")
    reasons = effort != "none"
    level = _HARMONY_EFFORTS.get(effort, effort) if model.format.is_harmony else effort
    return {"enable_thinking": reasons, "thinking": reasons, "reasoning_effort": level}


def _prompts(model: ServedModel, task: ChatTask, prepared: _Prepared) -> list[Prompt]:
    """One a choice; with a seed each has its own, so that they differ."""
    prompts = []
    for choice in range(task.n):
        params = prepared.params
        if params.seed is not None and choice:
            params = replace(params, seed=params.seed + choice)
        compiled = model.compiler.compile(prepared.grammar, prepared.preamble) if prepared.grammar else None
        prompts.append(Prompt(prepared.token_ids, params, compiled))
    return prompts


def _parser(model: ServedModel, task: ChatTask, prompt: str) -> AnswerParser:
    tools = [] if task.tool_choice.mode == "none" else task.tools
    return model.format.parser(prompt, tools, forced=task.tool_choice.is_forced)


def _for_template(message: Mapping[str, Any], takes_developer: bool) -> dict[str, Any]:
    """As templates want it: text for content, and the arguments of calls as objects."""
    result = dict(message)
    result["content"] = message.get("content") or ""
    if message["role"] == "developer" and not takes_developer:
        result["role"] = "system"
    if message.get("tool_calls"):
        result["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return result


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _cut_after(prompt: str, beginning: str) -> str:
    """A rendered conversation up to the end of its last message's text, so that the answer goes on there."""
    position = prompt.rfind(beginning.strip())
    if not beginning.strip() or position < 0:
        raise UsageError("this model's template does not let an answer be continued.")
    return prompt[: position + len(beginning.strip())]
