"""What reaches the model of a request, and how the answer's end is told."""

import json

import pytest
from byte_tokenizer import byte_tokenizer
from scripted import TEMPLATE, ScriptedThread
from serving import running, served

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
HELLO = {"role": "user", "content": "Hello"}
SWITCH = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ enable_thinking }}|{{ reasoning_effort }}"


class Asking:
    """A scripted model behind a server, asked for chats."""

    def __init__(self, thread: ScriptedThread, client):
        self.thread, self._client = thread, client

    def __call__(self, *messages, status: int = 200, **fields):
        answer = self._client.post("/v1/chat/completions", json={"messages": list(messages or [HELLO]), **fields})
        assert answer.status_code == status, answer.text
        return answer.json()["choices"][0] if status == 200 else answer.json()["error"]

    @property
    def prompt(self) -> str:
        return self.thread.prompts[-1]


@pytest.fixture
def asking(request):
    template, special = getattr(request, "param", (TEMPLATE, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")))
    thread = ScriptedThread("fine", tokenizer=byte_tokenizer(template, special=special))
    with running(lambda spec: served("s", thread), "s") as server, server.client() as client:
        yield Asking(thread, client)


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}assistant: ",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
HIDDEN = ("{{ tools }}[TOOL_CALLS]{% for m in messages %}{{ m.content }}{% endfor %}", ("<|im_end|>", "[TOOL_CALLS]"))


@pytest.mark.parametrize("asking", [PLAIN], indirect=True)
def test_model_that_knows_no_tools_is_told_of_them(asking):
    asking.thread.replies = [f"I call. {CALL}"]
    choice = asking({"role": "system", "content": "Be brief."}, HELLO, tools=[TOOL])
    assert asking.prompt.startswith("<|im_start|>system: Be brief.\n\nYou can call functions.")
    assert '{"name": "f", "parameters": {"type": "object"}}' in asking.prompt
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["message"]["content"] == "I call."
    called = {"role": "assistant", "content": None, "tool_calls": choice["message"]["tool_calls"]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    asking(HELLO, called, result, tools=[TOOL])
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in asking.prompt
    assert "user: <tool_response>\n42\n</tool_response>" in asking.prompt


def test_no_tools_are_offered_when_none_may_be_called(asking):
    asking.thread.replies = [CALL]
    choice = asking(tools=[TOOL], tool_choice="none")
    assert "tool f" not in asking.prompt
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


def test_only_one_call_is_made_when_calls_may_not_be_parallel(asking):
    asking.thread.replies = [f"{CALL}\n{CALL} and more"]
    assert len(asking(tools=[TOOL])["message"]["tool_calls"]) == 2
    single = asking(tools=[TOOL], parallel_tool_calls=False)
    assert len(single["message"]["tool_calls"]) == 1
    assert single["message"]["content"] is None
    assert single["finish_reason"] == "tool_calls"
    assert asking.thread.aborted


def test_call_that_the_limit_cuts_is_text_and_says_length(asking):
    asking.thread.replies = [CALL]
    choice = asking(tools=[TOOL], max_tokens=len(CALL) - 3)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:-3]
    assert "tool_calls" not in choice["message"]


def test_parts_are_joined_and_developers_are_systems(asking):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asking({"role": "developer", "content": "Rules."}, {"role": "user", "content": parts})
    assert asking.prompt == "system: Rules.\nuser: one\ntwo\nassistant: "


def test_answer_that_is_begun_goes_on(asking):
    asking(HELLO, {"role": "assistant", "content": "It is"}, continue_final_message=True)
    assert asking.prompt == "user: Hello\nassistant: It is"
    assert "assistant" in asking(HELLO, continue_final_message=True, status=400)["message"]


@pytest.mark.parametrize("asking", [(SWITCH, ("<|im_end|>",))], indirect=True)
def test_effort_sets_the_templates_switch(asking):
    asking(reasoning_effort="high")
    assert asking.prompt == "Hello|True|high"
    asking(reasoning_effort="none")
    assert asking.prompt == "Hello|False|none"
    asking(chat_template_kwargs={"enable_thinking": "maybe"})
    assert asking.prompt == "Hello|maybe|"


def test_effort_without_a_switch_is_refused(asking):
    assert asking(reasoning_effort="high", status=400)["param"] == "reasoning_effort"
    asking(reasoning_effort="none")


@pytest.mark.parametrize("asking", [HIDDEN], indirect=True)
def test_markers_that_are_control_tokens_are_seen_when_there_are_tools(asking):
    asking(tools=[TOOL])
    assert asking.thread.params[-1].skip_special_tokens is False
    asking()
    assert asking.thread.params[-1].skip_special_tokens is True


def test_template_that_refuses_is_the_clients_fault():
    template = "{{ raise_exception('roles must alternate') }}"
    with running(lambda spec: served("s", ScriptedThread("x", tokenizer=byte_tokenizer(template))), "s") as server:
        answer = server.client().post("/v1/chat/completions", json={"messages": [HELLO]})
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]


def test_model_without_a_template_cannot_chat_but_completes():
    with running(lambda spec: served("s", ScriptedThread("x", tokenizer=byte_tokenizer(None))), "s") as server:
        assert server.client().post("/v1/chat/completions", json={"messages": [HELLO]}).status_code == 400
        assert server.client().post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_what_agents_send_is_taken(asking):
    """The fields of Claude Code and of Codex beyond the plain ones."""
    asking.thread.replies = ["done"]
    post = asking._client.post
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    anthropic = {
        "model": "s",
        "max_tokens": 32_000,
        "system": [block],
        "messages": [{"role": "user", "content": [block]}],
        "tools": [
            {"name": "f", "description": "", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
        ],
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
    }
    assert post("/v1/messages?beta=true", json=anthropic).status_code == 200
    responses = {
        "model": "s",
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "tools": [
            {"type": "function", "name": "f", "description": "", "strict": False, "parameters": {"type": "object"}}
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
    }
    assert post("/v1/responses", json=responses).status_code == 200
    assert json.loads(post("/v1/responses", json=responses).text)["output"][0]["content"][0]["text"] == "done"
