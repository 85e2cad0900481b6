"""Ollama's own client library."""

import asyncio
import json

import ollama
import pytest
from byte_tokenizer import byte_tokenizer
from scripted import ScriptedThread
from serving import assert_idle, running, served, tiny_engine

from metalctl.server.models import Limits

HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{{ tools }}<tool_call>{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ enable_thinking }}"


@pytest.fixture
def client(tiny):
    return ollama.Client(tiny.url)


@pytest.fixture
def scripted():
    thread = ScriptedThread("", tokenizer=byte_tokenizer(TEMPLATE))
    with running(lambda spec: served("s", thread), "s") as server:
        yield thread, ollama.Client(server.url)


def test_models_are_listed_and_shown(client):
    assert [model.model for model in client.list().models] == ["tiny"]
    shown = client.show("tiny")
    assert shown.modelinfo["llama.context_length"] == 2048
    assert "tools" in shown.capabilities
    assert [model.name for model in client.ps().models] == ["tiny"]


def test_chat_streams_what_it_says_whole(client):
    options = {"num_predict": 20, "seed": 3}
    whole = client.chat("tiny", HELLO, options=options)
    lines = list(client.chat("tiny", HELLO, options=options, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert lines[-1].done
    assert lines[-1].done_reason == whole.done_reason == "length"
    assert lines[-1].eval_count == 20
    assert whole.total_duration > 0


def test_async_client_generates(tiny):
    async def run():
        answer = await ollama.AsyncClient(tiny.url).generate("tiny:latest", "Hello", options={"num_predict": 5})
        return answer.eval_count

    assert asyncio.run(run()) == 5


def test_tools_and_thinking(scripted):
    thread, client = scripted
    thread.replies = ['<think>Hm.</think>So <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>']
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    answer = client.chat("s", HELLO, tools=[tool], think=True)
    assert answer.message.thinking == "Hm."
    assert answer.message.content == "So"
    assert answer.message.tool_calls[0].function.arguments == {"a": 1}
    assert "True" in thread.prompts[0]
    streamed = [line.message for line in client.chat("s", HELLO, tools=[tool], stream=True)]
    assert [m.tool_calls[0].function.name for m in streamed if m.tool_calls] == ["f"]
    assert "".join(m.thinking or "" for m in streamed) == "Hm."


def test_raw_prompt_has_no_template(scripted):
    thread, client = scripted
    thread.replies = ["x"]
    client.generate("s", "just this", raw=True)
    assert thread.prompts == ["just this"]


def test_no_character_of_a_text_ends_a_line(scripted):
    thread, client = scripted
    thread.replies = ["a\x85b\u2028c\u2029d\x0be\x1cf\r\ng 你好 🙂"]
    said = "".join(line.message.content for line in client.chat("s", HELLO, stream=True))
    assert said == client.chat("s", HELLO).message.content == thread.replies[0]


def test_format(client):
    schema = {"enum": [[1], {"a": None}]}
    answer = client.chat("tiny", HELLO, format=schema, options={"num_predict": 200})
    assert json.loads(answer.message.content) in schema["enum"]


def test_logprobs(client):
    answer = client.chat("tiny", HELLO, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert [len(token.top_logprobs) for token in answer.logprobs] == [2, 2, 2]


def test_keep_alive_of_ages_is_for_ever(client):
    client.generate("tiny", keep_alive=1e14)
    assert client.ps().models[0].expires_at.year == 9999


def test_keep_alive_of_zero_unloads():
    with running(lambda spec: served("s", tiny_engine()), "s", limits=Limits()) as server:
        client = ollama.Client(server.url)
        assert client.generate("s").done_reason == "load"
        assert server.manager.loaded()
        assert client.generate("s", keep_alive=0).done_reason == "unload"
        for _ in range(100):
            if not server.manager.loaded():
                break
            asyncio.run(asyncio.sleep(0.02))
        assert client.ps().models == []
        assert client.chat("s", HELLO, options={"num_predict": 1}).done


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"model": "nobody"}, 404, "There are: tiny"),
        ({"options": {"mirostat": 2}}, 400, "mirostat is not supported"),
        ({"options": {"num_ctx": 10**6}}, 400, "holds 2048"),
        ({"options": {"num_ctx": 2}}, 400, "num_ctx is 2"),
        ({"options": {"colour": 1}}, 400, "colour"),
        ({"keep_alive": "soon"}, 400, "not a time"),
        ({"keep_alive": 1e300}, 400, "keep_alive"),
        ({"think": True}, 400, "reasoning"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
    ],
)
def test_what_is_wrong_is_said(client, changes, status, says):
    with pytest.raises(ollama.ResponseError, match=says) as caught:
        client.chat(**{"model": "tiny", "messages": HELLO, **changes})
    assert caught.value.status_code == status


def test_error_in_the_middle_of_a_stream_reaches_the_client(scripted):
    thread, client = scripted
    thread.replies = [RuntimeError("/secret/path")]
    with pytest.raises(ollama.ResponseError) as caught:
        list(client.chat("s", HELLO, stream=True))
    assert "secret" not in str(caught.value)


def test_vanished_client_ends_its_request(tiny, client):
    stream = client.chat("tiny", HELLO, stream=True)
    next(stream)
    stream.close()
    assert_idle(tiny)
