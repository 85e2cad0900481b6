"""Compiling the CPU kernels: once, under a lock, and never taken for good when they are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metalctl.kernels.cpu import build as building
from metalctl.kernels.cpu.build import BuildError, build
from tests.kernels.cpu_library import require_compiler

FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "fake 1.0"; exit 0; }
echo run >> "$FAKE_LOG"
while [ "$1" != -o ]; do shift; done
sleep 0.05
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line into a log and makes a file; returns the log."""
    program = tmp_path / "bin" / "c++"
    program.parent.mkdir()
    program.write_text(FAKE_COMPILER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    return log


def runs(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_compiles_once_with_one_notice(compiler: Path, tmp_path: Path) -> None:
    notices: list[str] = []
    first = build(tmp_path / "cache", notices.append)
    count = runs(compiler)
    assert first.fresh
    assert count > 5
    again = build(tmp_path / "cache", notices.append)
    assert not again.fresh
    assert again.library == first.library
    assert runs(compiler) == count
    assert len(notices) == 1


def test_a_damaged_library_is_compiled_anew(compiler: Path, tmp_path: Path) -> None:
    first = build(tmp_path / "cache", print)
    first.library.write_bytes(b"cut off")
    assert build(tmp_path / "cache", print).fresh
    assert first.library.read_text() == "compiled\n"


def test_the_key_depends_on_sources_mlx_and_processor(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {building.key("c++")}
    monkeypatch.setattr(building, "version", lambda name: "0.0")
    keys.add(building.key("c++"))
    monkeypatch.setattr(building, "_cpu", lambda: "another")
    keys.add(building.key("c++"))
    (tmp_path / "a.cpp").write_text("int x;")
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    keys.add(building.key("c++"))
    (tmp_path / "a.cpp").write_text("int y;")
    keys.add(building.key("c++"))
    keys.add(building.key("c++", every=True))
    assert len(keys) == 6


def test_two_processes_compile_once(compiler: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from metalctl.kernels.cpu.build import build\n"
        "print(build(Path(sys.argv[1]), lambda message: None).fresh)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert answers == ["False", "True"]


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(tmp_path / "cache", print)


def test_what_the_compiler_says_is_passed_on_and_nothing_is_left(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "c++").write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    with pytest.raises(BuildError, match="no such thing"):
        build(tmp_path / "cache", print)
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_a_cache_that_cannot_be_written_is_said(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match="cache"):
        build(tmp_path / "cache", print)


def test_the_real_sources_compile_without_warnings() -> None:
    require_compiler()
    source = building.SOURCES / "pool.cpp"
    flags = [flag for flag in building._COMMON if flag != "-w"]
    done = subprocess.run(
        ["c++", *flags, "-Wall", "-Wextra", "-fsyntax-only", str(source)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
