"""The conversation: what is typed at the prompt, and what each command does."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from fakes import FakeThread
from metalctl.output import Output
from metalctl.repl import slash
from metalctl.repl.chat import Chat
from metalctl.repl.conversation import Conversation, last_conversation, load
from metalctl.repl.loop import Repl
from metalctl.repl.options import ChatOptions
from metalctl.repl.prompt import CommandCompleter, prompt_session


class Talk:
    """A conversation with a fake engine at a pipe that stands for the keyboard."""

    def __init__(self, keys: PipeInput, *replies: str, history: Path | None = None, context: int = 10_000):
        self.keys = keys
        self.thread = FakeThread(*replies, context=context)
        self.conversation = Conversation("model")
        self.chat = Chat(self.thread, {}, self.conversation, ChatOptions(), Output())  # type: ignore[arg-type]
        completer = CommandCompleter({}, {})
        self.session: PromptSession[str] = prompt_session(history, completer, input=keys, output=DummyOutput())
        self.repl = Repl(self.chat, self.session)

    def type(self, keys: str) -> "Talk":
        """Type, then leave with Ctrl-D."""
        self.keys.send_text(keys + "\x04")
        self.repl.run()
        return self

    @property
    def contents(self) -> list[str]:
        return [message.content for message in self.conversation.messages]


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


def test_the_whole_conversation_is_sent_each_time(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, "Hello!", "Fine.").type("hi\rhow are you\r")
    assert talk.thread.prompts[1] == "user: hi\nassistant: Hello!\nuser: how are you\nassistant: "
    assert capsys.readouterr().out == "Hello!\nFine.\n"


def test_blank_lines_send_nothing(keys: PipeInput) -> None:
    assert Talk(keys).type("\r  \r").thread.prompts == []


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("one\\\rtwo\r", "one\ntwo"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\ntwo\r", "one\ntwo"),
        ('"""one\rtwo"""\r', "one\ntwo"),
        ("\x1b[200~one\ntwo\n\x1b[201~three\r", "one\ntwo\nthree"),
        ("//not a command\r", "/not a command"),
        ("a \\ in the middle\r", "a \\ in the middle"),
        ("C:\\ is \\\\\x1b[D\r", "C:\\ is \\\\"),
    ],
)
def test_several_lines_are_one_message(keys: PipeInput, typed: str, sent: str) -> None:
    talk = Talk(keys, "ok").type(typed)
    assert talk.contents == [sent, "ok"]


@pytest.mark.parametrize("words", ["/bye", "/exit", "/quit", "exit", "quit"])
def test_leaving_has_several_names(keys: PipeInput, words: str) -> None:
    talk = Talk(keys)
    keys.send_text(words + "\r")
    talk.repl.run()
    assert talk.thread.prompts == []


def test_ctrl_c_clears_the_line_and_twice_leaves(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, "ok")
    keys.send_text("half a line\x03hi\r\x03\x03")
    talk.repl.run()
    assert talk.contents == ["hi", "ok"]
    assert "Ctrl-C again" in capsys.readouterr().err


def test_ctrl_c_between_messages_does_not_add_up(keys: PipeInput) -> None:
    talk = Talk(keys, "ok", "ok").type("\x03hi\r\x03hi\r")
    assert talk.contents == ["hi", "ok", "hi", "ok"]


def test_undo_retry_and_clear(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, "a", "b", "c").type("one\rtwo\r/retry\r")
    assert talk.contents == ["one", "a", "two", "c"]
    talk.type("/undo\r")
    assert talk.contents == ["one", "a"]
    talk.type("/clear\r")
    assert talk.contents == []
    talk.type("/undo\r/retry\r")
    err = capsys.readouterr().err
    assert "Taken back: two" in err
    assert "nothing to take back" in err
    assert "nothing to retry" in err


def test_a_retry_that_fails_leaves_the_conversation_as_it_was(keys: PipeInput) -> None:
    talk = Talk(keys, "a", "").type("one\r/retry\r")
    assert talk.contents == ["one", "a"]


def test_a_retry_in_which_the_engine_fails_leaves_the_conversation_as_it_was(keys: PipeInput) -> None:
    talk = Talk(keys, "a", "b").type("one\r")
    talk.thread.error = ValueError("broken")
    talk.type("/retry\r")
    assert talk.contents == ["one", "a"]


def test_a_retry_that_cannot_differ_says_so(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    Talk(keys, "a", "b", "c").type("one\r/retry\r/set temperature 0\r/retry\r")
    assert capsys.readouterr().err.count("the same again") == 1


def test_system_prompt_is_shown_set_and_removed(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, "ok", "ok").type("/system\r/system Be brief.\rhi\r/system none\rhi\r")
    assert talk.thread.prompts[0].startswith("system: Be brief.\nuser: hi")
    assert talk.thread.prompts[1].startswith("user: hi")
    err = capsys.readouterr().err
    assert "There is no system prompt." in err
    assert "System prompt: Be brief." in err


def test_settings_are_shown_changed_and_forgotten(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, *["ok"] * 4)
    talk.type("/set temperature 0\rhi\r/set temperature default\rhi\r/set think off\rhi\r/set stop \\n\rhi\r")
    assert [params.temperature for params in talk.thread.params] == [0, 0.7, 0.7, 0.7]
    assert "enable_thinking=False" in talk.thread.prompts[2]
    assert talk.thread.params[3].stop == ("\n",)
    capsys.readouterr()
    talk.type("/set\r")
    shown = capsys.readouterr().err
    assert "think               off (set)" in shown
    assert "temperature         0.7\n" in shown


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/set temprature 1", "there is no setting temprature"),
        ("/set nothing", "there is no setting nothing"),
        ("/set temperature hot", "temperature cannot be 'hot'"),
        ("/set top_p 2", "top_p is 2.0"),
        ("/set think maybe", "on or off"),
        ("/undoo", "Did you mean /undo?"),
        ("/save", "/save FILE"),
        ("/load /nonexistent.json", "no conversation at /nonexistent.json"),
        ("/load /", "cannot read"),
        ("/save /nonexistent/x/y.json", "cannot save"),
    ],
)
def test_a_wrong_command_says_so_and_sends_nothing(
    keys: PipeInput, capsys: pytest.CaptureFixture[str], typed: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda *_args, **_kwargs: (_ for _ in ()).throw(PermissionError(13, "denied")))
    talk = Talk(keys).type(typed + "\r")
    assert message in capsys.readouterr().err
    assert talk.thread.prompts == []


def test_a_saved_conversation_can_be_loaded(
    keys: PipeInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a talk.json"
    Talk(keys, "<think>Hm.</think>ok").type(f"/system Be brief.\rhi\r/save {path}\r")
    assert path.stat().st_mode & 0o077 == 0
    talk = Talk(keys).type(f"/load {path}\r")
    assert talk.contents == ["hi", "ok"]
    assert talk.conversation.system == "Be brief."
    assert talk.conversation.messages[1].reasoning == "Hm."
    assert "you had said: hi" in capsys.readouterr().err


def test_save_overwrites_a_conversation_but_no_other_file(
    keys: PipeInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "thesis.json"
    other.write_text("{}")
    saved = tmp_path / "talk.json"
    Talk(keys, "ok").type(f"/save {saved}\rhi\r/save {saved}\r/save {other}\r")
    assert other.read_text() == "{}"
    assert len(load(saved).messages) == 2
    assert "is left as it is" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk.json", "thesis.json"]


@pytest.mark.parametrize(
    "content",
    ["not json", "[]", "{}", '{"kind": "metalctl conversation", "schema": 1}', '{"kind": "metalctl conversation"}'],
)
def test_a_file_that_is_no_conversation_is_refused(
    keys: PipeInput, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    talk = Talk(keys, "ok").type(f"hi\r/load {path}\r")
    assert talk.contents == ["hi", "ok"]
    assert "error:" in capsys.readouterr().err


def test_each_exchange_is_kept_for_the_next_time(keys: PipeInput) -> None:
    Talk(keys, "ok").type("hi\r")
    assert [message.content for message in load(last_conversation()).messages] == ["hi", "ok"]
    assert last_conversation().stat().st_mode & 0o077 == 0
    assert json.loads(last_conversation().read_text())["model"] == "model"


def test_lines_are_remembered_in_a_private_file(keys: PipeInput, tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    Talk(keys, "ok", history=history).type("remember me\r")
    assert history.stat().st_mode & 0o077 == 0
    talk = Talk(keys, "ok", history=history)
    talk.type("\x1b[A\r")
    assert talk.contents == ["remember me", "ok"]


def test_a_prompt_that_does_not_fit_is_taken_back(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, "ok", context=60).type(f"hi\r{'x' * 80}\r")
    assert talk.contents == ["hi", "ok"]
    err = capsys.readouterr().err
    assert "the context holds 60" in err
    assert "/undo" in err
    assert "/clear" in err


def test_a_context_that_fills_up_is_announced(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    Talk(keys, "ok, this is rather long", context=44).type("hi\r")
    assert "context is 98% full, of 44 tokens" in capsys.readouterr().err
    talk = Talk(keys, "ok, this is rather long", context=30).type("hi\r")
    assert "the context of 30 tokens is full" in capsys.readouterr().err
    assert talk.contents == ["hi", "ok, this i"]


def test_an_error_in_a_request_does_not_end_the_conversation(
    keys: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(keys, "a", "b", "c")
    talk.thread.error = ValueError("broken")
    talk.type("one\r")
    talk.thread.error = None
    talk.type("two\r")
    assert talk.contents == ["two", "b"]
    assert "broken" in capsys.readouterr().err


def test_an_engine_that_is_dead_ends_the_conversation(keys: PipeInput) -> None:
    talk = Talk(keys, "a")
    talk.thread.error = ValueError("broken")
    talk.thread.alive = False
    with pytest.raises(Exception, match="broken"):
        talk.type("one\r")


def test_reasoning_alone_is_told(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(keys, "<think>Hm").type("hi\r")
    assert talk.conversation.messages[1].reasoning == "Hm"
    assert "gave no answer" in capsys.readouterr().err


def test_help_names_every_command(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    Talk(keys).type("/help\r")
    shown = capsys.readouterr().err
    for command in ("/help", "/system", "/set", "/retry", "/undo", "/save", "/load", "/clear", "/bye", "Ctrl-C"):
        assert command in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "offered"),
    [("/s", {"/system", "/set", "/save"}), ("/set te", {"temperature"}), ("hello /", set()), ("/undo ", set())],
)
def test_commands_and_settings_are_completed(text: str, offered: set[str]) -> None:
    completer = CommandCompleter(dict.fromkeys(slash.COMMANDS, ""), slash.ARGUMENTS)
    found = completer.get_completions(Document(text), CompleteEvent())
    assert {completion.text for completion in found} == offered


def test_file_names_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    completer = CommandCompleter({}, slash.ARGUMENTS)
    [completion] = completer.get_completions(Document(f"/load {tmp_path}/ta"), CompleteEvent())
    assert completion.text == "lk.json"


def test_raw_text_on_a_terminal_shows_no_control_characters(keys: PipeInput, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    Talk(keys, "\x1b]0;title\x07 **b**").type("/set markdown off\rhi\r")
    assert "\x1b]0" not in screen.getvalue()
    assert "**b**" in screen.getvalue()
