"""The conversation in a real terminal: typing, interrupting, leaving."""

import json
import os
import sys
from pathlib import Path

from terminal import Terminal

from metalctl.repl.conversation import last_conversation, load

FAKE = [sys.executable, str(Path(__file__).parent / "fakes.py")]


def talk(*arguments: str, replies: list[str], delay: str = "0", **variables: str) -> Terminal:
    path = str(Path(__file__).parent)
    environment = {"PYTHONPATH": path, "FAKE_REPLIES": json.dumps(replies), "FAKE_DELAY": delay, **variables}
    return Terminal([*FAKE, "chat", *arguments], os.environ | environment)


def test_an_answer_is_rendered_and_the_next_prompt_follows() -> None:
    with talk("smollm2", replies=["A **bold** word", "Bye."]) as terminal:
        terminal.expect(">>> ")
        terminal.type("hi\r")
        terminal.expect("A bold word")
        terminal.expect(">>> ")
        assert "\x1b[1mbold" in terminal.raw
        terminal.type("thanks\r")
        terminal.expect("Bye.")
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_keeps_what_it_said() -> None:
    with talk("smollm2", replies=["word " * 2000, "Second answer"], delay="0.01") as terminal:
        terminal.expect(">>> ")
        terminal.type("hi\r")
        terminal.expect("word word word")
        terminal.type("\x03")
        terminal.expect("Stopped")
        terminal.expect(">>> ")
        terminal.type("go on\r")
        terminal.expect("Second answer")
        terminal.expect(">>> ")
        terminal.type("/bye\r")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
    messages = load(last_conversation()).messages
    assert messages[1].content.startswith("word word")
    assert len(messages[1].content) < 5000
    assert messages[3].content == "Second answer"


def test_keys_typed_during_an_answer_wait_for_the_next_prompt() -> None:
    with talk("smollm2", replies=["word " * 100, "Second answer"], delay="0.01") as terminal:
        terminal.expect(">>> ")
        terminal.type("hi\r")
        terminal.expect("word word word")
        terminal.type("typed ahead")
        terminal.expect(">>> ")
        answer = terminal.text.partition("word")[2].rpartition(">>>")[0]
        assert "typed" not in answer
        terminal.expect("typed ahead")
        terminal.type("\r")
        terminal.expect("Second answer")
        terminal.expect(">>> ")
    assert load(last_conversation()).messages[2].content == "typed ahead"


def test_ctrl_c_before_the_first_word_takes_the_message_back() -> None:
    with talk("smollm2", replies=["never said", "Second answer"], delay="1000") as terminal:
        terminal.expect(">>> ")
        terminal.type("hi\r")
        terminal.expect("reading the prompt")
        terminal.type("\x03")
        terminal.expect("Stopped.")
        terminal.expect(">>> ")
        terminal.type("\x03")
        terminal.expect("Ctrl-C again")
        terminal.expect(">>> ")
        terminal.type("\x03")
        assert terminal.wait() == 0
    assert not last_conversation().exists()


def test_continue_tells_where_the_conversation_stood() -> None:
    with talk("smollm2", "the first question", replies=["First answer"]) as terminal:
        terminal.expect("First answer")
        assert terminal.wait() == 0
    with talk("-c", replies=["Second answer"]) as terminal:
        terminal.expect("Going on after 2 messages; you had said: the first question")
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_the_starter_is_offered_when_no_model_is_named() -> None:
    with talk(replies=["yes"]) as terminal:
        terminal.expect("smollm2 is the starter")
        terminal.expect("[Y/n]")
        terminal.type("\r")
        terminal.expect("smollm2, 10000 tokens of context")
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    with talk(replies=["yes"]) as terminal:
        terminal.expect("[Y/n]")
        terminal.type("n\r")
        terminal.expect("no model was named")
        assert terminal.wait() == 2


def test_reasoning_is_dim_and_apart_from_the_answer() -> None:
    with talk("smollm2", "hi", replies=["<think>\nLet me see.\n</think>\n\nParis."]) as terminal:
        terminal.expect("Let me see.\n\nParis.\n")
        assert terminal.wait() == 0
        assert "\x1b[2mLet\x1b[0m\x1b[2m me" in terminal.raw


def test_no_color_is_honoured() -> None:
    with talk("smollm2", "hi", replies=["`code` in **bold**"], NO_COLOR="1") as terminal:
        terminal.expect("code in bold")
        assert terminal.wait() == 0
        assert "\x1b[36m" not in terminal.raw
