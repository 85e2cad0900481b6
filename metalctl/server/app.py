"""The application: which path leads where."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from metalctl.server import system
from metalctl.server.anthropic import messages
from metalctl.server.anthropic.types import CountRequest, MessagesRequest
from metalctl.server.errors import ApiError
from metalctl.server.guard import Guard, GuardOptions, error_response
from metalctl.server.models import ModelManager
from metalctl.server.ollama import chat as ollama_chat
from metalctl.server.ollama import models as ollama_models
from metalctl.server.ollama.types import ChatRequest as OllamaChatRequest
from metalctl.server.ollama.types import GenerateRequest, ShowRequest
from metalctl.server.openai import chat, completions, models
from metalctl.server.openai.types import ChatRequest, CompletionRequest
from metalctl.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Entry:
    """A route, and the type of the body that it takes."""

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    group: str = "server"


ENTRIES = (
    Entry("GET", "/v1/models", models.list_models, group="OpenAI"),
    Entry("GET", "/v1/models/{name:path}", models.get_model, group="OpenAI"),
    Entry("POST", "/v1/chat/completions", chat.chat_completions, ChatRequest, "OpenAI"),
    Entry("POST", "/v1/completions", completions.completions, CompletionRequest, "OpenAI"),
    Entry("POST", "/v1/messages", messages.messages, MessagesRequest, "Anthropic"),
    Entry("POST", "/v1/messages/count_tokens", messages.count_tokens, CountRequest, "Anthropic"),
    Entry("POST", "/api/chat", ollama_chat.chat, OllamaChatRequest, "Ollama"),
    Entry("POST", "/api/generate", ollama_chat.generate, GenerateRequest, "Ollama"),
    Entry("GET", "/api/tags", ollama_models.tags, group="Ollama"),
    Entry("GET", "/api/ps", ollama_models.running, group="Ollama"),
    Entry("POST", "/api/show", ollama_models.show, ShowRequest, "Ollama"),
    Entry("GET", "/api/version", ollama_models.version, group="Ollama"),
    Entry("GET", "/", ollama_models.root, group="Ollama"),
    Entry("POST", "/tokenize", models.tokenize, models.TokenizeRequest),
    Entry("POST", "/detokenize", models.detokenize, models.DetokenizeRequest),
    Entry("GET", "/health", system.health),
    Entry("GET", "/ready", system.ready),
    Entry("GET", "/metrics", system.metrics),
    Entry("GET", "/version", system.version),
)


def create_app(manager: ModelManager, options: GuardOptions | None = None) -> Starlette:
    """The ASGI application. It unloads the models when it ends."""
    service = Service(manager)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await manager.close()

    return Starlette(
        routes=[Route(entry.path, _endpoint(service, entry.handler), methods=[entry.method]) for entry in ENTRIES],
        middleware=[Middleware(Guard, options=options or GuardOptions(), metrics=manager.metrics)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


async def _http_error(request: Request, error: Any) -> Response:
    """Of the router: no such path, or not by this method."""
    message = f"there is no {request.method} {request.url.path}." if error.status_code in (404, 405) else error.detail
    failure = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(failure, request.url.path)
