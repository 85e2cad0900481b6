"""From sampled tokens to text that can be shown: whole characters, and nothing of a stop string."""

from typing import Protocol


class Detokenizer(Protocol):
    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """One answer's text. What may turn out to be the beginning of a stop string is held back as long as it may.

    The stop strings are looked for in the text, wherever tokens begin and end; the earliest match wins, and of two that
    begin at the same place the one that is complete first.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = ()):
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""
        self.stopped_by: str | None = None

    def add(self, token_id: int, watch: bool = True) -> str:
        """Text that is now certain. After a stop string (see `stopped_by`) there is nothing more to come.

        Without `watch` the token's text passes even if it holds a stop string.
        """
        piece = self._detokenizer.add(token_id)
        return self._advance(piece) if watch else piece

    def finish(self) -> str:
        """The rest, once the last token has been added."""
        text = self._advance(self._detokenizer.finish())
        if self.stopped_by is not None:
            return text
        text, self._held = text + self._held, ""
        return text

    def _advance(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._held + piece
        matches = [(text.find(stop), len(stop), stop) for stop in self._stop]
        found = min((match for match in matches if match[0] >= 0), default=None)
        if found is not None:
            self.stopped_by, self._held = found[2], ""
            return text[: found[0]]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a true beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
