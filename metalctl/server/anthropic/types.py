"""Request types of Anthropic's message routes: every field that is declared is served."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from metalctl.server.body import Parameters

REFUSED = {
    "container": "there are no containers.",
    "diagnostics": "there are none.",
    "inference_geo": "answers are made on this machine.",
    "mcp_servers": "no other server is called.",
    "speed": "there is one speed.",
    "user_profile_id": "there are no profiles.",
    "workspace_id": "there are no workspaces.",
}

CacheControl = Annotated[dict[str, Any] | None, Field(description="Prefixes are cached anyway.")]


class TextBlock(Parameters):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, Field(max_length=0)] = None


class MediaBlock(Parameters):
    """Refused with a message that says so."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["image", "document", "search_result", "server_tool_use", "web_search_tool_result", "container_upload"]


class ToolUseBlock(Parameters):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Parameters):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | MediaBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


class ThinkingBlock(Parameters):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Parameters):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | MediaBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class Message(Parameters):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Parameters):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl = None
    strict: Annotated[
        bool | None, Field(description="Arguments keep to the schema, where the model writes calls as JSON.")
    ] = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: list[dict[str, Any]] | None = None


class ToolChoice(Parameters):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Parameters):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1, description="No limit is set below max_tokens.")] = None
    display: Literal["summarized"] | None = None


class JsonFormat(Parameters):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Parameters):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ClearThinking(Parameters):
    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Parameters):
    edits: Annotated[list[ClearThinking] | None, Field(description="Templates decide about old reasoning.")] = None


class Metadata(Parameters):
    user_id: Annotated[str | None, Field(description="Has no effect on the answer.")] = None


class CountRequest(Parameters):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: Annotated[str | None, Field(description="A name from /v1/models; the first when left out.")] = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=512)] = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking | None, Field(description="For templates that have such a switch.")] = None
    output_config: OutputConfig | None = None
    context_management: Annotated[
        ContextManagement | None, Field(description="Only clear_thinking: templates decide about old reasoning.")
    ] = None
    cache_control: CacheControl = None


class MessagesRequest(CountRequest):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1, le=2**31, description="What the context cannot hold is taken off.")]
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31)] = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]] | None, Field(max_length=64)
    ] = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
