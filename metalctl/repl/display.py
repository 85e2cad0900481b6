"""How an answer appears while it comes: on a terminal, in a pipe, or as events."""

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.style import Style

from metalctl.output import Output
from metalctl.reasoning import Piece
from metalctl.repl.markdown import MarkdownStream
from metalctl.repl.wrap import Wrapper, printable

_DIM = Style(dim=True)


def renders(chosen: bool | None) -> bool:
    """Whether Markdown is rendered: as chosen, else on a terminal."""
    return sys.stdout.isatty() if chosen is None else chosen


class Display(Protocol):
    """Used as a context: `show` every piece inside; leaving it writes what is held back."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, piece: Piece) -> None: ...


class EventDisplay:
    """One NDJSON event a piece; with `stream` off nothing, as the envelope at the end has it all."""

    def __init__(self, output: Output, stream: bool):
        self._output, self._stream = output, stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, piece: Piece) -> None:
        if self._stream:
            self._output.event("delta", **{piece.kind: piece.text})


class TextDisplay:
    """The answer on stdout, the reasoning dim on stderr.

    `markdown` renders the answer, for terminals only. Until the first piece comes, a spinner says that the prompt is
    being read.
    """

    def __init__(self, output: Output, markdown: bool):
        self._output = output
        self._answer = MarkdownStream(output.stdout) if markdown else None
        self._reasoning: Wrapper | None = None
        self._spinner = output.stderr.status("[dim]reading the prompt[/]") if output.interactive else None
        self._ends_line = True

    def __enter__(self) -> Self:
        if self._spinner:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_spinner()
        self._end_reasoning()
        if self._answer:
            self._answer.finish()
        elif not self._ends_line:
            self._output.text()

    def show(self, piece: Piece) -> None:
        self._stop_spinner()
        if piece.kind == "reasoning":
            self._show_reasoning(piece.text)
            return
        self._end_reasoning()
        if self._answer:
            self._answer.feed(piece.text)
        else:
            self._output.text(printable(piece.text) if sys.stdout.isatty() else piece.text, end="")
            self._ends_line = piece.text.endswith("\n")

    def _show_reasoning(self, text: str) -> None:
        if self._output.quiet:
            return
        self._reasoning = self._reasoning or Wrapper(self._output.stderr)
        self._reasoning.write(printable(text), _DIM)

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning.end_line()
            self._reasoning.newline()
            self._reasoning = None

    def _stop_spinner(self) -> None:
        if self._spinner:
            self._spinner.stop()
            self._spinner = None
