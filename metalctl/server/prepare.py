"""From a task to tokens, parameters and a grammar. Takes long for a long prompt: not for the event loop."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from metalctl.engine.errors import CheckpointError, UsageError
from metalctl.engine.grammar import Preamble
from metalctl.engine.sequence import SamplingParams
from metalctl.sampling import sampling_params
from metalctl.server.chat_format.formats import AnswerParser
from metalctl.server.chat_format.plain_tools import describe
from metalctl.server.chat_format.tool_grammars import grammar_for
from metalctl.server.errors import bad_request
from metalctl.server.generation import Prompt
from metalctl.server.models import ServedModel
from metalctl.server.task import ChatTask, Tool


@dataclass(frozen=True)
class Prepared:
    """A task in a model's terms."""

    prompt: str
    token_ids: list[int]
    params: SamplingParams
    grammar: str | None
    preamble: Preamble | None


def prepare(model: ServedModel, task: ChatTask) -> Prepared:
    """Render, tokenise, and read the parameters. Raises UsageError and ApiError."""
    format_ = model.format
    tools = [] if task.tool_choice.mode == "none" else list(task.tools)
    prompt, ids = _raw(model, task.raw) if task.raw is not None else _rendered(model, task, tools)
    grammar = grammar_for(task.tool_choice, tools, task.parallel_tool_calls, task.grammar, format_)
    params = _params(model, task, len(ids))
    if params.skip_special_tokens and format_.hides_markers(bool(tools)):
        params = replace(params, skip_special_tokens=False)
    return Prepared(prompt, ids, params, grammar, format_.preamble(prompt) if grammar else None)


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


def prompts_of(model: ServedModel, task: ChatTask, prepared: Prepared) -> list[Prompt]:
    """One a choice; with a seed each has its own, so that they differ."""
    prompts = []
    for choice in range(task.n):
        params = prepared.params
        if params.seed is not None and choice:
            params = replace(params, seed=params.seed + choice)
        compiled = model.compiler.compile(prepared.grammar, prepared.preamble) if prepared.grammar else None
        prompts.append(Prompt(prepared.token_ids, params, compiled))
    return prompts


def parser_of(model: ServedModel, task: ChatTask, prompt: str) -> AnswerParser:
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
