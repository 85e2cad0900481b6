"""Request types of Ollama's routes: every field that is declared is served."""

from typing import Annotated, Any, Literal

from pydantic import Field

from metalctl.server.body import Parameters

REFUSED_GENERATE = {
    "suffix": "models complete from the left only.",
    "template": "the model's own template is used; raw: true leaves it out.",
    "context": "send the conversation to /api/chat; its beginning is cached.",
    "images": "images are not supported by this server.",
    "width": "only text is generated.",
    "height": "only text is generated.",
    "steps": "only text is generated.",
}
_STARTUP = "it is settled when the server starts."
REFUSED_OPTIONS = {
    "numa": _STARTUP,
    "num_batch": _STARTUP,
    "num_gpu": _STARTUP,
    "main_gpu": _STARTUP,
    "low_vram": _STARTUP,
    "f16_kv": _STARTUP,
    "logits_all": _STARTUP,
    "vocab_only": _STARTUP,
    "use_mmap": _STARTUP,
    "use_mlock": _STARTUP,
    "embedding_only": _STARTUP,
    "num_thread": _STARTUP,
    "num_keep": "a conversation that is too long is refused, not cut.",
    "repeat_last_n": "penalties look at all tokens.",
    "mirostat": "this sampler is not there.",
    "mirostat_tau": "this sampler is not there.",
    "mirostat_eta": "this sampler is not there.",
    "tfs_z": "this sampler is not there.",
    "typical_p": "this sampler is not there.",
    "penalize_newline": "penalties treat all tokens alike.",
}


KeepAlive = Annotated[
    Annotated[float, Field(ge=-1e15, le=1e15)] | str | None, Field(description="As 300, 5m, or -1 for ever.")
]


class Options(Parameters):
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    presence_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    num_predict: Annotated[int | None, Field(ge=-2, le=2**31, description="-1 and -2: as the context allows.")] = None
    num_ctx: Annotated[int | None, Field(ge=1, le=2**31, description="At most the model's own context.")] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]] | None, Field(max_length=64)] = None


class CalledFunction(Parameters):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class ToolCall(Parameters):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Parameters):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any] | None, Field(max_length=0, description="Not supported.")] = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Parameters):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Parameters):
    type: Literal["function"] = "function"
    function: Function


class Request(Parameters):
    model: str
    stream: Annotated[bool | None, Field(description="True when left out.")] = None
    options: Annotated[dict[str, Any] | None, Field(description="See the table of options.")] = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, Field(description="JSON, or its schema.")] = None
    keep_alive: KeepAlive = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=100)] = None


class ChatRequest(Request):
    """POST /api/chat"""

    messages: list[Message] = []
    tools: Annotated[list[Tool] | None, Field(max_length=512)] = None


class GenerateRequest(Request):
    """POST /api/generate"""

    prompt: str | None = None
    system: str | None = None
    raw: Annotated[bool | None, Field(description="Without the model's template.")] = None


class ShowRequest(Parameters):
    """POST /api/show"""

    model: str | None = None
    name: Annotated[str | None, Field(description="The older name of model.")] = None
    verbose: bool | None = None
