"""The house holds: arrows between the folders, what is installed, and what the library never does."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(path for folder in ("metalctl", "engine", "kernels") for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_from_the_surface_to_the_engine_to_the_kernels(path):
    folder = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        assert not within(name, "engine") and not within(name, "kernels") and not within(name, "tests")
        if folder == "engine" and within(name, "metalctl"):
            assert within(name, "metalctl.engine") or within(name, "metalctl.kernels")
        if folder == "kernels" and within(name, "metalctl"):
            assert within(name, "metalctl.kernels")
        if folder == "kernels":
            assert not any(within(name, other) for other in ("mlx_lm", "mlx_vlm", "transformers", "typer", "rich"))


@pytest.mark.parametrize(
    "name",
    ["engine/cache/block_manager.py", "engine/cache/block_pool.py", "engine/cache/free_runs.py", "engine/scheduler.py",
     "engine/sequence.py", "engine/text_stream.py"],
)  # fmt: skip
def test_host_bookkeeping_needs_no_arrays(name):
    assert not any(within(module, "mlx") or within(module, "numpy") for module in imports(ROOT / name))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_engine_neither_prints_nor_exits(path):
    if path.relative_to(ROOT).parts[0] == "metalctl":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "exit", "sys.exit", "quit", "os._exit"), f"{path}:{node.lineno}"


def test_every_package_is_named_and_nothing_else_is_installed():
    installed = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {"metalctl": "metalctl", "engine": "metalctl.engine", "kernels": "metalctl.kernels"}
    found = set()
    for folder, package in folders.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *parts)))
    assert installed == found
    assert all(name == "metalctl" or name.startswith("metalctl.") for name in installed)


def test_the_readme_has_the_two_commands():
    readme = (ROOT / "README.md").read_text().splitlines()
    assert "pip install '.[cpu]' && metalctl chat smollm2 \"What is the capital of France?\"" in readme
    assert "pip install -e '.[cpu,dev]' && pytest" in readme
