"""Records the demonstration in the README: runs real commands and writes what they print, as text and as a picture.

`python docs/demo/record.py`, where metalctl is installed and smollm2 has been pulled. With `--bench`, on a machine that
does nothing else, it also writes what bench prints into the README; `--peer mlx-lm` compares.
"""

import argparse
import os
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
README = FOLDER.parents[1] / "README.md"
COLUMNS = 92
COMMANDS = [
    'metalctl chat smollm2 "What is the capital of France?" --stats',
    "metalctl list",
    "metalctl show smollm2",
    "metalctl embed smollm2 'a cat' 'a dog' --json | jq -c '.data.embeddings[].embedding[:4]'",
    "metalctl doctor smollm2 | tail -n 6",
]


def recorded(command: str) -> str:
    """What a person would see: both streams, coloured."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=True,
    )
    return done.stdout


def demonstration() -> tuple[str, str]:
    """The commands and what they print, as a picture and as text."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in COMMANDS:
            console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
            console.print(Text.from_ansi(recorded(command).rstrip("\n")))
            console.print()
    svg = console.export_svg(title="metalctl", clear=False)
    # The picture is to need nothing from elsewhere.
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    return _trimmed(svg), _trimmed(console.export_text())


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def write_bench(peers: list[str]) -> None:
    """Put a measurement into the README."""
    words = ["metalctl", "bench", "smollm2", "-p", "128", "-n", "64"]
    words += [word for peer in peers for word in ("--compare", peer)]
    printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    printed = re.sub(r"Linux-\S+-(x86_64|aarch64)\S*", r"Linux \1", printed)  # the kernel's name tells nobody anything
    begin, end = "<!-- bench: begin -->\n", "<!-- bench: end -->"
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    block = f"```console\n$ {' '.join(words)}\n{printed}\n```\n"
    README.write_text(before + begin + block + end + rest.partition(end)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--peer", action="append", default=[], help="mlx-lm or llama.cpp")
    arguments = parser.parse_args()
    svg, text = demonstration()
    (FOLDER / "demo.svg").write_text(svg, encoding="utf-8")
    (FOLDER / "demo.txt").write_text(text, encoding="utf-8")
    if arguments.bench:
        write_bench(arguments.peer)


if __name__ == "__main__":
    main()
