"""`metalctl doctor`: each check, in order and made to fail."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from metalctl import cli
from metalctl.doctor import disk, hubs, machine, shell, versions
from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.engine.memory import DeviceMemory
from metalctl.engine.models.resolve import Models
from metalctl.settings import Settings

GB = 10**9


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches, and no settings of the person who runs the tests."""
    monkeypatch.setenv("METALCTL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "TRANSFORMERS_OFFLINE", "MODELSCOPE_ENDPOINT", "SHELL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def states(*checks: Check) -> list[str]:
    return [check.state for check in checks]


def is_helpful(check: Check) -> bool:
    return check.state != "ok" and bool(check.detail) and bool(check.fix)


# -- the command


def test_a_sound_machine_is_healthy_and_nothing_connects(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("doctor opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(shell, "port", lambda number: ok("port", str(number)))
    assert cli.main(["doctor", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    data = json.loads(line)["data"]
    assert data["healthy"] is True
    assert data["ok"] + data["warnings"] + data["failures"] == len(data["checks"])
    assert {"python", "processor", "packages", "mlx", "device", "memory", "wired limit", "compiler", "blas",
            "disk", "downloads", "config", "offline", "Hugging Face", "ModelScope", "port",
            "completions"} <= {check["name"] for check in data["checks"]}  # fmt: skip
    assert all(set(check) == {"name", "state", "detail", "fix"} for check in data["checks"])


@pytest.mark.parametrize(("check", "code"), [(failure("port", "bad", "mend it"), 1), (warning("port", "so", "see"), 0)])
def test_only_a_failure_fails(
    check: Check, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "port", lambda number: check)
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    lines = out.splitlines()
    where = next(index for index, line in enumerate(lines) if line.startswith(check.state) and "port" in line)
    assert lines[where].endswith(check.detail)
    assert lines[where + 1].split() == ["fix:", *str(check.fix).split()]
    assert "1 failure" in err if code else "0 failures" in err
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["data"]["healthy"] is not bool(code)


def test_without_mlx_the_rest_is_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    import mlx.core as mx

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(mx, "matmul", broken)
    assert cli.main(["doctor", "--json"]) == 1
    last = json.loads(capsys.readouterr().out)["data"]["checks"][-1]
    assert (last["name"], last["state"]) == ("device", "failure")
    assert "no kernel image" in last["detail"]


def test_it_takes_about_a_second_and_loads_no_model_library() -> None:
    code = (
        "import resource, sys\nfrom metalctl.cli import main\ncode = main(['doctor', '-q'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, *sys.modules, file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    seconds, *modules = done.stderr.splitlines()[-1].split()
    assert done.returncode == 0, done.stdout
    assert not {"mlx_lm", "transformers", "torch"} & set(modules)
    assert float(seconds) < 4  # of processor time


@pytest.mark.parametrize(
    ("environment", "settings", "expected"),
    [({}, {}, 8000), ({}, {"serve": {"port": 9000}}, 9000), ({"METALCTL_SERVE_PORT": "9100"}, {}, 9100)],
)
def test_the_port_is_the_one_that_serve_takes(
    environment: dict[str, str], settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metalctl.app import Invocation
    from metalctl.commands import doctor
    from metalctl.output import Output

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    invocation = Invocation(Output(), offline=False, debug=False, settings=Settings(options=settings))
    assert doctor._serve_port(invocation) == expected


# -- versions


def test_python_too_old_and_too_new() -> None:
    assert states(*(versions.python_version(v) for v in ((3, 10), (3, 11), (3, 14), (3, 15)))) == [
        "failure", "ok", "ok", "warning",
    ]  # fmt: skip


def test_the_tested_versions_are_those_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    classifiers = [line.rpartition(":: ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert project["requires-python"] == f">={versions.OLDEST[0]}.{versions.OLDEST[1]}"
    assert classifiers == [f"3.{minor}" for minor in range(versions.OLDEST[1], versions.NEWEST[1] + 1)]
    floors = {requirement.partition(">")[0].lower() for requirement in project["dependencies"]}
    assert versions.REASONS.keys() <= floors


def test_a_python_under_rosetta_fails_and_so_does_an_intel_mac() -> None:
    rosetta = versions.processor("darwin", "x86_64", translated=True)
    intel = versions.processor("darwin", "x86_64", translated=False)
    assert states(rosetta, intel, versions.processor("darwin", "arm64"), versions.processor("linux", "x86_64")) == [
        "failure", "failure", "ok", "ok",
    ]  # fmt: skip
    assert "Rosetta" in rosetta.detail and "arm64" in str(rosetta.fix)


def test_a_package_below_its_floor_is_named_with_the_reason() -> None:
    [check] = versions.packages(["mlx>=999", "rich>=1", "nothing-there>=1; python_version < '3'"])
    assert is_helpful(check) and check.state == "failure"
    assert "mlx is " in check.detail and ">=999" in check.detail and versions.REASONS["mlx"] in check.detail
    assert check.fix == "pip install -U 'mlx>=999'"


def test_a_package_that_is_missing_is_named() -> None:
    [check] = versions.packages(["surely-not-installed>=2"])
    assert check.state == "failure" and "surely-not-installed" in check.detail


@pytest.mark.parametrize(
    ("system", "installed", "state", "said"),
    [
        ("linux", {"mlx": "1.0", "mlx-cpu": "1.0"}, "ok", "mlx-cpu 1.0"),
        ("linux", {"mlx": "1.0"}, "failure", "no backend"),
        ("linux", {}, "failure", "not installed"),
        ("linux", {"mlx": "1.0", "mlx-cpu": "0.9"}, "failure", "do not fit"),
        ("linux", {"mlx": "1.0", "mlx-cpu": "1.0", "mlx-cuda-13": "1.0"}, "warning", "several"),
        ("darwin", {"mlx": "1.0", "mlx-metal": "1.0"}, "ok", "mlx-metal 1.0"),
        ("darwin", {"mlx": "1.0", "mlx-metal": "1.1"}, "failure", "do not fit"),
    ],
)
def test_mlx_and_its_backend_belong_together(
    system: str, installed: dict[str, str], state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda name: installed.get(name))
    check = versions.mlx(system)
    assert check.state == state and said in check.detail
    assert state == "ok" or is_helpful(check)


# -- the machine


def test_a_device_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    assert machine.device().state in ("ok", "warning")
    monkeypatch.setattr(mx, "matmul", lambda a, b: mx.zeros((64, 16)))
    assert is_helpful(machine.device()) and machine.device().state == "failure"


def test_an_idle_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "on_cpu", lambda: True)
    monkeypatch.setattr(machine, "idle_gpu", lambda: True)
    check = machine.device()
    assert check.state == "warning" and "cuda" in str(check.fix)


def test_little_memory_names_who_takes_the_most() -> None:
    assert machine.memory(DeviceMemory("x", 32 * GB, 20 * GB, 20 * GB)).state == "ok"
    check = machine.memory(DeviceMemory("x", 32 * GB, GB, GB))
    assert check.state == "warning" and "1.0 GB" in check.detail and "takes" in str(check.fix)


@pytest.mark.parametrize(
    ("megabytes", "state"), [(0, "ok"), (24 * 1024, "ok"), (31 * 1024, "warning"), (2 * 1024, "warning")]
)
def test_the_wired_limit_leaves_enough_to_both(megabytes: int, state: str) -> None:
    check = machine.wired_limit("darwin", megabytes, 32 * 2**30)
    assert check.state == state
    assert state == "ok" or "iogpu.wired_limit_mb" in str(check.fix)
    assert machine.wired_limit("linux").state == "ok"


def test_no_compiler_and_a_broken_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.compiler(needed=False).state == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    check = machine.compiler(needed=True)
    assert check.state == "warning" and "no C++ compiler" in check.detail and check.fix
    (tmp_path / "c++").write_text("#!/bin/sh\necho 'too old for this' >&2\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    check = machine.compiler(needed=True)
    assert check.state == "warning" and "too old for this" in check.detail and check.fix


def test_no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert states(machine.blas(True, "OpenBLAS 0.3"), machine.blas(False, None)) == ["ok", "ok"]
    assert is_helpful(machine.blas(True, None))


# -- disks


def test_a_folder_that_cannot_be_written_to_fails_and_says_which_setting_moves_it(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    checks = list(disk.writable({"Hugging Face cache": blocked / "hub", "metalctl cache": tmp_path / "not" / "yet"}))
    assert states(*checks) == ["failure", "ok"]
    assert "HF_HOME" in str(checks[0].fix)
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable for root")
def test_a_folder_of_somebody_else_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    [check] = disk.writable({"metalctl cache": tmp_path / "models"})
    tmp_path.chmod(0o700)
    assert check.state == "failure"


@pytest.mark.parametrize(("free", "state"), [(100 * GB, "ok"), (2 * GB, "warning"), (GB // 10, "failure")])
def test_a_full_disk(free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_space", lambda folder: free)
    [check] = disk.free({"metalctl cache": tmp_path, "conversations": tmp_path / "state"})
    assert check.state == state and "metalctl cache, conversations" in check.detail


def test_every_folder_is_known(own_caches: Path, own_folders: Path) -> None:
    places = disk.folders(Settings(cache=own_caches / "own"))
    assert list(places.values()) == [own_caches / "hf", own_caches / "ms", own_caches / "own", own_folders / "state"]


def test_what_stopped_half_way_is_listed(own_caches: Path) -> None:
    models = Models(cache=own_caches / "own")
    assert states(*disk.unfinished(models)) == ["ok"]
    blobs = own_caches / "hf" / "models--someone--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"12345")
    snapshot = own_caches / "ms" / "models" / "some--one" / "snapshots" / "master"
    snapshot.mkdir(parents=True)
    (snapshot / "x.gguf.incomplete").write_bytes(b"1")
    fetching = own_caches / "own" / "pypi" / ".fetch-1"
    fetching.mkdir(parents=True)
    (fetching / "x.whl").write_bytes(b"1")
    checks = list(disk.unfinished(models))
    assert states(*checks) == ["warning"] * 3
    assert all(map(is_helpful, checks))
    assert "metalctl pull someone/model" in str(checks[0].fix)


def test_an_alias_that_means_nothing(tmp_path: Path) -> None:
    assert states(*disk.config(Settings(aliases={"small": "owner/name:Q4_0"}))) == ["ok"]
    [check] = disk.config(Settings(aliases={"small": "a/b/c/d"}, path=tmp_path / "config.toml"))
    assert check.state == "warning" and "small" in check.detail and "config.toml" in check.detail


# -- hubs


def test_offline_switches_are_named() -> None:
    assert hubs.offline(False, Settings(), {}).state == "ok"
    assert hubs.offline(True, Settings(), {}).state == "ok"
    check = hubs.offline(True, Settings(), {"HF_HUB_OFFLINE": "yes"})
    assert check.state == "warning" and "HF_HUB_OFFLINE" in check.detail and "HF_HUB_OFFLINE" in str(check.fix)
    check = hubs.offline(True, Settings(options={"offline": True}, path=Path("config.toml")), {})
    assert check.state == "warning" and "config.toml" in check.detail


def test_an_endpoint_that_is_no_address_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(hubs.hugging_face(Settings()), hubs.modelscope(Settings())) == ["ok", "ok"]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "mirror.example")
    check = hubs.hugging_face(Settings())
    assert check.state == "failure" and "HF_ENDPOINT" in check.detail
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "ftp://mirror.example")
    check = hubs.modelscope(Settings())
    assert check.state == "failure" and "MODELSCOPE_ENDPOINT" in check.detail


def test_a_token_is_not_shown_and_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    check = hubs.hugging_face(Settings())
    assert check.state == "ok" and "a token is set" in check.detail and "secret" not in check.detail
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://mirror.example")
    check = hubs.hugging_face(Settings())
    assert check.state == "warning" and "unencrypted" in check.detail


def test_neither_pip_nor_uv() -> None:
    assert states(hubs.package_index(True, False), hubs.package_index(False, True)) == ["ok", "ok"]
    assert is_helpful(hubs.package_index(False, False))


class Answers(BaseHTTPRequestHandler):
    """A hub that answers with `code`, and notes what it was asked."""

    code = 200
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    """Both hubs, on the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Answers.code = 200
    Answers.asked.clear()
    yield Answers
    server.shutdown()
    server.server_close()


def test_hubs_that_answer(answering: type[Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(*hubs.network(Settings())) == ["ok", "ok"]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert states(*hubs.network(Settings())) == ["ok", "ok"]
    tokens = [token for path, token in answering.asked if "whoami" in path]
    assert tokens == ["Bearer hf_secret"]


@pytest.mark.parametrize("code", [401, 500])
def test_a_hub_that_refuses(answering: type[Answers], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answering.code = code
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    default, other = hubs.network(Settings())
    assert states(default, other) == ["failure", "warning"]
    assert ("refuses the token" in default.detail) is (code == 401)
    assert str(code) in default.detail


def test_a_hub_that_is_out_of_reach_fails_only_if_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert states(*hubs.network(Settings())) == ["failure", "warning"]
    assert states(*hubs.network(Settings(default_source="ms"))) == ["warning", "failure"]


# -- around the program


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        check = shell.port(number)
    assert check.state == "warning" and str(number) in check.detail and "--port" in str(check.fix)
    assert shell.port(number).state == "ok"


def test_a_port_that_is_not_ours() -> None:
    check = shell.port(80, "192.0.2.1")  # an address that no machine has
    assert check.state == "failure" and check.fix


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completions_that_are_missing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HOMEBREW_PREFIX", str(tmp_path / "brew"))
    monkeypatch.setattr(shell, "FILES", {n: [p for p in f if not p.startswith("/usr")] for n, f in shell.FILES.items()})
    check = shell.completions(f"/usr/bin/{name}")
    assert check.state == "warning" and f"metalctl completion {name}" in str(check.fix)
    target = Path(shell.FILES[name][0].replace("~", str(tmp_path)))
    target.parent.mkdir(parents=True)
    target.touch()
    assert shell.completions(f"/usr/bin/{name}").state == "ok"


def test_completions_by_the_startup_file_and_for_other_shells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".zshrc").write_text('eval "$(metalctl completion zsh)"\n')
    assert states(shell.completions("/bin/zsh"), shell.completions("/bin/tcsh"), shell.completions("")) == ["ok"] * 3
