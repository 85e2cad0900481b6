"""The command line: help, exit codes, where things go."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from metalctl import cli
from metalctl.app import Invocation, app, command
from metalctl.engine import errors


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> list[Invocation]:
    """A command `probe` which notes how it was called. It is gone again after the test."""
    seen: list[Invocation] = []
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))

    @command("probe")
    def probe(invocation: Invocation, fail: str | None = None) -> None:
        """Note how it is called."""
        seen.append(invocation)
        if fail:
            raise (getattr(errors, fail, None) and getattr(errors, fail)("it failed", "do this")) or _OTHER[fail]
        invocation.output.result({"fine": True})

    return seen


_OTHER: dict[str, BaseException] = {"bug": ValueError("a bug"), "interrupt": KeyboardInterrupt()}


@pytest.mark.parametrize(
    ("failure", "code", "kind"),
    [
        ("MetalctlError", 1, "error"),
        ("UsageError", 2, "usage"),
        ("ModelNotFoundError", 3, "model_not_found"),
        ("NotCachedError", 3, "not_cached"),
        ("HubError", 4, "hub"),
        ("OutOfMemoryError", 5, "out_of_memory"),
        ("CheckpointError", 1, "checkpoint"),
        ("StorageError", 1, "storage"),
        ("bug", 70, "internal"),
        ("interrupt", 130, "interrupted"),
    ],
)
def test_every_failure_has_its_exit_code_and_json(
    probe: list[Invocation], capsys: pytest.CaptureFixture[str], failure: str, code: int, kind: str
) -> None:
    assert cli.main(["probe", "--fail", failure]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err

    assert cli.main(["probe", "--fail", failure, "--json"]) == code
    [line] = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert (record["schema"], record["command"], record["status"]) == (1, "probe", "error")
    assert record["error"]["type"] == kind
    assert set(record["error"]) == {"type", "message", "hint"}


def test_an_error_says_what_to_do_next(probe: list[Invocation], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["probe", "--fail", "HubError"])
    assert capsys.readouterr().err == "error: it failed\nhint: do this\n"


def test_debug_shows_the_traceback_wherever_it_stands(
    probe: list[Invocation], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--debug", "probe", "--fail", "bug"], ["probe", "--fail", "HubError", "--debug"]):
        cli.main(arguments)
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--json", "-qv", "probe", "-v"], ["probe", "--json", "-q", "-vv"]])
def test_shared_options_stand_before_or_after_the_command(probe: list[Invocation], arguments: list[str]) -> None:
    assert cli.main(arguments) == 0
    output = probe[0].output
    assert (output.json, output.quiet, output.verbose, output.command) == (True, True, 2, "probe")


@pytest.mark.parametrize(
    ("variable", "value", "offline"),
    [
        ("METALCTL_OFFLINE", "1", True),
        ("METALCTL_OFFLINE", "True", True),
        ("METALCTL_OFFLINE", "yes", True),
        ("HF_HUB_OFFLINE", "1", True),
        ("METALCTL_OFFLINE", "0", False),
    ],
)
def test_offline_by_environment(
    probe: list[Invocation], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, offline: bool
) -> None:
    monkeypatch.setenv(variable, value)
    cli.main(["probe"])
    assert probe[0].offline is offline


def test_shared_options_come_from_environment_and_file(
    probe: list[Invocation], monkeypatch: pytest.MonkeyPatch, own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALCTL_JSON", "1")
    (own_folders / "config.toml").write_text("offline = true\n[probe]\nquiet = true\n")
    cli.main(["probe"])
    assert (probe[0].output.json, probe[0].offline, probe[0].output.quiet) == (True, True, True)
    capsys.readouterr()
    cli.main(["probe", "--nonsense"])
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "usage"


def test_a_wrong_value_from_the_environment_names_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALCTL_CHAT_TOP_K", "many")
    assert cli.main(["chat", "model", "hello"]) == 2
    assert "METALCTL_CHAT_TOP_K" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["chat", "--nonsense"], ["--nonsense"]])
def test_a_wrong_command_line_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "hint: " in err


def test_version_for_people_and_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALCTL_VERSION", "1")  # says nothing to anybody
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("metalctl ")
    assert cli.main(["--version", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["version"] == cli.__version__ and data["backend"] in ("metal", "cuda", "cpu")
    assert all(data[name] for name in ("python", "platform", "mlx", "mlx_lm", "mlx_vlm"))
    assert cli.main([]) == 0
    assert "Usage:" in capsys.readouterr().out


def commands() -> list[str]:
    return [registered.name or "" for registered in app.registered_commands]


@pytest.mark.parametrize("name", ["", *commands()])
def test_help_fits_eighty_columns_and_names_the_exit_codes(name: str) -> None:
    environment = os.environ | {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "metalctl", *name.split(), "--help"],
        capture_output=True, text=True, env=environment, timeout=60, check=True,
    )  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "env var" not in done.stdout
    assert "<str>" not in done.stdout and "list[" not in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]  # no summary is cut
    if not name:
        assert "Exit codes: 0 ok" in " ".join(done.stdout.split())


def test_help_starts_fast_and_imports_nothing_heavy() -> None:
    code = "import sys; from metalctl.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    best = 9.9  # seconds of processor time: what else runs on this machine must not count
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    heavy = {"mlx", "mlx_lm", "transformers", "huggingface_hub", "modelscope", "numpy", "prompt_toolkit", "tokenizers"}
    assert not heavy & set(done.stderr.split())
    assert best < 0.3


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    code = "import sys; from metalctl.cli import main; sys.exit(main(['--help']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_is_not_utf8_gets_question_marks_and_no_crash() -> None:
    code = "from metalctl.cli import main; main(['chat', '--temperatüre'])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0
    assert b"No such option: --temperat?re" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "metalctl", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output: no space left")
    assert "Traceback" not in done.stderr
