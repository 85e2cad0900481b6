"""Anthropic's own client library."""

import asyncio
import json

import anthropic
import pytest
from byte_tokenizer import byte_tokenizer
from scripted import TEMPLATE, ScriptedThread
from serving import assert_idle, running, served

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"name": "weather", "description": "Of a place.", "input_schema": {"type": "object", "maxProperties": 0}}]


def client_of(server, kind=anthropic.Anthropic):
    return kind(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def client(tiny):
    return client_of(tiny)


@pytest.fixture
def scripted():
    """A server whose model says what the test tells it to."""
    thread = ScriptedThread("", tokenizer=byte_tokenizer(TEMPLATE))
    with running(lambda spec: served("s", thread), "s") as server:
        yield thread, client_of(server)


def ask(client, **changes):
    return client.messages.create(**{"model": "s", "messages": HELLO, "max_tokens": 500, **changes})


def test_message(client):
    answer = ask(client, model="tiny", max_tokens=12)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens == 12


def test_stream_says_what_the_whole_answer_says(scripted):
    thread, client = scripted
    thread.replies = ['<think>Hm.</think>I look. <tool_call>{"name": "weather", "arguments": {"a": "é"}}</tool_call>']
    whole = ask(client, tools=TOOLS)
    with client.messages.stream(model="s", messages=HELLO, max_tokens=500, tools=TOOLS) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[0].thinking == "Hm."
        assert answer.content[1].text == "I look."
        assert answer.content[2].input == {"a": "é"}
        assert answer.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_async_client_streams(tiny):
    async def run():
        async with client_of(tiny, anthropic.AsyncAnthropic) as client:
            options = {"model": "tiny", "messages": HELLO, "max_tokens": 10}
            return [event.type async for event in await client.messages.create(**options, stream=True)]

    kinds = asyncio.run(run())
    assert (kinds[0], kinds[1], kinds[-1]) == ("message_start", "content_block_start", "message_stop")


def test_conversation_with_tools_reaches_the_template(scripted):
    thread, client = scripted
    thread.replies = ["done"]
    messages = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"p": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "and?"},
        ]},
    ]  # fmt: skip
    ask(client, messages=messages, system=[{"type": "text", "text": "Be brief."}], tools=TOOLS)
    assert thread.prompts[0] == (
        "tool weather\nsystem: Be brief.\nuser: Hello\n"
        'assistant: I look. <tool_call>{"name": "weather", "arguments": {"p": 1}}</tool_call>\n'
        "tool: rain\nuser: and?\nassistant: "
    )


def test_answer_that_is_begun_goes_on(scripted):
    thread, client = scripted
    thread.replies = ["more"]
    ask(client, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert thread.prompts[0] == "user: Hello\nassistant: It is"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_demanded_call_is_made(client, choice):
    tools = [{"name": "weather", "input_schema": {
        "type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
        "additionalProperties": False}}]  # fmt: skip
    choice = {**choice, "disable_parallel_tool_use": True}
    answer = ask(client, model="tiny", tools=tools, tool_choice=choice, max_tokens=300)
    assert answer.stop_reason == "tool_use"
    assert 0 <= answer.content[0].input["n"] <= 9


def test_structured_output(client):
    format_ = {"type": "json_schema", "schema": {"enum": [{"a": 1}]}}
    answer = ask(client, model="tiny", output_config={"format": format_}, max_tokens=300)
    assert json.loads(answer.content[0].text) == {"a": 1}


def test_stop_sequence_is_named(tiny):
    with running(lambda spec: served("s", ScriptedThread("x")), "s") as server:
        assert ask(client_of(server)).stop_reason == "end_turn"
    client = client_of(tiny)
    answer = ask(client, model="tiny", stop_sequences=["e", "a", "\x05", "1", "k"], max_tokens=1000)
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in ("e", "a", "\x05", "1", "k")


def test_tokens_are_counted_as_the_answer_counts_them(client):
    count = client.messages.count_tokens(model="tiny", messages=HELLO, tools=TOOLS)
    answer = ask(client, model="tiny", tools=TOOLS, max_tokens=1)
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_more_than_the_context_holds_is_taken_off(client):
    answer = ask(client, model="tiny", max_tokens=5000, stop_sequences=["e"])
    assert answer.usage.output_tokens < 2048


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "There are: tiny"),
        ({"extra_body": {"temperature": 2.0}}, anthropic.BadRequestError, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, anthropic.BadRequestError, "context holds 2048"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         anthropic.BadRequestError, "image blocks are not supported"),
        ({"extra_body": {"mcp_servers": []}}, anthropic.BadRequestError, "mcp_servers is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "tools.0"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError, "not among"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(client, changes, error, says):
    with pytest.raises(error, match=says):
        ask(client, **{"model": "tiny", "max_tokens": 3, **changes})


def test_error_in_the_middle_of_a_stream_reaches_the_client(scripted):
    thread, client = scripted
    thread.replies = [RuntimeError("/secret/path")]
    with pytest.raises(anthropic.APIError) as caught:
        list(ask(client, stream=True))
    assert "secret" not in str(caught.value)


def test_vanished_client_ends_its_request(tiny, client):
    stream = ask(client, model="tiny", max_tokens=1500, stream=True)
    next(iter(stream))
    stream.close()
    assert_idle(tiny)
