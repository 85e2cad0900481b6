"""Keys, hosts, origins and sizes, and what the log and error bodies keep to themselves."""

import json
import logging

import pytest
from scripted import ScriptedThread
from serving import running, served

from metalctl.server.guard import GuardOptions

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def server_with(**options):
    return running(lambda spec: served("s", ScriptedThread("hi")), "s", options=GuardOptions(**options))


@pytest.fixture(scope="module")
def keyed():
    with server_with(api_keys=("first", "second")) as server:
        yield server


@pytest.mark.parametrize("header", [{"authorization": "Bearer second"}, {"x-api-key": "first"}])
def test_either_header_carries_the_key(keyed, header):
    assert keyed.client().get("/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize(
    "header",
    [{}, {"authorization": "Bearer firs"}, {"authorization": "Basic first"}, {"x-api-key": "ä".encode("latin-1")}],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/api/tags", "/metrics", "/nowhere"])
def test_without_a_right_key_nothing_is_told(keyed, header, path):
    answer = keyed.client().get(path, headers=header)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_health_and_readiness_need_no_key(keyed):
    assert keyed.client().get("/health").json() == {"status": "ok"}
    assert keyed.client().get("/ready").json() == {"status": "ready"}


def test_an_empty_key_cannot_be_set():
    with pytest.raises(ValueError, match="empty"):
        GuardOptions(api_keys=("",))


def test_foreign_host_names_are_turned_away():
    with server_with(hosts=frozenset({"localhost", "127.0.0.1", "::1"})) as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
            assert server.client().get("/v1/models", headers={"host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000"):
            assert server.client().get("/v1/models", headers={"host": host}).status_code == 403


def test_web_pages_are_let_in_only_when_they_are_named():
    asked = {"origin": "https://a.example", "access-control-request-headers": "authorization"}
    with server_with() as server:
        assert "access-control-allow-origin" not in server.client().get("/v1/models", headers=asked).headers
        assert server.client().options("/v1/models", headers=asked).status_code == 405
    with server_with(origins=frozenset({"https://a.example"})) as server:
        answer = server.client().options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        answer = server.client().get("/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in answer.headers
        broken = server.client().post("/v1/chat/completions", content=b"{", headers=asked)
        assert broken.headers["access-control-allow-origin"] == "https://a.example"


def test_large_bodies_are_refused_declared_or_not():
    with server_with(max_body=1000) as server, server.client() as client:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
        declared = client.post("/v1/chat/completions", content=body)
        streamed = client.post("/v1/chat/completions", content=iter([body[:900], body[900:]]))
        assert (declared.status_code, streamed.status_code) == (413, 413)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_unknown_paths_and_methods_have_bodies_like_other_errors():
    with server_with() as server, server.client() as client:
        assert "message" in client.get("/v1/nowhere").json()["error"]
        assert client.get("/v1/messages").json()["type"] == "error"
        assert isinstance(client.get("/api/chat").json()["error"], str)
        assert client.get("/v1/chat/completions").status_code == 405


def test_log_says_what_happened_and_not_what_was_asked(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("metalctl.server"), "propagate", True)
    caplog.set_level(logging.INFO, logger="metalctl.server")
    with server_with() as server, server.client() as client:
        words = {"messages": [{"role": "user", "content": "my secret words"}]}
        assert client.post("/v1/chat/completions", json=words).status_code == 200
        assert client.post("/v1/chat/completions", json={**words, "colour": "my secret words"}).status_code == 400
        client.get("/v1/evil%0a%1b[31mpath")
    thread = ScriptedThread(ValueError("my secret words"))
    with running(lambda spec: served("s", thread), "s") as server:
        assert server.client().post("/v1/chat/completions", json=CHAT).status_code == 500
    records = [record.getMessage() for record in caplog.records if record.name == "metalctl.server"]
    assert any(" POST /v1/chat/completions 200" in record for record in records)
    assert any("a request failed: ValueError at" in record for record in records)
    assert not any("secret" in record or record == "hi" for record in records)
    assert not any("\n" in record or "\x1b" in record for record in records)
