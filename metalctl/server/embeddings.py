"""POST /v1/embeddings, /v1/rerank and Ollama's /api/embed."""

import asyncio
import base64
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.app import Invocation
from metalctl.engine.embedding.batches import batches
from metalctl.engine.embedding.embedder import Embedder, NotFiniteError, Tokens
from metalctl.engine.embedding.load import (
    embedder_of,
    load_embedder,
    load_reranker,
    makes_vectors_only,
    scores_pairs,
)
from metalctl.engine.embedding.pooling import Vector
from metalctl.engine.embedding.reranker import Reranker
from metalctl.engine.embedding.vector_engine import VectorEngine
from metalctl.engine.engine_thread import EngineThread
from metalctl.engine.errors import ContextLengthError, UsageError
from metalctl.engine_start import find_model, kernel_cache
from metalctl.server.answers import Answer
from metalctl.server.body import Parameters, read
from metalctl.server.durations import keep_alive
from metalctl.server.errors import ApiError, bad_request
from metalctl.server.models import ModelSpec, ServedModel
from metalctl.server.ollama.types import KeepAlive
from metalctl.server.service import Service
from metalctl.server.streaming import until_disconnect

if TYPE_CHECKING:
    from metalctl.engine.llm_engine import LLMEngine

MAX_INPUTS = 2048

_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


class EmbeddingsRequest(Parameters):
    """POST /v1/embeddings: OpenAI's parameters, then further ones."""

    input: Annotated[
        str | _Texts | _Ids | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_INPUTS)],
        Field(description="A text, token ids, or a list of either."),
    ]
    model: Annotated[str | None, Field(description="A name from /v1/models; the first when left out.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="base64 is that of little-endian float32.")
    ] = None
    dimensions: Annotated[int | None, Field(ge=1, description="Keep so many numbers of each vector.")] = None
    user: Annotated[str | None, Field(description="Names the caller; has no effect on the answer.")] = None
    prompt_name: Annotated[str | None, Field(description="One of the model's own prompts, such as query.")] = None
    normalize: Annotated[bool | None, Field(description="Length one, or not; left out, the model says.")] = None
    truncate: Annotated[bool | None, Field(description="Cut texts that are too long instead of refusing them.")] = None


class Document(Parameters):
    text: str


class RerankRequest(Parameters):
    """POST /v1/rerank, as Jina and Cohere have it."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    model: Annotated[str | None, Field(description="A name from /v1/models; the first when left out.")] = None
    top_n: Annotated[int | None, Field(ge=1, description="Only the best so many; all when left out.")] = None
    return_documents: Annotated[bool | None, Field(description="False leaves the texts out of the answer.")] = None
    instruction: Annotated[str | None, Field(description="What counts as an answer, for models that ask.")] = None


class OllamaEmbedRequest(Parameters):
    """POST /api/embed"""

    model: str
    input: str | _Texts
    truncate: Annotated[bool | None, Field(description="Cut texts that are too long; false refuses them.")] = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    keep_alive: KeepAlive = None
    options: Annotated[dict[str, Any] | None, Field(max_length=0, description="Has none.")] = None


class EmbeddingRecord(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    object: Literal["list"]
    data: list[EmbeddingRecord]
    model: str
    usage: EmbeddingUsage


class RerankResult(Answer):
    index: int
    relevance_score: float


class Ranking(Answer):
    id: str
    model: str
    results: list[RerankResult]


class OllamaEmbeddings(Answer):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


# -- routes


async def embeddings(service: Service, request: Request) -> Response:
    asked = await read(request, EmbeddingsRequest)
    given: Any = asked.input
    inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    async with _used(service, asked.model) as model:
        maker = _embedder(model)
        _check_dimensions(maker, asked.dimensions)
        _check_ids(model, inputs)
        prompt = _named_prompt(maker, asked.prompt_name)
        prepared = asyncio.to_thread(_prepare_all, maker, inputs, prompt, bool(asked.truncate))
        items, found = await until_disconnect(request, _made(model, prepared))
        vectors = [_finished(maker, index, one, asked) for index, one in enumerate(found)]
        form: Callable[[Vector], Any] = _base64 if asked.encoding_format == "base64" else _numbers
        data = [{"object": "embedding", "index": i, "embedding": form(vector)} for i, vector in enumerate(vectors)]
        tokens = sum(len(item.ids) for item in items)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


async def rerank(service: Service, request: Request) -> Response:
    asked = await read(request, RerankRequest)
    texts = [entry if isinstance(entry, str) else entry.text for entry in asked.documents]
    async with _used(service, asked.model) as model:
        maker = _reranker(model)
        prepared = asyncio.to_thread(lambda: [maker.prepare(asked.query, text, asked.instruction) for text in texts])
        items, found = await until_disconnect(request, _made(model, prepared))
        scores = [maker.finish(vector) for vector in found]
        order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: asked.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if asked.return_documents is not False:
            for record in results:
                record["document"] = {"text": texts[record["index"]]}
        usage = {"total_tokens": sum(len(item.ids) for item in items)}
        return JSONResponse(
            {"id": f"rerank-{secrets.token_hex(12)}", "model": model.name, "results": results, "usage": usage}
        )


async def ollama_embed(service: Service, request: Request) -> Response:
    asked = await read(request, OllamaEmbedRequest)
    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    async with _used(service, asked.model, keep_alive(asked.keep_alive)) as model:
        maker = _embedder(model)
        _check_dimensions(maker, asked.dimensions)
        prepared = asyncio.to_thread(_prepare_all, maker, inputs, maker.prompt(), asked.truncate is not False)
        items, found = await until_disconnect(request, _made(model, prepared))
        vectors = [_numbers(maker.finish(vector, asked.dimensions, True)) for vector in found]
        count = sum(len(item.ids) for item in items)
        return JSONResponse({"model": model.name, "embeddings": vectors, "prompt_eval_count": count})


# -- making vectors


@asynccontextmanager
async def _used(service: Service, name: str | None, keep_alive: float | None = None) -> AsyncIterator[ServedModel]:
    """The model, with one place in its queue taken."""
    async with service.manager.use(name, keep_alive) as model:
        model.take(1)
        try:
            yield model
        finally:
            model.give_back(1)


async def _made(model: ServedModel, prepared: Any) -> tuple[list[Tokens], list[Vector]]:
    items: list[Tokens] = await prepared
    engine: Any = model.thread.engine
    if isinstance(engine, VectorEngine):
        future = await asyncio.to_thread(model.thread.call, lambda _: engine.add(items))
        return items, await asyncio.wrap_future(future)
    maker = _embedder(model)
    found: list[Vector | None] = [None] * len(items)
    for indices in batches([len(item.ids) for item in items], engine.config.max_num_batched_tokens):
        batch = [items[index] for index in indices]
        made = await asyncio.to_thread(model.thread.call, _computing(maker, batch))
        for index, vector in zip(indices, made, strict=True):
            found[index] = vector
    return items, [vector for vector in found if vector is not None]


def _computing(maker: Embedder, batch: Sequence[Tokens]) -> "Callable[[LLMEngine], list[Vector]]":
    return lambda _: maker.compute(batch)


_embedders: "weakref.WeakKeyDictionary[LLMEngine, Embedder]" = weakref.WeakKeyDictionary()


def _embedder(model: ServedModel) -> Embedder:
    """The embedder of a model: its own, or one over a model that generates."""
    engine: Any = model.thread.engine
    if isinstance(engine, VectorEngine):
        if isinstance(engine.maker, Embedder):
            return engine.maker
        raise bad_request(f"{model.name} scores documents and makes no vectors; see /v1/rerank.", "model")
    if engine not in _embedders:
        _embedders[engine] = embedder_of(engine.loaded)
    return _embedders[engine]


def _reranker(model: ServedModel) -> Reranker:
    engine: Any = model.thread.engine
    if isinstance(engine, VectorEngine) and not isinstance(engine.maker, Embedder):
        return engine.maker
    raise bad_request(f"{model.name} does not score documents: it is no reranker.", "model")


def _prepare_all(maker: Embedder, inputs: Sequence[str | Sequence[int]], prompt: str, truncate: bool) -> list[Tokens]:
    items = []
    for index, text in enumerate(inputs):
        try:
            items.append(maker.prepare(text, prompt, truncate=truncate))
        except ContextLengthError as error:
            message = f"input {index}: {error.message}"
            raise ApiError(400, message, "input", "context_length_exceeded") from error
        except UsageError as error:
            raise bad_request(f"input {index}: {error.message}", "input") from error
    return items


def _finished(maker: Embedder, index: int, vector: Vector, asked: EmbeddingsRequest) -> Vector:
    try:
        return maker.finish(vector, asked.dimensions, asked.normalize)
    except NotFiniteError as error:
        raise ApiError(500, f"input {index}: {error.message}", "input", error.type) from error


def _check_dimensions(maker: Embedder, dimensions: int | None) -> None:
    try:
        maker.check_dimensions(dimensions)
    except UsageError as error:
        raise bad_request(error.message, "dimensions") from error


def _named_prompt(maker: Embedder, name: str | None) -> str:
    try:
        return maker.prompt(name)
    except UsageError as error:
        raise bad_request(f"{error.message} {error.hint}", "prompt_name") from error


def _check_ids(model: ServedModel, inputs: Sequence[str | Sequence[int]]) -> None:
    limit = model.thread.engine.vocab_size
    if any(not isinstance(entry, str) and max(entry) >= limit for entry in inputs):
        raise bad_request(f"tokens of this model go from 0 to {limit - 1}.", "input")


def _numbers(vector: Vector) -> list[float]:
    return [float(str(value)) for value in vector]


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# -- loading


def served_vectors(invocation: Invocation, spec: ModelSpec, slots: int, trust_remote_code: bool) -> ServedModel | None:
    """The model, loaded, if it is one that makes vectors or scores; None: it generates text. Raises as loading does."""
    checkpoint = find_model(invocation, spec.reference)
    scores = scores_pairs(checkpoint)
    if not scores and not makes_vectors_only(checkpoint):
        return None

    def load() -> VectorEngine:
        from metalctl.engine import acceleration

        acceleration.prepare(kernel_cache(), invocation.output.note)
        maker: Embedder | Reranker = (load_reranker if scores else load_embedder)(
            checkpoint, trust_remote_code=trust_remote_code
        )
        for note in maker.notes:
            invocation.output.detail(note)
        return VectorEngine(maker)

    # The thread asks of an engine no more than a VectorEngine has.
    thread = EngineThread.start(cast("Callable[[], LLMEngine]", load))
    return ServedModel(spec.name, thread, {}, slots, thread.close, checkpoint.size)
