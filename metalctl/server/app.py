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
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from metalctl.server import answers, embeddings, system
from metalctl.server.anthropic import messages
from metalctl.server.anthropic.types import CountRequest, MessagesRequest
from metalctl.server.errors import ApiError
from metalctl.server.guard import Guard, GuardOptions, error_response
from metalctl.server.models import ModelManager
from metalctl.server.ollama import chat as ollama_chat
from metalctl.server.ollama import models as ollama_models
from metalctl.server.ollama.types import ChatRequest as OllamaChatRequest
from metalctl.server.ollama.types import GenerateRequest, ShowRequest
from metalctl.server.openai import chat, completions, models, responses
from metalctl.server.openai.response_types import ResponsesRequest
from metalctl.server.openai.types import ChatRequest, CompletionRequest
from metalctl.server.openapi import document
from metalctl.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Entry:
    """A route: the type of the body that it takes, of its answer (None: plain text), and whether it can stream."""

    method: str
    path: str
    handler: Handler
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    group: str = "server"
    streams: bool = False
    may_be_503: bool = False  # with the same answer


async def openapi(_service: Service, _request: Request) -> Response:
    return JSONResponse(document(ENTRIES))


def _openai(path: str, handler: Handler, body: type[BaseModel], answer: type[BaseModel]) -> Entry:
    return Entry("POST", path, handler, answer, body, "OpenAI", streams=True)


def _ollama(path: str, handler: Handler, body: type[BaseModel], answer: type[BaseModel]) -> Entry:
    return Entry("POST", path, handler, answer, body, "Ollama", streams=True)


ENTRIES = (
    Entry("GET", "/v1/models", models.list_models, answers.ModelList, group="OpenAI"),
    Entry("GET", "/v1/models/{name:path}", models.get_model, answers.Model, group="OpenAI"),
    _openai("/v1/chat/completions", chat.chat_completions, ChatRequest, answers.ChatCompletion),
    _openai("/v1/completions", completions.completions, CompletionRequest, answers.TextCompletion),
    Entry(
        "POST",
        "/v1/embeddings",
        embeddings.embeddings,
        embeddings.EmbeddingList,
        embeddings.EmbeddingsRequest,
        "OpenAI",
    ),
    Entry("POST", "/v1/rerank", embeddings.rerank, embeddings.Ranking, embeddings.RerankRequest),
    Entry(
        "POST",
        "/api/embed",
        embeddings.ollama_embed,
        embeddings.OllamaEmbeddings,
        embeddings.OllamaEmbedRequest,
        "Ollama",
    ),
    _openai("/v1/responses", responses.responses, ResponsesRequest, answers.ModelResponse),
    Entry(
        "POST", "/v1/messages", messages.messages, answers.AnthropicMessage, MessagesRequest, "Anthropic", streams=True
    ),
    Entry("POST", "/v1/messages/count_tokens", messages.count_tokens, answers.TokenCount, CountRequest, "Anthropic"),
    _ollama("/api/chat", ollama_chat.chat, OllamaChatRequest, answers.OllamaChat),
    _ollama("/api/generate", ollama_chat.generate, GenerateRequest, answers.OllamaText),
    Entry("GET", "/api/tags", ollama_models.tags, answers.OllamaModels, group="Ollama"),
    Entry("GET", "/api/ps", ollama_models.running, answers.OllamaModels, group="Ollama"),
    Entry("POST", "/api/show", ollama_models.show, answers.OllamaModel, ShowRequest, "Ollama"),
    Entry("GET", "/api/version", ollama_models.version, answers.Version, group="Ollama"),
    Entry("GET", "/", ollama_models.root, None, group="Ollama"),
    Entry("POST", "/tokenize", models.tokenize, answers.Tokens, models.TokenizeRequest),
    Entry("POST", "/detokenize", models.detokenize, answers.Prompt, models.DetokenizeRequest),
    Entry("GET", "/health", system.health, answers.State, may_be_503=True),
    Entry("GET", "/ready", system.ready, answers.State, may_be_503=True),
    Entry("GET", "/metrics", system.metrics, None),
    Entry("GET", "/version", system.version, answers.Version),
    Entry("GET", "/openapi.json", openapi, answers.Answer),
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
