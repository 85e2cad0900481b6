"""What is released: an sdist, the wheel that is built of it, and the program in an empty environment.

All of it is slow, and asks the package index. Only files that git knows are built, as in a fresh clone.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from metalctl.version import __version__

ROOT = Path(__file__).parents[1]
LIMIT = 1500  # seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT)]


def run(*command: str | Path, **options: object) -> str:
    """Standard output of a program that must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def sdist(work: Path) -> Path:
    """Built from the committed files alone."""
    source = work / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    run(sys.executable, "-m", "venv", work / "builder")
    python = work / "builder" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--sdist", "--outdir", work / "dist", source)
    [path] = (work / "dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(work: Path, sdist: Path) -> Path:
    """Built from the sdist."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / "dist", sdist)
    [path] = (work / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(work: Path, wheel: Path) -> Path:
    """`metalctl` in an environment where nothing else was installed, far from the sources."""
    run(sys.executable, "-m", "venv", work / "venv")
    python = work / "venv" / "bin" / "python"
    extra = "[cpu]" if sys.platform == "linux" else ""
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}{extra}")
    run(python, "-m", "pip", "check")
    return work / "venv" / "bin" / "metalctl"


@pytest.fixture(scope="module")
def environment(work: Path) -> dict[str, str]:
    """A new user's: an empty home folder, and how the index is reached."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("METALCTL_", "PYTHON", "VIRTUAL"))
    }
    config = run(sys.executable, "-m", "pip", "config", "list")
    (work / "pip.conf").write_text(_as_file(config))
    return kept | {"HOME": str(work / "home"), "PIP_CONFIG_FILE": str(work / "pip.conf")}


def _as_file(listed: str) -> str:
    """The settings that `pip config list` shows, those of the user among them, as a file."""
    found = re.findall(r"^global\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in found)


def answers(program: Path, environment: dict[str, str], work: Path, *arguments: str) -> str:
    (work / "home").mkdir(exist_ok=True)
    return run(program, *arguments, cwd=work / "home", env=environment)


def test_both_hold_what_they_should(sdist: Path, wheel: Path, work: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = [path.relative_to(work / "source").as_posix() for path in (work / "source").rglob("*") if path.is_file()]
    tracked = [name for name in tracked if ".egg-info" not in name]
    needed = {
        name for name in tracked if name.split("/")[0] in ("metalctl", "engine", "kernels", "completions", "tests")
    }
    assert needed <= inside, needed - inside
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= inside

    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    for name in needed - {name for name in needed if name.startswith(("tests/", "completions/"))}:
        assert (name if name.startswith("metalctl/") else f"metalctl/{name}") in files, name
    tops = {name.split("/")[0] for name in files}
    assert tops == {"metalctl", f"metalctl-{__version__}.dist-info"}
    assert wheel.name == f"metalctl-{__version__}-py3-none-any.whl"


def test_the_version_is_in_the_changelog() -> None:
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_it_tells_its_version(program: Path, environment: dict[str, str], work: Path) -> None:
    data = json.loads(answers(program, environment, work, "--version", "--json"))["data"]
    assert data["version"] == __version__ and data["mlx"]


def test_a_new_user_gets_an_answer(program: Path, environment: dict[str, str], work: Path) -> None:
    assert "Paris" in answers(program, environment, work, "chat", "smollm2", "What is the capital of France?")


def test_doctor_finds_nothing_wrong_with_machine_and_model(
    program: Path, environment: dict[str, str], work: Path
) -> None:
    data = json.loads(answers(program, environment, work, "doctor", "smollm2", "--json"))["data"]
    assert data["healthy"], data
    names = [check["name"] for check in data["checks"]]
    assert names[-1] == "self-test"


def test_it_embeds(program: Path, environment: dict[str, str], work: Path) -> None:
    data = json.loads(answers(program, environment, work, "embed", "smollm2", "one text", "--json"))["data"]
    assert data


def test_it_serves_and_stops(program: Path, environment: dict[str, str], work: Path) -> None:
    command = [str(program), "serve", "smollm2", "--port", "0", "--json"]
    server = subprocess.Popen(
        command, cwd=work / "home", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert server.stdout is not None
        url, seen = None, []
        deadline = time.monotonic() + 120
        while url is None and time.monotonic() < deadline:
            line = server.stdout.readline()
            seen.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            url = found.group() if found else None
        assert url, seen
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["message"]["content"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
