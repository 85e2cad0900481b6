"""No parameter is ignored in silence: each of the published ones is served or refused by name."""

from pathlib import Path

import anthropic.types.message_count_tokens_params as count_params
import anthropic.types.message_create_params as message_params
import ollama._types as ollama_types
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.embedding_create_params as embedding_params
import openai.types.responses.response_create_params as response_params
import pytest

from metalctl.server.app import ENTRIES
from metalctl.server.parameters import ROUTES, markdown

BY_PATH = {route.path: route for route in ROUTES}
DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"

PUBLISHED = {
    "/v1/chat/completions": chat_params.CompletionCreateParamsBase.__annotations__,
    "/v1/completions": completion_params.CompletionCreateParamsBase.__annotations__,
    "/v1/responses": response_params.ResponseCreateParamsBase.__annotations__,
    "/v1/embeddings": embedding_params.EmbeddingCreateParams.__annotations__,
    "/api/embed": ollama_types.EmbedRequest.model_fields,
    "/v1/messages": message_params.MessageCreateParamsBase.__annotations__,
    "/v1/messages/count_tokens": count_params.MessageCountTokensParams.__annotations__,
    "/api/chat": ollama_types.ChatRequest.model_fields,
    "/api/generate": ollama_types.GenerateRequest.model_fields,
    "/api/chat and /api/generate: options": ollama_types.Options.model_fields,
    "/api/show": ollama_types.ShowRequest.model_fields,
}


@pytest.mark.parametrize("path", PUBLISHED)
def test_every_published_parameter_is_served_or_refused(path):
    assert set(PUBLISHED[path]) - BY_PATH[path].names() == set()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_what_is_refused_is_not_served(route):
    assert set(route.served.model_fields) & set(route.refused) == set()


def test_every_route_with_a_body_is_in_the_table():
    bodies = {entry.body for entry in ENTRIES if entry.body is not None}
    assert bodies == {route.served for route in ROUTES} - {BY_PATH["/api/chat and /api/generate: options"].served}


HELLO = [{"role": "user", "content": "x"}]
VALUES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/generate": {"model": "tiny"},
}


@pytest.mark.parametrize("path", VALUES)
def test_refused_and_unknown_parameters_are_named(tiny, path):
    with tiny.client() as client:
        for name in [*BY_PATH[path].refused, "colour"]:
            answer = client.post(path, json={**VALUES[path], name: {"a": 1}})
            assert answer.status_code == 400
            assert name in answer.text


def test_null_is_a_parameter_that_is_not_given(tiny):
    with tiny.client() as client:
        body = {"prompt": "x", "max_tokens": 1, "suffix": None, "temperature": None, "stop": None}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_documented_tables_are_those_of_the_code():
    assert markdown() in DOCUMENT.read_text(encoding="utf-8"), "python -m metalctl.server.parameters writes them"
