"""GET /v1/models, and text to tokens and back."""

import asyncio
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.server.body import Parameters, read
from metalctl.server.errors import bad_request
from metalctl.server.models import ModelManager, ModelSpec, ServedModel
from metalctl.server.openai.chat import message_of
from metalctl.server.openai.logprobs import token_text
from metalctl.server.openai.types import Messages, Tool
from metalctl.server.prepare import prepare
from metalctl.server.service import Service
from metalctl.server.task import ChatTask


class TokenizeRequest(Parameters):
    """POST /tokenize"""

    model: str | None = None
    prompt: Annotated[str | None, Field(description="A text; or give messages.")] = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: Annotated[bool | None, Field(description="With prompt; true when left out.")] = None
    parse_special: Annotated[bool | None, Field(description="Control tokens in the prompt are recognised.")] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Parameters):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20)]
    skip_special_tokens: bool | None = None


async def list_models(service: Service, _request: Request) -> Response:
    models = [_model(service.manager, spec) for spec in service.manager.specs]
    return JSONResponse({"object": "list", "data": models})


async def get_model(service: Service, request: Request) -> Response:
    return JSONResponse(_model(service.manager, service.manager.find(request.path_params["name"])))


def _model(manager: ModelManager, spec: ModelSpec) -> dict[str, Any]:
    loaded = next((model for model in manager.loaded() if model.name == spec.name), None)
    length = loaded.context_length if loaded else None
    record = {"id": spec.name, "object": "model", "created": spec.created, "owned_by": "metalctl"}
    return {**record, "max_model_len": length, "loaded": loaded is not None}


async def tokenize(service: Service, request: Request) -> Response:
    asked = await read(request, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("give either prompt or messages.", "prompt")
    async with service.manager.use(asked.model) as model:
        ids = await asyncio.to_thread(_tokens, model, asked)
        result = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
        if asked.return_token_strs:
            result["token_strs"] = [token_text(model.tokenizer, token) for token in ids]
        return JSONResponse(result)


async def detokenize(service: Service, request: Request) -> Response:
    asked = await read(request, DetokenizeRequest)
    async with service.manager.use(asked.model) as model:
        limit = model.thread.engine.vocab_size
        if not all(token < limit for token in asked.tokens):
            raise bad_request(f"tokens of this model go from 0 to {limit - 1}.", "tokens")
        skip = bool(asked.skip_special_tokens)
        text = await asyncio.to_thread(model.tokenizer.decode, asked.tokens, skip_special_tokens=skip)
        return JSONResponse({"prompt": text})


def _tokens(model: ServedModel, asked: TokenizeRequest) -> list[int]:
    if asked.messages is None:
        special = asked.add_special_tokens is not False
        text = asked.prompt or ""
        return model.tokenizer.encode(text, add_special_tokens=special, parse_special=bool(asked.parse_special))
    messages = [message_of(message, index) for index, message in enumerate(asked.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or []]
    return prepare(model, ChatTask(messages, tools)).token_ids
