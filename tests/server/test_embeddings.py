"""Embeddings and reranking over HTTP, also through the client library that people use."""

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from serving import Running, running, served, tiny_engine

from metalctl.engine.embedding.embedder import Embedder
from metalctl.engine.embedding.load import load_embedder, load_reranker
from metalctl.engine.embedding.vector_engine import VectorEngine
from metalctl.engine.engine_thread import EngineThread
from metalctl.server.models import Limits, ModelSpec, ServedModel
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.test_embedder import checkpoint

TEXTS = list(tiny.SENTENCES[:5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny.write_sentence_model(root / "vectors", tiny.shapes("bert"), "mean")
    tiny.write(root / "scores", "bert-cross", tiny.shapes("bert-cross"))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    def load(spec: ModelSpec) -> ServedModel:
        if spec.name == "text":
            return served("text", tiny_engine())
        make = load_reranker if spec.name == "scores" else load_embedder
        start = cast(Any, lambda: VectorEngine(make(checkpoint(folder / spec.name)), budget=40))
        return served(spec.name, EngineThread.start(start))

    with running(load, "vectors", "scores", "text", limits=Limits(max_loaded=3)) as it:
        yield it


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return load_embedder(checkpoint(folder / "vectors"))


def post(server: Running, path: str, **body: Any) -> Any:
    with server.client() as client:
        return client.post(path, json=body)


def refused(server: Running, param: str, path: str = "/v1/embeddings", **body: Any) -> str:
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_client_library_gets_the_engines_vectors(server: Running, embedder: Embedder, encoding: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    answer = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=encoding)
    vectors = [entry.embedding for entry in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(cast(str, vector)), "<f4").tolist() for vector in vectors]
    assert np.allclose(vectors, embedder.embed(TEXTS), atol=1e-6)
    assert [entry.index for entry in answer.data] == list(range(5))
    assert answer.usage.prompt_tokens == sum(len(embedder.prepare(text).ids) for text in TEXTS)


def test_the_client_librarys_default_encoding_is_understood(server: Running, embedder: Embedder) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    answer = client.embeddings.create(model="vectors", input="the river", dimensions=7)
    assert np.allclose(answer.data[0].embedding, embedder.embed(["the river"], dimensions=7)[0], atol=1e-6)


def test_token_ids_are_an_input(server: Running, embedder: Embedder) -> None:
    ids = [embedder.prepare(text).ids for text in TEXTS[:2]]
    both = post(server, "/v1/embeddings", input=ids).json()["data"]
    assert np.allclose([entry["embedding"] for entry in both], embedder.embed(TEXTS[:2]), atol=1e-6)
    assert len(post(server, "/v1/embeddings", input=ids[0]).json()["data"]) == 1


def test_prompts_are_chosen_by_name(server: Running, embedder: Embedder) -> None:
    found = post(server, "/v1/embeddings", input="stone", prompt_name="query").json()["data"][0]["embedding"]
    assert np.allclose(found, embedder.embed(["stone"], prompt="query: ")[0], atol=1e-6)


def test_what_is_wrong_is_a_400_that_names_it(server: Running) -> None:
    assert "from 1 to 32" in refused(server, "dimensions", input="a", dimensions=33)
    assert "none" not in refused(server, "prompt_name", input="a", prompt_name="passage")
    message = refused(server, "input", input=["a", "stone " * 40])
    assert "input 1" in message and "42" in message and "24" in message
    assert "0 to" in refused(server, "input", input=[[9999]])
    refused(server, "encoding_format", input="a", encoding_format="int8")
    refused(server, "surprise", input="a", surprise=1)
    refused(server, "model", model="scores", input="a")
    refused(server, "model", "/v1/rerank", model="vectors", query="a", documents=["b"])
    refused(server, "documents", "/v1/rerank", model="scores", query="a", documents=[])


def test_long_texts_can_be_cut(server: Running, embedder: Embedder) -> None:
    text = "stone " * 40
    found = post(server, "/v1/embeddings", input=text, truncate=True).json()["data"][0]["embedding"]
    assert np.allclose(found, embedder.embed([text])[0], atol=1e-6)


def test_requests_at_the_same_time_get_their_own_vectors(server: Running, embedder: Embedder) -> None:
    texts = [f"{word} {'stone ' * (i % 7)}" for i, word in enumerate("abcdefghijklmnop")]
    sizes = [None, 3, 32, 9] * 4
    found: dict[int, list[float]] = {}

    def ask(index: int) -> None:
        body = {"input": texts[index], "dimensions": sizes[index]}
        found[index] = post(server, "/v1/embeddings", **body).json()["data"][0]["embedding"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, text in enumerate(texts):
        expected = embedder.embed([text], dimensions=sizes[index])[0]
        assert np.allclose(found[index], expected, atol=1e-6)


def test_a_model_that_generates_makes_vectors_too(server: Running) -> None:
    answer = post(server, "/v1/embeddings", model="text", input=["abc", "a longer text"], dimensions=8).json()
    lengths = [np.linalg.norm(entry["embedding"]) for entry in answer["data"]]
    assert np.allclose(lengths, 1, atol=1e-5)
    alone = post(server, "/v1/embeddings", model="text", input="abc", dimensions=8).json()
    assert np.allclose(alone["data"][0]["embedding"], answer["data"][0]["embedding"], atol=1e-5)


def test_a_model_of_vectors_does_not_generate(server: Running) -> None:
    answer = post(server, "/v1/completions", model="vectors", prompt="a")
    assert answer.status_code == 400
    assert "does not generate" in answer.json()["error"]["message"]


def test_documents_are_ranked(server: Running, folder: Path) -> None:
    from metalctl.engine.embedding.reranker import score

    documents = ["stone", "the river is the river", "yes", "no"]
    scores = score(load_reranker(checkpoint(folder / "scores")), "the river", documents)
    body = {"model": "scores", "query": "the river", "documents": [*documents[:3], {"text": "no"}]}
    ranking = post(server, "/v1/rerank", **body).json()["results"]
    assert [entry["index"] for entry in ranking] == sorted(range(4), key=lambda index: -scores[index])
    assert np.allclose([entry["relevance_score"] for entry in ranking], sorted(scores, reverse=True), atol=1e-6)
    assert ranking[0]["document"]["text"] == documents[ranking[0]["index"]]
    best = post(server, "/v1/rerank", **body, top_n=2, return_documents=False).json()["results"]
    assert [entry["index"] for entry in best] == [entry["index"] for entry in ranking[:2]]
    assert "document" not in best[0]


def test_ollamas_route_gives_the_same_vectors(server: Running, embedder: Embedder) -> None:
    answer = post(server, "/api/embed", model="vectors", input=TEXTS).json()
    assert np.allclose(answer["embeddings"], embedder.embed(TEXTS), atol=1e-6)


def test_nothing_stays_taken(server: Running) -> None:
    post(server, "/v1/embeddings", input=["a"] * 50).raise_for_status()
    refused(server, "dimensions", input="a", dimensions=33)
    assert [model.taken for model in server.manager.loaded()] == [0] * len(server.manager.loaded())
