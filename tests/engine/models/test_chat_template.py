"""Templates run in a sandbox, with the names that they expect; broken ones say where."""

import json
from typing import Any

import pytest

from metalctl.engine.errors import CheckpointError, UsageError
from metalctl.engine.models.chat_template import ChatTemplates, default_template

USER = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplates({"default": source}, {"bos_token": "<s>"}).render(messages or (USER,), **variables)


def test_blocks_leave_no_white_space() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_names_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}") == (
        "<s>TrueTrueTrue"
    )
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}a{% endgeneration %}b") == "ab"


def test_json_is_plain() -> None:
    value = {"b": "<é>", "a": [1]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é>", "a": [1]}'
    assert json.loads(render("{{ v | tojson(indent=2) }}", v=value)) == value
    assert render("{{ v | tojson(separators=(',', ':'), sort_keys=true) }}", v=value) == '{"a":[1],"b":"<é>"}'


def test_tools_choose_their_template() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert templates.render([USER]) == "plain"
    assert templates.render([USER], tools=[{}]) == "1 tools"
    assert templates.render([USER], tools=[{}], template="default") == "plain"
    with pytest.raises(UsageError, match="no chat template 'rag'"):
        templates.render([USER], template="rag")


def test_only_template_is_the_default_under_any_name() -> None:
    assert ChatTemplates({"odd": "x"}).render([USER]) == "x"


def test_model_without_template_cannot_chat() -> None:
    with pytest.raises(UsageError, match="no chat template") as caught:
        ChatTemplates({}).render([USER])
    assert caught.value.hint


def test_syntax_error_names_the_line_and_shows_it() -> None:
    with pytest.raises(CheckpointError, match=r"broken at line 3: .*endfor") as caught:
        render("a\n{% for m in messages %}\n{{ m.content }\n{% endfor %}".replace("{{ m.content }", "{% endif %}"))
    assert "'{% endif %}'" in caught.value.message


def test_failure_while_rendering_names_the_line() -> None:
    with pytest.raises(CheckpointError, match="failed at line 2"):
        render("a\n{{ messages[0].content + 1 }}")
    with pytest.raises(CheckpointError, match="failed at line 3: 'nothing' is undefined"):
        render("a\n\n{{ nothing.at_all }}")


def test_template_that_rejects_messages_is_the_users_error() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__name__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_sandbox_holds(source: str) -> None:
    with pytest.raises(CheckpointError):
        render(source)


def test_messages_are_not_changed_by_a_template() -> None:
    message = {"role": "user", "content": "hi"}
    with pytest.raises(CheckpointError):
        render("{{ messages[0].update({'content': 'x'}) }}", message)
    assert message["content"] == "hi"


FAMILIES = {
    "ChatML": (["<|im_start|>", "<|im_end|>"], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    "Llama 3": (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": (
        ["<start_of_turn>", "<end_of_turn>"],
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    ),
    "Phi": (["<|user|>", "<|assistant|>", "<|end|>"], "<|user|>\nhi<|end|>\n<|assistant|>\n"),
    "Mistral": (["[INST]", "[/INST]"], "<s>[INST] hi [/INST]"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_have_a_default(family: str) -> None:
    tokens, expected = FAMILIES[family]
    found = default_template({token: index for index, token in enumerate(tokens)})
    assert found is not None
    assert found[0] == family
    assert render(found[1]) == expected
    two = render(
        found[1], {"role": "system", "content": "be kind"}, USER, {"role": "assistant", "content": "yes"}, USER
    )
    assert two.count("hi") == 2
    assert two.index("be kind") < two.index("hi") < two.index("yes")


def test_unknown_vocabulary_has_no_default() -> None:
    assert default_template({"<a>": 0}) is None
