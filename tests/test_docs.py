"""What the pages say can be typed, and what they point to is there."""

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from metalctl.completion.surface import Command, surface

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = re.compile(r"(?:^|[|&;({] ?|\$ )(metalctl(?: [^|&;\n`]*)?)", re.MULTILINE)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of code."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def typed(path: Path) -> Iterator[list[str]]:
    """Every command line of metalctl in a page, in blocks and in the running text."""
    text = path.read_text()
    shell = [block for language, block in blocks(text) if language in ("", "sh", "bash", "console")]
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(metalctl [^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*lines, *(re.sub(r"\s+", " ", part) for part in inline)]:
        for found in EXAMPLES.findall(re.sub(r"\s+#.*", "", line)):
            try:
                yield shlex.split(found)
            except ValueError:  # a quotation that goes on elsewhere; its options have been seen by then
                yield found.split("'")[0].split('"')[0].split()


def problem(words: list[str], commands: dict[str, Command]) -> str | None:
    before = [word for word in words[1:] if not word.startswith("-")]
    name = before[0] if before and before[0] in commands else None
    if before and name is None and before[0].islower() and words[1] == before[0]:
        return f"there is no command {before[0]}"
    known = {
        each for command in (commands[""], commands[name or ""]) for option in command.options for each in option.names
    }
    options = [word.split("=")[0] for word in words[1:] if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)]
    unknown = [option for option in options if option not in known | {"--version"} and option.startswith("--")]
    return f"{name} has no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_in_the_pages_exist_with_their_options(path: Path) -> None:
    root, all_commands = surface()
    commands = {"": root} | {command.name: command for command in all_commands}
    problems = {shlex.join(words): problem(words, commands) for words in typed(path)}
    assert {line: text for line, text in problems.items() if text} == {}


def test_a_wrong_option_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Type `metalctl chat --no-such`.\n\n```sh\necho x | metalctl frobnicate y\nmetalctl pull z\n```\n")
    root, all_commands = surface()
    commands = {"": root} | {command.name: command for command in all_commands}
    assert [problem(words, commands) is None for words in typed(page)] == [False, True, False]


def test_the_readme_shows_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert [command.name for command in surface()[1] if f"metalctl {command.name}" not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_what_a_page_points_to_is_there(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_json_in_a_page_is_json(path: Path) -> None:
    for language, block in blocks(path.read_text()):
        if language == "json":
            for line in block.splitlines() if "\n{" in block or block.count("\n") == 1 else [block]:
                json.loads(line)


def test_the_demonstration_needs_nothing_from_elsewhere() -> None:
    picture = (ROOT / "docs" / "demo" / "demo.svg").read_text()
    ElementTree.fromstring(picture)
    assert not re.search(r"url\(['\"]?https?:|href=['\"]https?:|@import", picture)
    assert "metalctl" in (ROOT / "docs" / "demo" / "demo.txt").read_text()
