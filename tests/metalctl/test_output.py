"""stdout is data, stderr is for people."""

import io
import json
import sys

import pytest

from metalctl.engine.errors import MetalctlError
from metalctl.output import Output, human_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_with_json_only_json_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json=True, command="list")
    output.text("for people")
    output.table(["a"], [["1"]])
    output.note("a note")
    output.event("step", n=1)
    output.result({"size": None})
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert records == [
        {"schema": 1, "command": "list", "event": "step", "n": 1},
        {"schema": 1, "command": "list", "status": "ok", "data": {"size": None}},
    ]
    assert err == "a note\n"


def test_quiet_keeps_errors_and_data_only(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(quiet=True)
    output.note("a note")
    output.warn("a warning")
    output.text("data")
    output.error(MetalctlError("an error"))
    assert capsys.readouterr() == ("data\n", "error: an error\n")


def test_details_need_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    Output().detail("unseen")
    Output(verbose=1).detail("seen")
    assert capsys.readouterr().err == "seen\n"


def test_nothing_a_user_wrote_is_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.error(MetalctlError("no [bold]file[/bold] :smile:", "[red]"))
    output.note("[x]")
    assert capsys.readouterr().err == "error: no [bold]file[/bold] :smile:\nhint: [red]\n[x]\n"


@pytest.mark.parametrize(
    ("variables", "terminal", "coloured"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": ""}, False, False),
        ({"NO_COLOR": ""}, True, True),
    ],
)
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], terminal: bool, coloured: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    Output().warn("careful")
    assert ("\x1b[1;33m" in stream.getvalue()) is coloured


def test_rows_are_whole_in_a_pipe_and_cut_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Output().table(["name"], [["x" * 300]])
    assert "x" * 300 in capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    Output().table(["name"], [["x" * 300]])
    assert "x" * 81 not in terminal.getvalue()


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (92_000_000, "92 MB"), (1_500_000, "1.5 MB"), (None, "?")]
)
def test_bytes_as_people_read_them(count: int | None, shown: str) -> None:
    assert human_bytes(count) == shown


def test_a_number_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Output(json=True).result({"loss": float("nan")})
