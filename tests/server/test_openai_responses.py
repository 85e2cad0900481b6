"""The responses route, by OpenAI's own client library."""

import asyncio
import json

import openai
import pytest
from byte_tokenizer import byte_tokenizer
from pydantic import BaseModel
from scripted import TEMPLATE, ScriptedThread
from serving import assert_idle, running, served

TOOL = {"type": "function", "name": "weather", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
    "additionalProperties": False}}  # fmt: skip


def client_of(server, kind=openai.OpenAI):
    return kind(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(tiny):
    return client_of(tiny)


@pytest.fixture
def scripted():
    thread = ScriptedThread("", tokenizer=byte_tokenizer(TEMPLATE))
    with running(lambda spec: served("s", thread), "s") as server:
        yield thread, client_of(server)


def test_response(client):
    answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=9, instructions="Be brief.")
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 9
    assert answer.output[0].role == "assistant"


def test_stream_builds_what_the_whole_answer_is(scripted):
    thread, client = scripted
    thread.replies = ['<think>Hm.</think>I look. <tool_call>{"name": "weather", "arguments": {"n": 1}}</tool_call>']
    options = {"model": "s", "input": "Hello", "tools": [TOOL]}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    for answer in (whole, final):
        assert answer.status == "completed"
        assert answer.output[0].content[0].text == "Hm."
        assert answer.output_text == "I look."
        assert json.loads(answer.output[2].arguments) == {"n": 1}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == "I look."
    assert whole.usage.output_tokens_details.reasoning_tokens == 3


def test_items_become_the_conversation(scripted):
    thread, client = scripted
    thread.replies = ["done"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"p": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]  # fmt: skip
    client.responses.create(model="s", input=items, tools=[TOOL])
    assert thread.prompts[0] == (
        "tool weather\nuser: Hello\n"
        'assistant: I look. <tool_call>{"name": "weather", "arguments": {"p": 1}}</tool_call>\n'
        "tool: rain\nassistant: "
    )


def test_output_can_be_sent_back_as_input(scripted):
    thread, client = scripted
    thread.replies = ['<think>Hm.</think>I look. <tool_call>{"name": "weather", "arguments": {"n": 1}}</tool_call>']
    first = client.responses.create(model="s", input="Hello", tools=[TOOL])
    items = [{"role": "user", "content": "Hello"}, *[item.model_dump(exclude_none=True) for item in first.output]]
    items.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"})
    client.responses.create(model="s", input=items, tools=[TOOL])
    assert "tool: rain" in thread.prompts[1]


def test_structured_output_is_parsed_into_the_callers_class(client):
    class Answer(BaseModel):
        yes: bool

    answer = client.responses.parse(model="tiny", input="Hello", text_format=Answer, max_output_tokens=200)
    assert isinstance(answer.output_parsed, Answer)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_demanded_call_is_made(client, choice):
    answer = client.responses.create(
        model="tiny", input="x", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=300
    )
    (call,) = answer.output
    assert call.name == "weather"
    assert 0 <= json.loads(call.arguments)["n"] <= 9


def test_async_client_streams(tiny):
    async def run():
        stream = await client_of(tiny, openai.AsyncOpenAI).responses.create(
            model="tiny", input="Hello", max_output_tokens=5, stream=True
        )
        return [event.type async for event in stream]

    kinds = asyncio.run(run())
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image parts"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
    ],
)
def test_what_is_wrong_is_said(client, changes, says):
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(**{"model": "tiny", "input": "x", **changes})


def test_error_in_the_middle_of_a_stream_reaches_the_client(scripted):
    thread, client = scripted
    thread.replies = [RuntimeError("/secret/path")]
    last = list(client.responses.create(model="s", input="x", stream=True))[-1]
    assert last.type == "response.failed"
    assert "secret" not in last.response.error.message


def test_vanished_client_ends_its_request(tiny, client):
    stream = client.responses.create(model="tiny", input="x", stream=True)
    next(iter(stream))
    stream.close()
    assert_idle(tiny)
