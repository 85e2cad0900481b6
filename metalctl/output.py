"""What goes to the terminal: data on stdout, notes for people on stderr, as text or as JSON."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from metalctl.engine.errors import MetalctlError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1


@dataclass
class Output:
    """The one way to say something. Commands hold one; the engine never does.

    stdout carries data: with `json` one envelope (or NDJSON events), else plain text. Everything meant for a person
    goes to stderr and is silent under `quiet`, errors excepted.
    """

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    command: str = ""
    _consoles: dict[str, "Console"] = field(default_factory=dict, repr=False)

    @property
    def stdout(self) -> "Console":
        return self._console("stdout")

    @property
    def stderr(self) -> "Console":
        return self._console("stderr")

    @property
    def interactive(self) -> bool:
        """Whether progress displays and questions make sense: stderr is a terminal and nobody asked for JSON."""
        return sys.stderr.isatty() and not self.json and not self.quiet

    def result(self, data: Any) -> None:
        """The command's answer as JSON. Does nothing without `--json`: the command has rendered its text itself."""
        if self.json:
            self._line({"schema": SCHEMA, "command": self.command, "status": "ok", "data": data})

    def event(self, name: str, **fields: Any) -> None:
        """One line of a stream of NDJSON events; the last of a stream is named "done"."""
        if self.json:
            self._line({"schema": SCHEMA, "command": self.command, "event": name, **fields})

    def error(self, error: MetalctlError) -> None:
        if self.json:
            body = {"type": error.type, "message": error.message, "hint": error.hint}
            self._line({"schema": SCHEMA, "command": self.command, "status": "error", "error": body})
        self.stderr.print("error:", style="bold red", end=" ")
        self.stderr.print(error.message, highlight=False, markup=False, soft_wrap=True)
        if error.hint:
            self.stderr.print("hint:", style="bold cyan", end=" ")
            self.stderr.print(error.hint, highlight=False, markup=False, soft_wrap=True)

    def text(self, text: str = "", end: str = "\n") -> None:
        """Plain data on stdout; nothing with `--json`."""
        if not self.json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def note(self, message: str) -> None:
        """A remark for a person."""
        if not self.quiet:
            self.stderr.print(message, style="dim", highlight=False, markup=False)

    def detail(self, message: str) -> None:
        """A remark that only `-v` shows."""
        if self.verbose:
            self.note(message)

    def warn(self, message: str) -> None:
        if not self.quiet:
            self.stderr.print("warning:", style="bold yellow", end=" ")
            self.stderr.print(message, highlight=False, markup=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Rows for a person on stdout; cut to the terminal's width there, whole in a pipe. `right` aligns columns."""
        if self.json:
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.stdout.print(table)

    def _line(self, record: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()

    def _console(self, stream: str) -> "Console":
        # Made anew when the stream was replaced, as test runners do.
        target = getattr(sys, stream)
        console = self._consoles.get(stream)
        if console is None or console.file is not target:
            from rich.console import Console

            console = Console(file=target, force_terminal=_coloured(target), emoji=False)
            if not console.is_terminal:
                console.width = 10_000  # in a pipe nothing is cut
            self._consoles[stream] = console
        return console


def _coloured(stream: TextIO) -> bool:
    """Colours are for terminals, unless FORCE_COLOR says otherwise; rich itself sees to NO_COLOR."""
    return stream.isatty() or os.environ.get("FORCE_COLOR", "").lower() not in ("", "0", "false")


def human_bytes(count: float | None) -> str:
    """Bytes as a person reads them, in powers of 1000 as disks and hubs count them: `92 MB`."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
