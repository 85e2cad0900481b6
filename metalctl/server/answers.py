"""The shapes of answers, for the OpenAPI document. What a field means is said where its API is published."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Further fields may stand beside those that are named."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class OpenAIErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Answer):
    error: OpenAIErrorDetail


class AnthropicErrorDetail(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaError(Answer):
    error: str


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    loaded: bool


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class OpenAIUsage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage


class TextChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAIUsage


class ModelResponse(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class AnthropicUsage(Answer):
    input_tokens: int
    output_tokens: int


class AnthropicMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(Answer):
    input_tokens: int


class OllamaChat(Answer):
    model: str
    created_at: str
    message: dict[str, Any]
    done: bool
    done_reason: str


class OllamaText(Answer):
    model: str
    created_at: str
    response: str
    done: bool
    done_reason: str


class OllamaModels(Answer):
    models: list[dict[str, Any]]


class OllamaModel(Answer):
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class Prompt(Answer):
    prompt: str


class State(Answer):
    status: str


class Version(Answer):
    version: str
