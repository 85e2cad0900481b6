"""Request type of OpenAI's responses route: every field that is declared is served."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from metalctl.server.body import Parameters
from metalctl.server.openai.types import Effort, ObjectFormat, TextFormat

REFUSED_RESPONSES = {
    "access_programs": "there are none.",
    "background_options": "nothing runs in the background.",
    "context_management": "the conversation is taken as it is sent.",
    "conversation": "nothing is stored; send the whole conversation as input.",
    "image": "only text is generated.",
    "max_tool_calls": "the caller makes the calls, and counts them.",
    "moderation": "nothing is moderated here.",
    "previous_response_id": "nothing is stored; send the whole conversation as input.",
    "prompt": "no prompts are stored.",
    "prompt_cache_options": "the prefix cache needs no options.",
    "prompt_cache_retention": "the prefix cache keeps what fits.",
}


class InputText(Parameters):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(Parameters):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    logprobs: list[Any] | None = None


class Refusal(Parameters):
    type: Literal["refusal"]
    refusal: str


class Media(Parameters):
    """Refused with a message that says so."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["input_image", "input_file", "input_audio"]


Part = Annotated[InputText | OutputText | Refusal | Media, Field(discriminator="type")]
Status = Literal["in_progress", "completed", "incomplete"]


class Message(Parameters):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] | None = None
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(Parameters):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Parameters):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Parameters):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoning(Parameters):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Parameters):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[
        bool | None, Field(description="Arguments keep to the schema, where the model writes calls as JSON.")
    ] = None


class NamedTool(Parameters):
    type: Literal["function"]
    name: str


class SchemaFormat(Parameters):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, Field(description="The schema is always kept.")] = None


class TextOptions(Parameters):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat | None, Field(discriminator="type")] = None


class ReasoningOptions(Parameters):
    effort: Annotated[Effort | None, Field(description="For templates that have such a switch.")] = None
    summary: Annotated[Literal["auto"] | None, Field(description="Reasoning comes whole, not summarised.")] = None


class StreamOptions(Parameters):
    include_obfuscation: Annotated[Literal[False] | None, Field(description="Only false: nothing is padded.")] = None


class ResponsesRequest(Parameters):
    """POST /v1/responses"""

    input: Annotated[str | Annotated[list[Item], Field(min_length=1)], Field(description="A text, or items.")]
    model: Annotated[str | None, Field(description="A name from /v1/models; the first when left out.")] = None
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=100)] = None
    tools: Annotated[list[FunctionTool] | None, Field(max_length=512)] = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None,
        Field(description="Log-probabilities; reasoning is never encrypted, so that it comes anyway."),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Annotated[Literal[False] | None, Field(description="Only false: nothing is stored.")] = None
    background: Annotated[Literal[False] | None, Field(description="Only false.")] = None
    truncation: Annotated[Literal["disabled"] | None, Field(description="What is too long is refused.")] = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Annotated[dict[str, str] | None, Field(description="Has no effect on the answer.")] = None
    user: Annotated[str | None, Field(description="Has no effect on the answer.")] = None
    safety_identifier: Annotated[str | None, Field(description="Has no effect on the answer.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Prefixes are cached anyway.")] = None
