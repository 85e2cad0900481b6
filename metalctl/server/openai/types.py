"""Request types of OpenAI's chat and completion routes: every field that is declared is served.

REFUSED_* name the published parameters that are not, with the reason; anything else is unknown.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from metalctl.server.body import Parameters

StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=64)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1024)]

REFUSED_ALWAYS = {
    "moderation": "nothing is moderated here.",
    "prompt_cache_options": "the prefix cache needs no options.",
    "prompt_cache_retention": "the prefix cache keeps what fits.",
}
REFUSED_CHAT = {
    **REFUSED_ALWAYS,
    "audio": "only text is generated.",
    "function_call": "it was replaced by tool_choice.",
    "functions": "they were replaced by tools.",
    "prediction": "predicted outputs are not used.",
    "verbosity": "models have no such switch.",
    "web_search_options": "there is no web search.",
}
REFUSED_COMPLETION = {"suffix": "models complete from the left only."}


class Sampling(Parameters):
    """How tokens are chosen: OpenAI's parameters, then further ones that engines share."""

    model: Annotated[str | None, Field(description="A name from /v1/models; the first when left out.")] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1, description="0 keeps the likeliest token only.")] = None
    presence_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63, description="The same seed gives the same text.")] = None
    stop: Annotated[
        Annotated[str, Field(min_length=1, max_length=1024)] | StopStrings | None,
        Field(description="Up to 64 strings; the answer ends before the first that comes up."),
    ] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=1024, description="Added to the logits, by token id."),
    ] = None
    user: Annotated[str | None, Field(description="Names the caller; has no effect on the answer.")] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31, description="0 or -1 keeps all.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=2**31, description="No end before that many tokens.")] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: Annotated[bool | None, Field(description="False shows control tokens in the text.")] = None
    allowed_token_ids: Annotated[TokenIds | None, Field(description="Nothing else is sampled.")] = None
    logprob_token_ids: Annotated[
        TokenIds | None, Field(description="Further tokens whose log-probabilities are wanted, with logprobs.")
    ] = None


class StreamOptions(Parameters):
    include_usage: Annotated[bool | None, Field(description="A last chunk with the usage.")] = None
    include_obfuscation: Annotated[Literal[False] | None, Field(description="Only false: nothing is padded.")] = None


class TextPart(Parameters):
    type: Literal["text"]
    text: str
    cache_control: Annotated[dict[str, Any] | None, Field(description="Prefixes are cached anyway.")] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, Field(description="Prefixes are cached anyway.")] = None


class RefusalPart(Parameters):
    type: Literal["refusal"]
    refusal: str


class MediaPart(Parameters):
    """Refused with a message that says so."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["image_url", "input_audio", "file", "video_url"]


Part = Annotated[TextPart | RefusalPart | MediaPart, Field(discriminator="type")]
Content = str | Annotated[list[Part], Field(min_length=1)]


class SystemMessage(Parameters):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Parameters):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Parameters):
    name: str
    arguments: str


class ToolCall(Parameters):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class AssistantMessage(Parameters):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Annotated[str | None, Field(description="As it was answered; templates decide about it.")] = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None


class ToolMessage(Parameters):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


Messages = Annotated[list[Message], Field(min_length=1)]


class FunctionDefinition(Parameters):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="A JSON schema.")] = None
    strict: Annotated[
        bool | None, Field(description="Arguments keep to the schema, where the model writes calls as JSON.")
    ] = None


class Tool(Parameters):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Parameters):
    name: str


class NamedTool(Parameters):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Parameters):
    type: Literal["text"]


class ObjectFormat(Parameters):
    type: Literal["json_object"]


class SchemaDefinition(Parameters):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: Annotated[bool | None, Field(description="The schema is always kept.")] = None


class SchemaFormat(Parameters):
    type: Literal["json_schema"]
    json_schema: SchemaDefinition


class GrammarDefinition(Parameters):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=1 << 18)]


class GrammarFormat(Parameters):
    type: Literal["grammar"]
    grammar: GrammarDefinition


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Messages
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    n: Annotated[int | None, Field(ge=1, le=64)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=100)] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=512)] = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[Effort | None, Field(description="For templates that have such a switch.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="Variables of the template.")] = None
    continue_final_message: Annotated[bool | None, Field(description="The answer goes on with the last message.")] = (
        None
    )
    modalities: list[Literal["text"]] | None = None
    store: Annotated[Literal[False] | None, Field(description="Only false: nothing is stored.")] = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Annotated[dict[str, str] | None, Field(description="Has no effect on the answer.")] = None
    safety_identifier: Annotated[str | None, Field(description="Has no effect on the answer.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Prefixes are cached anyway.")] = None


TokenPrompt = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Annotated[
        str
        | TokenPrompt
        | Annotated[list[str], Field(min_length=1, max_length=256)]
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=256)],
        Field(description="A text, token ids, or a list of either."),
    ]
    max_tokens: Annotated[int | None, Field(ge=0, le=2**31, description="16 when left out; 0 with echo.")] = None
    n: Annotated[int | None, Field(ge=1, le=64)] = None
    best_of: Annotated[int | None, Field(ge=1, le=64, description="Only the value of n.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=100)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=100, description="Of each token of the prompt.")] = None
    echo: Annotated[bool | None, Field(description="The prompt in front of the text, with its log-probabilities.")] = (
        None
    )
    add_special_tokens: Annotated[bool | None, Field(description="False leaves out the beginning of sequence.")] = None
    response_format: ResponseFormat | None = None
