"""Writes the Homebrew formula beside this file, and with `--lock` also the list of wheels that it installs.

`--lock` asks pip, with whatever index it is set up for, what the project's dependencies resolve to on arm64 macOS, and
keeps versions and hashes but no addresses.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
FORMULA = FOLDER / "metalctl.rb"
LOCK = FOLDER / "requirements.txt"

PYTHON = "3.13"
PLATFORM = "macosx_14_0_arm64"
MACOS = "sonoma"  # 14, the oldest that MLX has wheels for
BUILD_BACKEND = "setuptools"  # puts metalctl's own files in place; there is nothing in them to compile

# What markers in requirements are to see: pip's options choose another platform's wheels, and do not reach markers.
TARGET = {
    "implementation_name": "cpython",
    "implementation_version": f"{PYTHON}.0",
    "os_name": "posix",
    "platform_machine": "arm64",
    "platform_python_implementation": "CPython",
    "platform_release": "23.0.0",
    "platform_system": "Darwin",
    "platform_version": "",
    "python_full_version": f"{PYTHON}.0",
    "python_version": PYTHON,
    "sys_platform": "darwin",
}
_PIP = """\
import sys
import pip._vendor.packaging.markers as markers
markers.default_environment = lambda: dict({target})
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

_LOCK = """\
# Every wheel that the formula installs, for Python {python} on arm64 macOS.
# Written by: python Formula/generate.py --lock
# Made of dependencies with the sha256 {digest}
{lines}
"""

_FORMULA = """\
# Written by Formula/generate.py, and not by hand.
require "etc"

class Metalctl < Formula
  desc "{desc}"
  url "file://#{{File.expand_path("..", __dir__)}}", using: :git, tag: "v{version}"
  license "Apache-2.0"
  head "file://#{{File.expand_path("..", __dir__)}}", using: :git, branch: "main"

  depends_on arch: :arm64
  depends_on macos: :{macos}
  depends_on "python@{python}"

  # The extension modules in wheels have no room for the long names that Homebrew would write into them.
  preserve_rpath

  # Resources would need the address of every wheel, and with it of one package index. Here pip takes the wheels from
  # the index that it is set up for, which may be a company's mirror, and --require-hashes makes sure that they are
  # those of Formula/requirements.txt. Nothing is compiled.
  def install
    use_pip_settings_of_the_user
    system "python{python}", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-deps", "--no-compile"]
    system(*pip, "--require-hashes", "--only-binary=:all:", "--requirement=Formula/requirements.txt")
    system(*pip, "--no-index", "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/metalctl"
    bash_completion.install "completions/metalctl.bash" => "metalctl"
    zsh_completion.install "completions/_metalctl"
    fish_completion.install "completions/metalctl.fish"
  end

  # Homebrew builds with another home folder and without PIP_ variables.
  def use_pip_settings_of_the_user
    home = Pathname(Etc.getpwuid.dir)
    files = [".config/pip/pip.conf", "Library/Application Support/pip/pip.conf", ".pip/pip.conf"]
    config = files.map {{ |name| home/name }}.find(&:exist?)
    ENV["PIP_CONFIG_FILE"] = config.to_s if config
    ENV["PIP_INDEX_URL"] = ENV["HOMEBREW_PIP_INDEX_URL"] if ENV["HOMEBREW_PIP_INDEX_URL"]
  end

  service do
    run [opt_bin/"metalctl", "serve", "--cached"]
    keep_alive true
    working_dir var
    log_path var/"log/metalctl.log"
    error_log_path var/"log/metalctl.log"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/metalctl --version")
    aliases = shell_output("#{{bin}}/metalctl list --aliases --offline --json")
    assert_equal "ok", JSON.parse(aliases)["status"]
    assert_equal (bash_completion/"metalctl").read, shell_output("#{{bin}}/metalctl completion bash")
    assert_match "has not been pulled", shell_output("#{{bin}}/metalctl chat smollm2 hello --offline 2>&1", 3)
  end
end
"""


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def digest(dependencies: list[str]) -> str:
    """Names the dependencies that a lock was made of."""
    return hashlib.sha256("\n".join(sorted(dependencies)).encode()).hexdigest()


def formula() -> str:
    """The formula's text."""
    scope: dict[str, str] = {}
    exec((ROOT / "metalctl" / "version.py").read_text(encoding="utf-8"), scope)
    return _FORMULA.format(
        desc="Run language models on Apple Silicon, from a prompt to a server",
        version=scope["__version__"],
        python=PYTHON,
        macos=MACOS,
    )


def lock() -> str:
    """The lock's text, as the index resolves the dependencies now."""
    dependencies = project()["dependencies"]
    lines = []
    for item in sorted(_resolve([*dependencies, BUILD_BACKEND]), key=lambda item: item["metadata"]["name"].lower()):
        wheel = item["download_info"]
        assert wheel["url"].endswith(".whl"), wheel["url"]
        found = item["metadata"]
        lines.append(f"{found['name']}=={found['version']} --hash=sha256:{wheel['archive_info']['hashes']['sha256']}")
    return _LOCK.format(python=PYTHON, digest=digest(dependencies), lines="\n".join(lines))


def _resolve(requirements: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-c", _PIP.format(target=TARGET), "install", "--dry-run", "--ignore-installed", "--quiet",
            "--only-binary=:all:", f"--platform={PLATFORM}", f"--python-version={PYTHON}", "--implementation=cp",
            f"--target={folder}/none", f"--report={report}", *requirements,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", action="store_true", help="resolve the dependencies anew")
    if parser.parse_args().lock:
        LOCK.write_text(lock(), encoding="utf-8")
    FORMULA.write_text(formula(), encoding="utf-8")


if __name__ == "__main__":
    main()
