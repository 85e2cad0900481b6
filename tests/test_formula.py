"""The Homebrew formula and its lock: current, complete, and nothing in them but wheels by their hashes."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ]+) --hash=sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "Formula" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def locked(generate: ModuleType) -> dict[str, str]:
    """Versions by canonical name."""
    lines = [line for line in generate.LOCK.read_text().splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {canonicalize_name(match["name"]): match["version"] for match in found if match}


def test_the_formula_is_what_the_generator_writes(generate: ModuleType) -> None:
    assert generate.FORMULA.read_text() == generate.formula(), "run: python Formula/generate.py"


def test_the_lock_is_made_of_the_dependencies_that_the_project_has(generate: ModuleType) -> None:
    digest = generate.digest(generate.project()["dependencies"])
    assert digest in generate.LOCK.read_text(), "run: python Formula/generate.py --lock"


def test_every_dependency_on_a_mac_is_locked_at_a_version_that_will_do(
    generate: ModuleType, locked: dict[str, str]
) -> None:
    for text in [*generate.project()["dependencies"], generate.BUILD_BACKEND]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(generate.TARGET):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)], prereleases=True)
    assert locked["mlx"] == locked["mlx-metal"]
    assert not {"mlx-cpu", "mlx-cuda-13", "torch"} & locked.keys()


def test_a_lock_that_lacks_a_dependency_would_be_noticed(generate: ModuleType) -> None:
    dependencies = generate.project()["dependencies"]
    assert generate.digest(dependencies) == generate.digest(list(reversed(dependencies)))
    assert generate.digest(dependencies) != generate.digest([*dependencies, "one-more>=1"])


def test_no_address_of_anything_is_in_it(generate: ModuleType) -> None:
    for path in (generate.FORMULA, generate.LOCK, ROOT / "Formula" / "generate.py"):
        assert not re.search(r"https?://", path.read_text()), path


def test_what_the_formula_installs_is_there(generate: ModuleType) -> None:
    text = generate.FORMULA.read_text()
    for path in [*re.findall(r'"((?:completions|Formula)/[^"]+)"', text), "Formula/requirements.txt"]:
        assert (ROOT / path).is_file(), path
    assert "--require-hashes" in text and "--only-binary=:all:" in text


def test_the_style_that_brew_asks_for(generate: ModuleType) -> None:
    text = generate.FORMULA.read_text()
    [desc] = re.findall(r'desc "(.*)"', text)
    assert len(f"metalctl: {desc}") <= 80
    assert not desc.startswith(("A ", "An ", "The ")) and not desc.endswith(".") and "metalctl" not in desc.lower()
    assert max(map(len, text.splitlines())) <= 118
    order = [
        "  desc ",
        "  url ",
        "  license ",
        "  head ",
        "  depends_on ",
        "  def install",
        "  service do",
        "  test do",
    ]
    places = [text.index(f"\n{part}") for part in order]
    assert places == sorted(places)


@pytest.mark.skipif(not shutil.which("ruby"), reason="ruby is not installed")
def test_ruby_reads_it(generate: ModuleType) -> None:
    done = subprocess.run(["ruby", "-wc", str(generate.FORMULA)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, ""), done.stderr


STUB = """
require "pathname"
class Formula
  SEEN = {}
  def self.method_missing(name, *arguments, **named, &block) = SEEN[name] = block || arguments
  def self.respond_to_missing?(*) = true
  def self.test(&block) = SEEN[:test] = block
  def system(*words) = puts(words.join(" "))
  %w[libexec buildpath bin bash_completion zsh_completion fish_completion].each do |name|
    define_method(name) { Pathname(name) }
  end
end
class Pathname
  def install(what) = puts("#{self} gets #{what}")
  alias install_symlink install
end
load ARGV[0]
abort "no test" unless Formula::SEEN[:test] && Formula::SEEN[:service]
puts Formula::SEEN[:url].first
Metalctl.new.install
"""


@pytest.mark.skipif(not shutil.which("ruby"), reason="ruby is not installed")
def test_ruby_runs_it_and_it_installs_wheels_only(generate: ModuleType) -> None:
    command = ["ruby", "-e", STUB, str(generate.FORMULA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    url, venv, wheels, own, *rest = done.stdout.splitlines()
    assert url == f"file://{ROOT}"
    assert venv == f"python{generate.PYTHON} -m venv libexec"
    assert wheels.endswith("--require-hashes --only-binary=:all: --requirement=Formula/requirements.txt")
    assert own.endswith("--no-index --no-build-isolation buildpath")
    assert rest[0] == "bin gets libexec/bin/metalctl" and len(rest) == 4


@pytest.mark.slow
def test_the_index_still_has_every_wheel(generate: ModuleType, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--require-hashes",
        "--only-binary=:all:", f"--platform={generate.PLATFORM}", f"--python-version={generate.PYTHON}",
        "--implementation=cp", f"--target={tmp_path}", f"--requirement={generate.LOCK}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
