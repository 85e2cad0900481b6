"""Clients that are slow, gone or wrong, and faults inside: one request ends, the server goes on."""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import time

import httpx
import pytest
from scripted import ScriptedThread
from serving import assert_idle, running, served, tiny_engine

from metalctl.server import body, protocol, streaming

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
DEEP = b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"

MALFORMED = {
    "empty": b"",
    "not JSON": b"hello",
    "cut": b'{"messages": [',
    "a list": b"[]",
    "a number": b"1",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "infinity": b'{"messages": [], "temperature": Infinity}',
    "a number beyond all": b'{"messages": [], "temperature": 1e999}',
    "an integer of 10000 digits": b'{"messages": [], "seed": ' + b"9" * 10_000 + b"}",
    "deep nesting": DEEP,
    "deep nesting of objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a null byte": b"\0",
    "a key twice": b'{"messages": [], "messages": []}',
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_malformed_bodies_are_the_clients_fault(tiny, name, path):
    answer = tiny.client().post(path, content=MALFORMED[name])
    assert answer.status_code == 400
    assert "Traceback" not in answer.text
    assert "/work" not in answer.text
    assert len(answer.text) < 1000


WRONG = [
    {"messages": "x"}, {"messages": [1]}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": {"a": 1}}]}, {"messages": {}}, {**CHAT, "temperature": "hot"},
    {**CHAT, "temperature": True}, {**CHAT, "n": 1.5}, {**CHAT, "n": 10**30}, {**CHAT, "max_tokens": -1},
    {**CHAT, "max_tokens": 2**70}, {**CHAT, "seed": 2**70}, {**CHAT, "stop": [""]}, {**CHAT, "stop": {"a": 1}},
    {**CHAT, "stop": ["x"] * 1000}, {**CHAT, "stop": "x" * 1_000_000}, {**CHAT, "stop": ["x" * 10_000] * 64},
    {**CHAT, "logit_bias": {"x": 1}}, {**CHAT, "logit_bias": {"-1": 1}}, {**CHAT, "logit_bias": {"١": 1}},
    {**CHAT, "top_logprobs": 5}, {**CHAT, "tools": [{}]}, {**CHAT, "tools": [{"type": "function", "function": {}}]},
    {**CHAT, "response_format": {"type": "json_schema"}}, {**CHAT, "response_format": "json"},
    {**CHAT, "response_format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}}},
    {**CHAT, "chat_template_kwargs": {"messages": []}}, {**CHAT, "stream_options": {"include_usage": True}},
    {**CHAT, "model": 5}, {**CHAT, "logprob_token_ids": [5000]}, {**CHAT, "allowed_token_ids": [-1]},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_wrong_values_are_the_clients_fault(tiny, wrong):
    answer = tiny.client().post("/v1/chat/completions", json=wrong)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_server_answers_after_all_that(tiny):
    assert tiny.client().post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.fixture
def own():
    """A server of its own, for a test that breaks something inside."""
    with running(lambda spec: served("own", tiny_engine()), "own") as server:
        server.client().post("/tokenize", json={"prompt": "x"})
        yield server


def ask(server, seed=0, **changes):
    return server.client().post("/v1/chat/completions", json={**CHAT, "seed": seed, **changes})


async def ask_all(server, *bodies):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return await asyncio.gather(*(client.post("/v1/chat/completions", json={**CHAT, **body}) for body in bodies))


def test_fault_in_the_sampler_ends_the_request_that_causes_it(own):
    expected = [ask(own, seed).json()["choices"][0]["message"]["content"] for seed in range(4)]
    sampler = own.model.thread.engine.runner.sampler

    def broken(logits, sequences, positions):
        if any(sequence.seed == 666 for sequence in sequences):
            raise RuntimeError("a fault in /some/file.py")
        return sampler(logits, sequences, positions)

    own.model.thread.call(lambda engine: setattr(engine.runner, "sampler", broken))
    answers = asyncio.run(ask_all(own, *({"seed": seed} for seed in (0, 1, 666, 2, 3))))
    bad = answers.pop(2)
    assert bad.status_code == 500
    assert "file.py" not in bad.text
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == expected
    assert ask(own).status_code == 200
    assert_idle(own)


def test_fault_in_a_grammar_ends_its_request(own, monkeypatch):
    compiler = own.model.compiler
    compile_ = compiler.compile

    def broken(grammar, preamble=None):
        compiled = compile_(grammar, preamble)
        compiled.advance = lambda token: 1 / 0
        return compiled

    monkeypatch.setattr(compiler, "compile", broken)
    assert ask(own, response_format={"type": "json_object"}).status_code == 500
    monkeypatch.undo()
    assert ask(own, response_format={"type": "json_object"}).status_code == 200
    assert_idle(own)


def test_fault_in_the_tokenizer_ends_its_request(own, monkeypatch):
    for name in ("encode", "detokenizer"):
        monkeypatch.setattr(own.model.tokenizer, name, lambda *_, **__: 1 / 0)
        assert ask(own).status_code == 500
        monkeypatch.undo()
        assert ask(own).status_code == 200
    assert_idle(own)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_engine_makes_health_fail_and_ends_every_stream(own):
    assert own.client().get("/health").status_code == 200

    def die(_engine):
        raise SystemExit

    with own.client().stream(
        "POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 1500, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        own.model.thread._commands.put(lambda: die(None))
        rest = "\n".join(lines)
    assert '"error"' in rest
    began = time.perf_counter()
    while own.client().get("/health").status_code == 200:
        assert time.perf_counter() - began < 2
        time.sleep(0.02)
    assert own.client().get("/ready").status_code == 503
    assert ask(own).status_code == 503


def test_storm_of_requests_with_vanishing_clients_leaves_nothing_behind(tiny):
    asyncio.run(storm(tiny, total=500, vanishing=0.2))
    assert_idle(tiny)


async def storm(server, total: int, vanishing: float) -> None:
    """Mixed requests at once; every answer that is read to its end must be what it is alone."""
    dice = random.Random(0)
    kinds = [kind_of(index) for index in range(24)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        alone = [await said(client, *kind) for kind in kinds]
        plan = [(index % len(kinds), dice.random() < vanishing, dice.random() * 6) for index in range(total)]

        async def one(kind: int, vanishes: bool, after: float) -> None:
            if not vanishes:
                assert await said(client, *kinds[kind]) == alone[kind], kinds[kind]
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(said(client, *kinds[kind]), after)

        await asyncio.gather(*(one(*entry) for entry in plan))


def kind_of(index: int):
    """A path and a body: four APIs, streamed and not, structured and not."""
    message = [{"role": "user", "content": "a question " * (1 + index % 7)}]
    common = {"seed": index, "max_tokens": 6 + index % 12}
    stream = bool(index % 2)
    if index % 4 == 0:
        return "/v1/completions", {"prompt": "a text " * (1 + index % 5), "stream": stream, "logprobs": 1, **common}
    if index % 4 == 1:
        return "/api/chat", {"model": "tiny", "messages": message, "stream": stream,
                             "options": {"seed": index, "num_predict": 6 + index % 12}}  # fmt: skip
    format_ = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "boolean"}}}}
    structured = {"response_format": format_} if index % 3 == 0 else {}
    return "/v1/chat/completions", {"messages": message, "stream": stream, **common, **structured}


VOLATILE = {"id", "created", "created_at", "usage", "total_duration", "eval_duration", "prompt_eval_duration"}


async def said(client: httpx.AsyncClient, path: str, asked: dict) -> list:
    """What an answer says, without what differs each time."""
    async with client.stream("POST", path, json=asked) as answer:
        text = (await answer.aread()).decode()
        assert answer.status_code == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith((":", "event:"))]
    values = [json.loads(line) for line in lines if line != "[DONE]"]
    return [{key: value for key, value in record.items() if key not in VOLATILE} for record in values]


def test_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE", 0.05)
    thread = ScriptedThread("hello")
    thread.pause = 0.3
    with running(lambda spec: served("s", thread), "s") as server:
        answer = server.client().post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert ": still here" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        message = {**CHAT, "stream": True}
        assert "event: ping" in server.client().post("/v1/messages", json=message).text


def raw_request(server, head: str, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + data)
    return connection


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def test_body_that_never_arrives_is_not_waited_for(tiny, monkeypatch):
    monkeypatch.setattr(body, "READ_TIMEOUT", 0.2)
    with raw_request(tiny, HEAD.format(100), b'{"mess') as connection:
        connection.settimeout(10)
        assert b"408" in connection.recv(1000).split(b"\r\n")[0]


@pytest.mark.parametrize("head", ["", "POST /v1/chat/completions HTTP/1.1\r\nHos"])
def test_connection_that_says_nothing_whole_is_closed(tiny, monkeypatch, head):
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT", 0.2)
    with raw_request(tiny, head) as connection:
        connection.settimeout(10)
        assert connection.recv(1000) == b""
    with raw_request(tiny, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        connection.settimeout(10)
        assert b"200" in connection.recv(1000)
        connection.sendall(b"GET /hea")
        while connection.recv(1000):
            pass


def test_answer_that_takes_long_does_not_look_like_a_silent_connection(monkeypatch):
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT", 0.05)
    thread = ScriptedThread("hello")
    thread.pause = 0.2
    with running(lambda spec: served("s", thread), "s") as server, server.client() as client:
        for _ in range(2):
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_client_that_leaves_before_its_body_is_whole_does_no_harm(tiny):
    for _ in range(20):
        raw_request(tiny, HEAD.format(100), b'{"mess').close()
        raw_request(tiny, "POST /v1/chat/comp").close()
    assert tiny.client().get("/health").status_code == 200


def test_client_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(streaming, "SEND_TIMEOUT", 0.3)
    thread = ScriptedThread("x" * 10_000_000, size=50_000)
    with running(lambda spec: served("s", thread), "s") as server:
        data = json.dumps({"messages": CHAT["messages"], "stream": True}).encode()
        with raw_request(server, HEAD.format(len(data)), data, receive_buffer=4096):
            for _ in itertools.repeat(None, 500):
                if thread.aborted:
                    break
                time.sleep(0.02)
            assert thread.aborted
        assert_idle_queue(server)


def assert_idle_queue(server) -> None:
    for _ in range(100):
        if server.model.taken == 0:
            return
        time.sleep(0.02)
    raise AssertionError("a place in the queue is still taken")
