"""A model's reasoning told from its answer, piece by piece as the text comes."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)


class Piece(NamedTuple):
    kind: Literal["reasoning", "text"]
    text: str


def opened_by(prompt: str) -> str | None:
    """The closing tag that is due when a rendered prompt ends by opening a reasoning block, as some templates do."""
    return next((close for start, close in TAGS if prompt.rstrip().endswith(start)), None)


@dataclass
class ReasoningSplitter:
    """Splits a streamed answer into reasoning and text.

    Reasoning stands at the start of an answer, between the tags of TAGS; a tag that is mentioned later is text. Only
    what may still become a tag is held back, and white space around the reasoning is dropped. `close` is the closing
    tag that is due when the prompt itself opened the block.
    """

    close: str | None = None
    _held: str = ""
    _decided: bool = field(default=False, init=False)  # whether the answer's beginning is known to hold a block or not
    _trim: bool = field(default=False, init=False)  # white space after a tag is still to be dropped

    def __post_init__(self) -> None:
        self._decided = self._trim = self.close is not None

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        if not self._decided:
            self._decide()
        if not self._decided:
            return []
        pieces = self._reasoning() if self.close else []
        return pieces if self.close else pieces + self._text()

    def finish(self) -> list[Piece]:
        """What is still held back, when no more text comes."""
        held, self._held = self._held, ""
        if self.close:
            held = held.rstrip()
        return [Piece("reasoning" if self.close else "text", held)] if held else []

    def _decide(self) -> None:
        start = self._held.lstrip()
        for opening, closing in TAGS:
            if start.startswith(opening):
                self._held, self.close = start[len(opening) :], closing
                self._decided = self._trim = True
                return
        self._decided = not any(opening.startswith(start) for opening, _ in TAGS)

    def _reasoning(self) -> list[Piece]:
        assert self.close
        self._drop_leading_space()
        body, found, rest = self._held.partition(self.close)
        if found:
            self._held, self.close, self._trim = rest, None, True
            body = body.rstrip()
        else:
            keep = _may_become(body, self.close)
            body, self._held = body[: len(body) - keep], body[len(body) - keep :]
        return [Piece("reasoning", body)] if body else []

    def _text(self) -> list[Piece]:
        self._drop_leading_space()
        text, self._held = self._held, ""
        return [Piece("text", text)] if text else []

    def _drop_leading_space(self) -> None:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held


def _may_become(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be white space before `tag`, or its beginning, or both."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            break
    else:
        length = 0
    return len(text) - len(text[: len(text) - length].rstrip())
