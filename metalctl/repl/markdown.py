"""Markdown rendered while it is still being written: each piece goes out once, and nothing is drawn again.

Rendering the whole answer again and again, as a live display does, flickers and repeats or loses lines as soon as the
answer is longer than the window. Here blocks are recognised at the beginning of a line and spans as soon as they are
closed; a table is the only block that waits for its end.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.style import Style

from metalctl.repl.inline import PLAIN, Styles, parse
from metalctl.repl.wrap import Wrapper, printable

if TYPE_CHECKING:
    from rich.console import Console

_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+")
_RULE = re.compile(r" {0,3}([-*_])\s*(?:\1\s*){2,}$")
_BULLET = re.compile(r"(\s*)[-*+]\s+")
_NUMBER = re.compile(r"(\s*)(\d{1,9}[.)])\s+")
_QUOTE = re.compile(r" {0,3}>\s?")
_TABLE = re.compile(r"\s*\|")
_TABLE_RULE = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")

# Beginnings of a line that may still turn into one of the above.
_OPEN = re.compile(r"\s*(?:#{0,6}|[-*+_][-*_\s]*|\d{1,9}[.)]?|`{1,2}|~{1,2}|>)?$")

_STYLES = {
    "bold": Style(bold=True),
    "italic": Style(italic=True),
    "strike": Style(strike=True),
    "code": Style(color="cyan"),
    "link": Style(underline=True),
    "url": Style(dim=True),
}
_DIM = Style(dim=True)
_CODE_CONTEXT = 60  # lines of a code block that are read to colour its last one
_HEAD = Style(bold=True, color="magenta")


class MarkdownStream:
    """`feed` it the answer piece by piece, then `finish` it. Writes to `console`."""

    def __init__(self, console: "Console", width: Callable[[], int] | None = None):
        self._console = console
        self._out = Wrapper(console, width)
        self._line = ""  # of the present line, what has not been handled yet
        self._block_known = False  # whether the present line's kind has been decided
        self._base = Style.null()
        self._before = " "
        self._fence: str | None = None  # the marker that closes the code block that is open
        self._lexer = ""
        self._code: list[str] = []  # lines of the open code block
        self._table: list[str] = []
        self._unicode = console.encoding.lower().startswith("utf")

    def feed(self, text: str) -> None:
        self._line += printable(text).expandtabs(4)
        while "\n" in self._line:
            line, _, self._line = self._line.partition("\n")
            self._end_line(line)
        self._partial_line()

    def finish(self) -> None:
        """Write what is still held back, and end the line."""
        if self._line:
            line, self._line = self._line, ""
            self._end_line(line)
        self._end_table()
        self._out.end_line()

    # A line that is complete

    def _end_line(self, line: str) -> None:
        if self._fence is not None:
            self._code_line(line)
        elif not self._block_known and (self._table or _TABLE.match(line)):
            self._table_line(line)
        elif not self._block_known and (fence := _FENCE.match(line)):
            self._fence, self._lexer, self._code = fence[1], fence[2], []
        elif not self._block_known and _RULE.match(line):
            self._out.write(("─" if self._unicode else "-") * 40 + "\n", _DIM)
        else:
            self._text(line, ended=True)
            self._out.newline()
        self._block_known = False

    def _code_line(self, line: str) -> None:
        assert self._fence is not None
        stripped = line.strip()
        if stripped and set(stripped) == {self._fence[0]} and len(stripped) >= len(self._fence):
            self._fence = None
            return
        self._code.append(line)
        for text, style in _highlight(self._console, self._code, self._lexer):
            self._out.verbatim(text, style)
        self._out.newline()

    def _table_line(self, line: str) -> None:
        if not _TABLE.match(line):
            self._end_table()
            self._end_line(line)
            return
        self._table.append(line)
        if len(self._table) == 2 and not _TABLE_RULE.match(line):
            self._end_table()

    def _end_table(self) -> None:
        """Draw the table that was collected, or its lines as text when they turned out to be none."""
        lines, self._table = self._table, []
        if len(lines) > 1 and _TABLE_RULE.match(lines[1]):
            from rich.markdown import Markdown

            self._console.print(Markdown("\n".join(line.strip() for line in lines)))
            return
        for line in lines:
            self._text(line, ended=True)
            self._out.newline()
            self._block_known = False

    # A line that is still being written

    def _partial_line(self) -> None:
        if self._fence is not None or self._table or not self._line:
            return
        if not self._block_known and self._may_be_block():
            return
        self._line = self._text(self._line, ended=False)

    def _may_be_block(self) -> bool:
        line = self._line
        return bool(_OPEN.match(line) or _TABLE.match(line) or _FENCE.match(line) or _RULE.match(line))

    def _text(self, text: str, ended: bool) -> str:
        """Write what is certain of a line of text. Returns the rest."""
        if not self._block_known:
            text = self._begin_block(text)
            self._block_known, self._before = True, " "
        spans, rest = parse(text, ended, PLAIN, self._before)
        for span in spans:
            self._out.write(span.text, self._base + _style(span.styles))
            self._before = span.text[-1]
        return rest

    def _begin_block(self, text: str) -> str:
        """Write what a line of its kind begins with. Returns the line without it."""
        self._base = Style.null()
        if quote := _QUOTE.match(text):
            bar = "│ " if self._unicode else "| "
            self._out.verbatim(bar, _DIM)
            self._out.indent(bar, _DIM)
            self._base = Style(italic=True)
            return text[quote.end() :]
        if heading := _HEADING.match(text):
            self._base = _HEAD + Style(underline=len(heading[1]) == 1)
            return text[heading.end() :]
        if bullet := _BULLET.match(text):
            return self._item(bullet[1], "•" if self._unicode else "-", text[bullet.end() :])
        if number := _NUMBER.match(text):
            return self._item(number[1], number[2], text[number.end() :])
        leading = len(text) - len(text.lstrip(" "))
        self._out.verbatim(text[:leading], Style.null())
        self._out.indent(text[:leading])
        return text[leading:]

    def _item(self, margin: str, mark: str, text: str) -> str:
        self._out.verbatim(f"{margin}{mark} ", Style(color="yellow"))
        self._out.indent(" " * (len(margin) + len(mark) + 1))
        return text


def _style(styles: Styles) -> Style:
    return Style.combine(_STYLES[name] for name in sorted(styles)) if styles else Style.null()


def _highlight(console: "Console", lines: list[str], lexer: str) -> list[tuple[str, Style]]:
    """The last of `lines` in colours, read together with those above it."""
    lines = lines[-_CODE_CONTEXT:]
    if not lexer or not lines[-1].strip():
        return [(lines[-1], Style.null())]
    from rich.syntax import Syntax

    code = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight("\n".join(lines))
    last = code.split("\n", allow_blank=False)[len(lines) - 1]
    last.rstrip_end(len(lines[-1]))
    return [(segment.text, _foreground(segment.style)) for segment in last.render(console) if segment.text != "\n"]


def _foreground(style: Style | None) -> Style:
    return Style(color=style.color, bold=style.bold, italic=style.italic, dim=style.dim) if style else Style.null()
