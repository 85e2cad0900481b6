"""OpenAI's own client library, against a random model."""

import asyncio
import json
import threading

import openai
import pytest
from pydantic import BaseModel
from scripted import ScriptedThread
from serving import assert_idle, running, served

HELLO = [{"role": "user", "content": "Hello"}]
WHOLE = {"ignore_eos": True}  # where an answer ends by chance would be no error
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 10}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(tiny):
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def aclient(tiny):
    return lambda: openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="There are: tiny"):
        client.models.retrieve("nobody/else")


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=1)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_stream_says_what_the_whole_answer_says(client):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "seed": 7}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_async_client_streams(aclient):
    async def run():
        client = aclient()
        options = {"max_tokens": 10, "stream": True, "extra_body": WHOLE}
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, **options)
        return [chunk async for chunk in stream]

    assert asyncio.run(run())[-1].choices[0].finish_reason == "length"


def test_many_at_once_say_what_each_says_alone(client, aclient):
    def ask(seed):
        return {"model": "tiny", "messages": HELLO, "max_tokens": 30, "seed": seed}

    alone = [client.chat.completions.create(**ask(seed)).choices[0].message.content for seed in range(8)]

    async def run():
        client = aclient()
        answers = await asyncio.gather(*(client.chat.completions.create(**ask(seed)) for seed in range(8)))
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == alone
    assert len(set(alone)) == 8


def test_choices_differ_and_come_with_a_seed_again(client):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "n": 3, "seed": 3}
    texts = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_logprobs_are_those_of_the_tokens(client):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, "seed": 2}
    options["extra_body"] = WHOLE
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(content) == 6
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [token.logprob for token in streamed] == [token.logprob for token in content]
    assert [token.bytes for token in streamed] == [token.bytes for token in content]


def test_structured_output_is_parsed_into_the_callers_class(client):
    class Person(BaseModel):
        age: int
        tall: bool

    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Person, max_tokens=200, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_regex_and_lark(client):
    def ask(format_, seed=0):
        answer = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=400,
            seed=seed,
            temperature=0.3,
            extra_body={"response_format": format_},
        )
        return answer.choices[0].message.content

    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{3}"}}
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a" | "b"'}}
    assert ask(regex).isdigit()
    assert ask(lark) in ("a", "b")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [{"a": 1}, [None]]}}}
    assert json.loads(ask(schema)) in ({"a": 1}, [None])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_demanded_call_is_made(client, choice):
    options = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 300,
        "seed": 4,
    }
    options["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].finish_reason == "tool_calls"
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert list(json.loads(call.function.arguments)) == ["place"]
    streamed = [c.choices[0].delta.tool_calls for c in client.chat.completions.create(**options, stream=True)]
    (only,) = [calls[0] for calls in streamed if calls]
    assert (only.function.name, only.function.arguments) == (call.function.name, call.function.arguments)


def call_bias(tiny) -> dict[str, float]:
    """What makes a random model begin a call."""
    return {str(tiny.model.tokenizer.backend.token_to_id("<tool_call>")): 100.0}


def test_strict_tool_keeps_to_its_schema_when_the_model_decides_to_call(tiny, client):
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    options = {"model": "tiny", "messages": HELLO, "tools": [tool], "max_tokens": 300, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**options, logit_bias=call_bias(tiny), seed=1)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["place"]
    free = client.chat.completions.create(**{**options, "max_tokens": 30}, seed=1)
    assert free.choices[0].message.content


def test_with_tools_a_structured_answer_may_be_a_call_instead(tiny, client):
    format_ = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "yes|no"}}
    options = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "max_tokens": 20}
    options["extra_body"] = {"response_format": format_}
    texts = {client.chat.completions.create(**options, seed=seed).choices[0].message.content for seed in range(8)}
    assert texts & {"yes", "no"}
    called = client.chat.completions.create(**options, logit_bias=call_bias(tiny), seed=1)
    assert called.choices[0].message.content.startswith("<tool_call>")


def test_schema_of_a_demanded_call_may_refer_to_itself(client):
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}},
            "required": ["leaf"], "additionalProperties": False, "$defs": {"leaf": {"enum": [1, 2]}}}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": tree}} for name in ("a", "b")]
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=900,
        seed=3,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["leaf"] in (1, 2)


def test_completion_echo_and_prompt_logprobs(client):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=2, echo=True, logprobs=2, seed=1)
    choice = answer.choices[0]
    assert choice.text.startswith("abc")
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert len(choice.logprobs.tokens) == 5


def test_scoring_a_prompt_generates_nothing(client):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "abc"
    assert len(answer.choices[0].logprobs.tokens) == 3
    assert answer.usage.completion_tokens == 0


def test_several_prompts_in_every_form(client):
    for prompt in (["ab", "cd"], [[64, 65], [66, 67]]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, n=2, extra_body=WHOLE)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.completion_tokens == 12
    assert client.completions.create(model="tiny", prompt=[64, 65], max_tokens=3).usage.prompt_tokens == 2


def test_completion_stream_says_what_the_whole_says(client):
    options = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 20, "seed": 5, "echo": True, "logprobs": 1}
    whole = client.completions.create(**options)
    texts, tokens = ["", ""], [[], []]
    for chunk in client.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


def test_stop_string_ends_the_answer(client):
    options = {"model": "tiny", "prompt": "x", "max_tokens": 200, "seed": 11}
    text = client.completions.create(**options).choices[0].text
    stop = text[20:22]
    cut = client.completions.create(**options, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "2048"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "messages.0"),
        ({"model": "gpt-99"}, openai.NotFoundError, "There are: tiny"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions is not supported"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour is not a parameter"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"tool_choice": "required"}, openai.BadRequestError, "no tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
         openai.BadRequestError, "nonsense"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "image_url parts are not supported"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(client, changes, error, says):
    with pytest.raises(error, match=says):
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 3, **changes})


def test_refused_parameter_is_named(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert caught.value.param == "suffix"


def test_vanished_client_ends_its_request(tiny, client):
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1500, stream=True)
    next(iter(stream))
    stream.close()
    assert_idle(tiny)


def test_error_in_the_middle_of_a_stream_reaches_the_client():
    with running(lambda spec: served("s", ScriptedThread(RuntimeError("/secret/path broke"))), "s") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError) as caught:
            list(client.chat.completions.create(model="s", messages=HELLO, stream=True))
        assert "secret" not in str(caught.value)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="s", messages=HELLO)
        assert "secret" not in str(caught.value)


def test_api_key_is_demanded():
    from metalctl.server.guard import GuardOptions

    options = GuardOptions(api_keys=("one", "two"))
    with running(lambda spec: served("s", ScriptedThread("hi")), "s", options=options) as server:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="three", max_retries=0).models.list()
        for key in options.api_keys:
            assert openai.OpenAI(base_url=f"{server.url}/v1", api_key=key).models.list().data
        assert server.client().get("/health").status_code == 200


def test_full_queue_is_503_with_retry_after():
    thread = ScriptedThread("hello" * 50)
    thread.pause = 0.02
    with running(lambda spec: served("s", thread, slots=1), "s") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        client.models.list()
        first = threading.Thread(target=lambda: client.chat.completions.create(model="s", messages=HELLO))
        first.start()
        while not thread.prompts:
            threading.Event().wait(0.01)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="s", messages=HELLO)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert server.client().get("/ready").status_code == 503
        assert server.client().get("/health").status_code == 200
        first.join()
        assert server.client().get("/ready").status_code == 200
        assert client.chat.completions.create(model="s", messages=HELLO).choices[0].message.content
