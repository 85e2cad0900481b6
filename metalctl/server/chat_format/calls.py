"""Tool calls told from text, piece by piece as the text comes."""

from dataclasses import dataclass, field

from metalctl.server.chat_format.pieces import Piece, Words
from metalctl.server.chat_format.syntaxes import BARE, UNPARSABLE, Syntax, Tools


@dataclass
class CallSplitter:
    """Splits streamed text into text and calls of one syntax. What cannot be parsed comes out as text, markers and all.

    White space before a call is dropped, and so is what follows a call up to the next text.
    """

    syntax: Syntax
    tools: Tools
    _held: str = ""
    _inside: bool = False
    _after_call: bool = field(default=False, init=False)
    _begun: bool = field(default=False, init=False)  # whether any text or call has come out

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """What is still held back, when no more text comes. A call that was `cut` off is text."""
        held, self._held = self._held, ""
        if not self._inside or (cut and self.syntax.end):
            return self._words(held)
        opening = self.syntax.start if held.startswith(self.syntax.start) else ""
        return self._calls(held[len(opening) :].removesuffix(self.syntax.end), held)

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take one step through what is held; False when more text is needed."""
        if self._inside:
            return self._close(pieces)
        if self.syntax is BARE and not self._begun and self._held.lstrip().startswith(("{", "[{")):
            self._inside = True
            return False
        before, found, _ = self._held.partition(self.syntax.start)
        if found:
            pieces += self._words(before.rstrip())
            self._held, self._inside = self._held[len(before) :], True
            return True
        keep = self._undecided()
        pieces += self._words(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _close(self, pieces: list[Piece]) -> bool:
        """Look for the end of the call that is held, its opening included."""
        if not self.syntax.end:
            return False
        start = len(self.syntax.start)
        while (end := self._held.find(self.syntax.end, start)) >= 0:
            body = self._held[len(self.syntax.start) : end]
            stop = end + len(self.syntax.end)
            if not (self.syntax.quoted and _ends_in_string(body)):
                raw, self._held, self._inside = self._held[:stop], self._held[stop:], False
                pieces += self._calls(body, raw)
                return True
            start = stop
        return False

    def _calls(self, body: str, raw: str) -> list[Piece]:
        try:
            calls = self.syntax.parse(body, self.tools)
        except UNPARSABLE:
            return self._words(raw)
        self._begun = self._after_call = True
        return list(calls)

    def _words(self, text: str) -> list[Piece]:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        self._begun = True
        return [Words("text", text)]

    def _undecided(self) -> int:
        """How many characters at the end may be white space before a call, or its beginning, or both."""
        held, start = self._held, self.syntax.start
        longest = min(len(start) - 1, len(held))
        begun = next((length for length in range(longest, 0, -1) if held.endswith(start[:length])), 0)
        return len(held) - len(held[: len(held) - begun].rstrip())


def _ends_in_string(text: str) -> bool:
    """Whether a JSON text that is cut here is cut inside a string."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    inside = escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = inside
        elif character == '"':
            inside = not inside
    return inside
