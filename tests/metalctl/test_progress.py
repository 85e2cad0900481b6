import json
import os
import sys
from pathlib import Path

import pytest
from loopback_hub import running_hub
from terminal import Terminal
from tiny_repositories import gguf_repository

from metalctl.engine.models.references import Reference
from metalctl.engine.models.sources.base import Plan, PlannedFile
from metalctl.output import Output
from metalctl.progress import fetch_progress

PLAN = Plan(
    Reference("hf", "o/r", "Q4_0"),
    "gguf",
    Path("/x"),
    (PlannedFile("a.gguf", 1000, False), PlannedFile("b.gguf", 500, True)),
    "c0ffee",
)


def test_while_pulling_events_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json=True, command="pull")
    with fetch_progress(output, pulling=True) as progress:
        progress.start(PLAN)
        progress.update("a.gguf", 400, 1000)
        progress.update("a.gguf", 500, 1000)  # too soon to be told
        progress.retry("a.gguf", "cut", 2)
        progress.finish("a.gguf")
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["start", "progress", "retry", "file"]
    assert events[0]["files"][1] == {"path": "b.gguf", "size": 500, "cached": True}
    assert (events[0]["size"], events[0]["to_fetch"]) == (1500, 1000)
    assert events[1]["done"] == 400
    assert err == ""


def test_elsewhere_stdout_is_left_alone_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch_progress(Output(json=True, command="chat")) as progress:
        progress.start(PLAN)
        progress.update("a.gguf", 400, 1000)
        progress.retry("a.gguf", "cut", 0)
        progress.finish("a.gguf")
    out, err = capsys.readouterr()
    assert out == ""
    assert "fetching o/r:Q4_0, 1 kB" in err
    assert "a.gguf: cut; going on" in err


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch_progress(Output(quiet=True), pulling=True) as progress:
        progress.start(PLAN)
        progress.retry("a.gguf", "cut", 0)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_bytes_rate_and_time_to_go_of_every_file(tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.repository("o/gguf").commit(gguf_repository(size=32 * 60_000))
        hub.slow = 0.03
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "METALCTL_CACHE": str(tmp_path)}
        command = [sys.executable, "-m", "metalctl", "pull", "o/gguf:F16"]
        with Terminal(command, environment, columns=110) as terminal:
            assert terminal.wait(40) == 0
    shown = terminal.text
    for words in ("3 files to fetch", "tiny-F16-00001-of-00002.gguf", "mmproj-F16.gguf", "all", "MB/s", "3.8/3.8 MB"):
        assert words in shown, shown
