"""From tokens to text, one token at a time: joined, the pieces are what decoding all at once gives.

Byte-level and SentencePiece vocabularies spell bytes, so a token's text is its bytes and only characters that straddle
tokens need care. Others (WordPiece) let a token's text depend on the one before; those are decoded in a short window.
"""

import codecs
from collections.abc import Callable
from typing import Protocol


class Detokenizer(Protocol):
    """Text of a growing sequence of tokens."""

    def add(self, token_id: int) -> str:
        """The text that is now certain. Never ends inside a character."""
        ...

    def finish(self) -> str:
        """What is left: an unfinished character comes out as U+FFFD."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes. Bytes that are not UTF-8 become U+FFFD.

    `spell` gives a token's bytes, None for a token that is left out. `strip_space` takes one space off the start.
    """

    def __init__(self, spell: Callable[[int], bytes | None], strip_space: bool = False):
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = strip_space

    def add(self, token_id: int) -> str:
        return self._emit(self._spell(token_id) or b"", final=False)

    def finish(self) -> str:
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any other vocabulary: decodes the last tokens with and without the new one, and emits the difference.

    `decode` takes token ids. The cost of a token does not grow with the length of the text: the window is cut to the
    last token whenever its text has come out whole.
    """

    LONGEST = 64

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._emitted = ""  # of the window's text

    def add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd") and len(self._window) < self.LONGEST:
            return ""
        piece = text[len(self._emitted) :]
        self._cut()
        return piece

    def finish(self) -> str:
        return self._decode(self._window)[len(self._emitted) :]

    def _cut(self) -> None:
        """Keeps the fewest last tokens that have any text, so that the next one is not taken for the first of all."""
        for count in range(1, len(self._window) + 1):
            text = self._decode(self._window[-count:])
            if text or count == self.LONGEST:
                self._window, self._emitted = self._window[-count:], text
                return
