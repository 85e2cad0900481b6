"""Styled text written as it comes, broken between words, never moving the cursor back."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

# A model's control characters are shown, not obeyed: they could move the cursor or retitle the window.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"} | {13: None, 127: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """`text` with its control characters made visible, tabs and line ends excepted."""
    return text.translate(_CONTROLS)


class Wrapper:
    """Writes to a terminal and keeps track of the column.

    Nothing that was written is ever rewritten, so that long answers, resized windows and characters of doubtful width
    can cost a line break in the wrong place and nothing more. Only the word that is being spelt is held back.
    """

    def __init__(self, console: "Console", width: Callable[[], int] | None = None):
        self._console = console
        self._width = width or (lambda: _terminal_width(console))
        self._word: list[tuple[str, Style]] = []
        self._space: tuple[str, Style] | None = None  # a blank that is written only if the next word fits
        self._ready: list[tuple[str, Style]] = []  # placed, and written in one go
        self._column = 0
        self._indent: tuple[str, Style] = ("", Style.null())

    @property
    def at_line_start(self) -> bool:
        return self._column == 0 and not self._word

    def indent(self, text: str, style: Style | None = None) -> None:
        """What a line begins with when it continues the present one."""
        self._indent = (text, style or Style.null())

    def write(self, text: str, style: Style) -> None:
        """Text that may be broken at its blanks and between wide characters."""
        for character in text:
            if character == "\n":
                self.newline()
            elif character == " ":
                self._flush_word()
                blank = self._space[0] if self._space else ""
                self._space = (blank + " ", style)
            elif cell_len(character) > 1:
                self._flush_word()
                self._word.append((character, style))
                self._flush_word()
            else:
                self._spell(character, style)
        self._emit()

    def verbatim(self, text: str, style: Style) -> None:
        """Text that is not broken: the terminal does that if it must."""
        self.flush()
        self._put(text, style)
        self._emit()

    def newline(self) -> None:
        self._flush_word()
        self._space = None
        self._break()
        self._indent = ("", Style.null())
        self._emit()

    def flush(self) -> None:
        """Write what is held back."""
        self._flush_word()
        if self._space:
            self._put(*self._space)
            self._space = None
        self._emit()

    def end_line(self) -> None:
        """Flush, and go to a new line unless this one is empty."""
        self._flush_word()
        if self._column:
            self.newline()
        self._emit()

    def _spell(self, character: str, style: Style) -> None:
        if self._word and self._word[-1][1] == style:
            self._word[-1] = (self._word[-1][0] + character, style)
        else:
            self._word.append((character, style))

    def _flush_word(self) -> None:
        if not self._word:
            return
        word, self._word = self._word, []
        length = sum(cell_len(text) for text, _ in word)
        space, self._space = self._space, None
        blank = len(space[0]) if space else 0
        if self._column + blank + length > self._width() and self._column > cell_len(self._indent[0]):
            self._break()
            self._put(*self._indent)
        elif space:
            self._put(*space)
        for text, style in word:
            self._put(text, style)

    def _put(self, text: str, style: Style) -> None:
        self._column += cell_len(text)
        same_style = bool(self._ready) and self._ready[-1][1] == style
        self._ready.append(((self._ready.pop()[0] if same_style else "") + text, style))

    def _break(self) -> None:
        self._put("\n", Style.null())
        self._column = 0

    def _emit(self) -> None:
        if self._ready:
            self._console.print(Text.assemble(*self._ready, end=""), end="", soft_wrap=True)
            self._ready = []


def _terminal_width(console: "Console") -> int:
    """Columns at this moment; the window may have been resized."""
    try:
        return os.get_terminal_size(console.file.fileno()).columns or 80
    except (OSError, ValueError):
        return console.width
