"""`metalctl chat` with a prompt: one answer on stdout, and nothing else there."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeThread, running
from metalctl import cli
from metalctl.commands import chat
from metalctl.repl.conversation import last_conversation, load

Run = Callable[..., int]
FAKE = [sys.executable, str(Path(__file__).parent / "fakes.py")]


class Pipe(io.TextIOWrapper):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `metalctl chat` over an engine that gives `replies`; `run.thread` is that engine."""

    def run(
        *arguments: str, replies: tuple[str, ...] = ("Paris.",), piped: bytes | None = None, **defaults: Any
    ) -> int:
        run.thread = FakeThread(*replies)  # type: ignore[attr-defined]
        run.engine = running(run.thread, **defaults)  # type: ignore[attr-defined]
        monkeypatch.setattr(chat, "running_engine", run.engine)  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "stdin", None if piped is None else Pipe(piped))
        return cli.main(["chat", *arguments])

    return run


def test_the_answer_is_on_stdout_and_ends_its_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2", "What is the capital of France?") == 0
    assert capsys.readouterr() == ("Paris.\n", "")
    assert run.thread.prompts == ["user: What is the capital of France?\nassistant: "]
    assert not run.thread.alive


def test_markdown_is_raw_in_a_pipe_and_its_control_characters_too(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    answer = "# Title\n\n**bold** \x1b[31m`code`\n"
    run("smollm2", "hi", replies=(answer,))
    assert capsys.readouterr().out == answer


def test_words_without_quotes_are_one_prompt(run: Run) -> None:
    run("smollm2", "what", "is", "this")
    assert run.thread.prompts[0].startswith("user: what is this\n")


def test_piped_text_comes_before_the_prompt(run: Run) -> None:
    run("smollm2", "Translate.", piped=b"\xef\xbb\xbfBonjour\n")
    assert run.thread.prompts[0].startswith("user: Bonjour\n\nTranslate.\n")
    run("smollm2", piped=b"Bonjour\n")
    assert run.thread.prompts[0].startswith("user: Bonjour\nassistant")
    run("smollm2", "-", piped=b"Bonjour\n")
    assert run.thread.prompts[0].startswith("user: Bonjour\nassistant")
    run("smollm2", "Hello", piped=b"")
    assert run.thread.prompts[0].startswith("user: Hello\nassistant")


@pytest.mark.parametrize(
    ("arguments", "piped", "message"),
    [
        (["smollm2"], b"", "standard input is empty"),
        (["smollm2"], b" \n", "standard input is empty"),
        (["smollm2"], b"caf\xe9", "not UTF-8 text: byte 0xe9 at 3"),
        (["smollm2"], None, "needs a terminal"),
        ([], b"hello", "no model was named"),
        (["smollm2", "hi", "--stream"], None, "--stream needs --json"),
        (["smollm2", "hi", "--temperature", "-1"], None, "temperature"),
        (["smollm2", "hi", "--top-p", "0"], None, "top_p"),
        (["smollm2", "hi", "--stop", ""], None, "stop"),
        (["smollm2", "hi", "--context", "0"], None, "--context"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], piped: bytes | None, message: str
) -> None:
    assert run(*arguments, piped=piped) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert run.engine.asked == []  # found before a model is loaded


def test_json_is_one_envelope(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2", "hi", "--json", "--stats", replies=("<think>Hm.</think>Paris.",)) == 0
    [line] = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert (record["command"], record["status"]) == ("chat", "ok")
    data = record["data"]
    assert (data["model"], data["text"], data["reasoning"], data["finish_reason"]) == (
        "smollm2",
        "Paris.",
        "Hm.",
        "stop",
    )
    assert data["usage"] == {"prompt_tokens": 20, "cached_tokens": 0, "output_tokens": 24}
    assert set(data["timings"]) == {
        "load",
        "time_to_first_token",
        "elapsed",
        "prompt_per_second",
        "output_per_second",
    }


def test_a_missing_value_is_null(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("smollm2", "hi", "--json", replies=("",))
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["text"], data["reasoning"], data["timings"]["output_per_second"]) == ("", None, None)


def test_json_stream_is_events_and_the_last_is_done(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2", "hi", "--json", "--stream", replies=("<think>Hm.</think>Paris is it.",)) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["delta"] * (len(events) - 1) + ["done"]
    assert "".join(event.get("text", "") for event in events) == "Paris is it."
    assert "".join(event.get("reasoning", "") for event in events) == "Hm."
    assert events[-1]["status"] == "ok"
    assert events[-1]["data"]["text"] == "Paris is it."


def test_an_error_in_the_engine_is_an_error_of_the_command(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeThread, "error", ValueError("bad weights"), raising=False)
    monkeypatch.setattr(FakeThread, "__setattr__", lambda self, k, v: k == "error" or object.__setattr__(self, k, v))
    assert run("smollm2", "hi", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert "bad weights" in record["error"]["message"]


def test_a_prompt_that_is_too_long_gives_both_numbers(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2", "x" * 100, "--context", "50", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["error"]["type"] == "context_length"
    assert "118" in record["error"]["message"]
    assert "50" in record["error"]["message"]


def test_reasoning_is_shown_but_not_in_the_answer(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("smollm2", "hi", replies=("<think>\nHm, well.\n</think>\n\nParis.",))
    assert capsys.readouterr() == ("Paris.\n", "Hm, well.\n\n")
    run("smollm2", "hi", "-q", replies=("<think>Hm.</think>Paris.",))
    assert capsys.readouterr() == ("Paris.\n", "")


def test_reasoning_that_the_template_opened_is_recognised(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fakes.FakeTokenizer.opens", "<think>\n")
    run("smollm2", "hi", replies=("Hm.\n</think>\n\nParis.",))
    assert capsys.readouterr().out == "Paris.\n"


@pytest.mark.parametrize(
    ("flags", "shown"), [([], ""), (["--think"], "enable_thinking=True\n"), (["--no-think"], "enable_thinking=False\n")]
)
def test_think_reaches_the_template_only_when_it_is_chosen(run: Run, flags: list[str], shown: str) -> None:
    run("smollm2", "hi", *flags)
    assert run.thread.prompts == [f"user: hi\n{shown}assistant: "]


def test_sampling_flags_reach_the_engine(run: Run) -> None:
    flags = "--temperature .1 --top-p .2 --top-k 3 --min-p .4 --max-tokens 50 --seed 6 --repeat-penalty 1.7"
    run("smollm2", "hi", *flags.split(), "--stop", "a", "--stop", "b")
    params = run.thread.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.1, 0.2, 3, 0.4)
    assert (params.max_tokens, params.seed, params.repetition_penalty, params.stop) == (50, 6, 1.7, ("a", "b"))


def test_an_answer_that_was_cut_says_why(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("smollm2", "hi", "--max-tokens", "5", replies=("a long answer",))
    assert "cut at max_tokens, 5" in capsys.readouterr().err
    run("smollm2", "hi", "--context", "25", replies=("a long answer",))
    assert "the context of 25 tokens is full" in capsys.readouterr().err


def test_statistics_go_to_stderr(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("smollm2", "hi", "--stats")
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "prompt 20 tokens" in err
    assert "answer 6 tokens" in err


def test_continue_goes_on_with_the_last_conversation_and_its_model(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("smollm2", "Capital of France?", "-s", "Be brief.")
    assert run("-c", "And of Spain?", replies=("Madrid.",)) == 0
    assert run.engine.asked == ["smollm2"]
    assert run.thread.prompts[0] == (
        "system: Be brief.\nuser: Capital of France?\nassistant: Paris.\nuser: And of Spain?\nassistant: "
    )
    run("other", "And of Italy?", "-c", "-s", "Be long.", replies=("Rome.",))
    assert run.engine.asked == ["other"]
    assert run.thread.prompts[0].startswith("system: Be long.\nuser: Capital of France?")
    assert len(load(last_conversation()).messages) == 6


def test_without_continue_a_new_conversation_begins(run: Run) -> None:
    run("smollm2", "one")
    run("smollm2", "two")
    assert [message.content for message in load(last_conversation()).messages] == ["two", "Paris."]


def test_a_conversation_that_is_to_be_forgotten_is_not_written(run: Run, own_folders: Path) -> None:
    run("smollm2", "a secret", "--forget")
    assert not list(own_folders.rglob("*.json"))


def test_continue_without_a_conversation_is_an_error(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2", "hi", "-c") == 1
    assert "no conversation" in capsys.readouterr().err


def test_a_conversation_that_cannot_be_saved_is_answered_anyway(
    run: Run, capsys: pytest.CaptureFixture[str], own_folders: Path
) -> None:
    (own_folders / "state").write_text("not a folder")
    assert run("smollm2", "hi") == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "cannot save the conversation" in err


def test_with_a_default_model_the_prompt_can_stand_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALCTL_MODEL", "mine")
    run("Hello, who is there?")
    assert run.engine.asked == ["mine"]
    run("smollm2", "hi")
    assert run.engine.asked == ["smollm2"]
    run(piped=b"hello")
    assert run.engine.asked == ["mine"]


def test_a_seed_of_zero_and_an_empty_system_prompt_are_given(run: Run) -> None:
    run("smollm2", "hi", "-s", "Be brief.")
    run("hi there", "-c", "-s", "", "--seed", "0")
    assert run.thread.prompts[0].startswith("user: hi\n")
    assert run.thread.params[0].seed == 0


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent), **variables}


def test_ctrl_c_keeps_what_was_said_and_exits_130() -> None:
    replies = json.dumps(["word " * 1000])
    process = subprocess.Popen(
        [*FAKE, "chat", "smollm2", "hi"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(FAKE_REPLIES=replies, FAKE_DELAY="0.01"),
    )  # fmt: skip
    assert process.stdout
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert (begun + rest).endswith("\n")
    assert len(begun + rest) < 4000
    assert [message.role for message in load(last_conversation()).messages] == ["user", "assistant"]


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    replies = json.dumps(["word " * 1000])
    process = subprocess.Popen(
        [*FAKE, "chat", "smollm2", "hi"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(FAKE_REPLIES=replies, FAKE_DELAY="0.001"),
    )  # fmt: skip
    assert process.stdout
    assert process.stderr
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 0


def test_an_open_pipe_without_input_is_explained() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [*FAKE, "chat", "smollm2", "hi"],
        stdin=read, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(FAKE_REPLIES='["yes"]'),
    )  # fmt: skip
    assert process.stderr
    assert "Reading standard input" in process.stderr.readline()
    os.close(write)
    assert process.communicate(timeout=30)[0] == "yes\n"
    os.close(read)
