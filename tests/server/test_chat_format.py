# ruff: noqa: E501  (answers are recorded as they came)
"""What models were seen to write, cut at every position: the same pieces come out."""

import json
import random

import pytest
from byte_tokenizer import byte_tokenizer

from metalctl.server.chat_format.formats import ChatFormat
from metalctl.server.chat_format.pieces import Call, Words, joined

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}},
            },
        },
    }
    for name in ("weather", "run")
]
PARIS = ("weather", {"city": "Paris", "days": 2})
ROME = ("weather", {"city": "Rome", "days": 3})
TAG = "{{ tools }}<tool_call>"

# name: (what the template holds, the answer, reasoning, text, calls)
RECORDED = {
    "plain text": (TAG, "Hello <b>you</b>\n\n there ", "", "Hello <b>you</b>\n\n there ", []),
    "hermes": (
        TAG, '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>', "", "", [PARIS],
    ),
    "hermes, text and two calls": (
        TAG,
        'I look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        "", "I look.", [PARIS, ROME],
    ),
    "hermes, reasoning": (
        TAG,
        '<think>\nWhich <tool_call>?\n</think>\n\n<tool_call>{"name":"weather","arguments":{"city":"Paris","days":2}}</tool_call>',
        "Which <tool_call>?", "", [PARIS],
    ),
    "hermes, end marker in a string": (
        TAG, '<tool_call>{"name": "run", "arguments": {"code": "a</tool_call>\\"b"}}</tool_call>', "", "",
        [("run", {"code": 'a</tool_call>"b'})],
    ),
    "hermes, arguments as a string": (
        TAG, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}</tool_call>', "", "",
        [PARIS],
    ),
    "hermes, not JSON": (TAG, "<tool_call>nonsense</tool_call> so", "", "<tool_call>nonsense</tool_call> so", []),
    "hermes, a list for arguments": (
        TAG, '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "",
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', [],
    ),
    "hermes, without an end": (
        TAG, '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}', "", "", [PARIS],
    ),
    "qwen3-coder": (
        "{{ tools }}<tool_call>\n<function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>", "", "", [PARIS],
    ),
    "glm": (
        "{{ tools }}<tool_call><arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>", "", "", [PARIS],
    ),
    "glm, not a call": (
        "{{ tools }}<tool_call><arg_key>", "<tool_call>?</tool_call>", "", "<tool_call>?</tool_call>", [],
    ),
    "mistral, list": (
        "{{ tools }}[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 2}, "id": "abc123456"}]', "", "", [PARIS],
    ),
    "mistral, headers": (
        "{{ tools }}[TOOL_CALLS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}', "", "",
        [PARIS, ROME],
    ),
    "llama 3": (
        "{{ tools }}ipython", '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", "", [PARIS],
    ),
    "llama 3, two": (
        "{{ tools }}<|python_tag|>",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}', "", "", [PARIS, ROME],
    ),
    "llama 3, JSON that is no call": ("{{ tools }}ipython", '{"answer": 1}', "", '{"answer": 1}', []),
    "llama 3, JSON later": ("{{ tools }}ipython", 'So: {"name": "x"}', "", 'So: {"name": "x"}', []),
    "kimi k2": (
        "{{ tools }}<|tool_calls_section_begin|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris", '
        '"days": 2}<|tool_call_end|><|tool_calls_section_end|>', "", "", [PARIS],
    ),
    "kimi k3": (
        "{{ tools }}<|open|>tools<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>'
        'Paris<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>", "", "", [PARIS],
    ),
    "minimax": (
        "{{ tools }}<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">2'
        "</parameter>\n</invoke>\n</minimax:tool_call>", "", "", [PARIS],
    ),
    "gemma 4": (
        "{{ tools }}<|tool_call><tool_call|>", '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>', "", "",
        [PARIS],
    ),
    "gemma 4, thought": (
        "{{ tools }}<|tool_call><tool_call|>", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes.", [],
    ),
    "function gemma": (
        "{{ tools }}<start_function_call>",
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>", "", "", [PARIS],
    ),
    "lfm2": (
        "{{ tools }}<|tool_call_start|>",
        '<|tool_call_start|>[weather(city="Paris", days=2), weather(city="Rome", days=3)]<|tool_call_end|>', "", "",
        [PARIS, ROME],
    ),
    "longcat": (
        "{{ tools }}<longcat_tool_call>",
        "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>", "", "",
        [PARIS],
    ),
    "deepseek v3": (
        "{{ tools }}<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", "", [PARIS],
    ),
    "deepseek v3.1": (
        "{{ tools }}<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 2}<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", "",
        [PARIS, ROME],
    ),
    "nemotron": (
        "{{ tools }}<TOOLCALL>", '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]</TOOLCALL>',
        "", "", [PARIS],
    ),
    "command r": (
        "{{ tools }}<|START_ACTION|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris", "days": 2}}\n]<|END_ACTION|>',
        "Hm.", "", [PARIS],
    ),
    "phi 4": (
        "{{ tools }}<|tool_call|>", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]'
        "<|/tool_call|>", "", "", [PARIS],
    ),
    "granite 3": (
        "{{ tools }}<|tool_call|>", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]', "", "",
        [PARIS],
    ),
    "seed": (
        "{{ tools }}<seed:tool_call>",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>", "Hm.", "", [PARIS],
    ),
    "minicpm5": (
        "{{ tools }}<function name=", '<function name="weather"><param name="city">Paris</param><param name="days">2</param>'
        "</function>", "", "", [PARIS],
    ),
    "muse spark": (
        "{{ tools }}<atem:function_calls>",
        '<atem:function_calls><atem:invoke name="weather"><atem:parameter name="city">Paris</atem:parameter>'
        '<atem:parameter name="days">2</atem:parameter></atem:invoke></atem:function_calls>', "", "", [PARIS],
    ),
    "gpt-oss": (
        "{{ tools }}<|channel|><|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris", "days": 2}', "Hm.", "", [PARIS],
    ),
    "gpt-oss, answer": (
        "{{ tools }}<|channel|><|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is <b>.", "Hm.",
        "It is <b>.", [],
    ),
}  # fmt: skip


def parse(template: str, parts: list[str], cut: bool = False):
    parser = ChatFormat.of(byte_tokenizer(template)).parser("<|im_start|>assistant\n", TOOLS)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined(pieces + parser.finish(cut))


def words(pieces, kind: str) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Words) and piece.kind == kind)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_answer(name):
    template, answer, reasoning, text, calls = RECORDED[name]
    pieces = parse(template, [answer])
    assert words(pieces, "reasoning") == reasoning
    assert words(pieces, "text") == text
    assert [(p.name, json.loads(p.arguments)) for p in pieces if isinstance(p, Call)] == calls


@pytest.mark.parametrize("name", RECORDED)
def test_streamed_is_what_is_not_streamed_at_every_split(name):
    template, answer, *_ = RECORDED[name]
    whole = parse(template, [answer])
    for position in range(len(answer) + 1):
        assert parse(template, [answer[:position], answer[position:]]) == whole, position
    assert parse(template, list(answer)) == whole
    dice = random.Random(name)
    for _ in range(10):
        cuts = sorted(dice.choices(range(len(answer)), k=6))
        parts = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert parse(template, parts) == whole, parts


@pytest.mark.parametrize("name", RECORDED)
def test_answer_that_is_cut_anywhere_makes_up_no_call(name):
    template, answer, _, _, calls = RECORDED[name]
    complete = [json.dumps(arguments) for _, arguments in calls]
    for length in range(len(answer)):
        pieces = parse(template, [answer[:length]], cut=True)
        assert pieces == parse(template, list(answer[:length]), cut=True)
        for piece in pieces:
            if isinstance(piece, Call):
                assert piece.arguments in complete


def test_text_is_not_held_back_longer_than_it_must():
    parser = ChatFormat.of(byte_tokenizer(TAG)).parser("", TOOLS)
    assert parser.feed("Hello") == [Words("text", "Hello")]
    assert parser.feed(" <tool") == []
    assert parser.feed("s> x") == [Words("text", " <tools> x")]


def test_without_tools_nothing_is_taken_for_a_call():
    parser = ChatFormat.of(byte_tokenizer(TAG)).parser("", [])
    answer = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    assert joined(parser.feed(answer) + parser.finish()) == [Words("text", answer)]


def test_reasoning_that_the_prompt_opened():
    parser = ChatFormat.of(byte_tokenizer(TAG)).parser("<|im_start|>assistant\n<think>\n", TOOLS)
    assert joined(parser.feed("Hm.\n</think>\n\nYes") + parser.finish()) == [
        Words("reasoning", "Hm."),
        Words("text", "Yes"),
    ]


def test_markers_that_are_control_tokens_are_asked_for():
    hidden = ChatFormat.of(byte_tokenizer("{{ tools }}[TOOL_CALLS]", special=("<|im_end|>", "[TOOL_CALLS]")))
    assert hidden.hides_markers(with_tools=True)
    assert not hidden.hides_markers(with_tools=False)
    assert not ChatFormat.of(byte_tokenizer(TAG)).hides_markers(with_tools=True)
