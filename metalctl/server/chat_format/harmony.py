"""The format of gpt-oss: messages with a channel each, of which some are reasoning and some are tool calls."""

import re
from dataclasses import dataclass

from metalctl.server.chat_format.pieces import Piece, Words, make_call
from metalctl.server.chat_format.syntaxes import UNPARSABLE

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BODY = "<|message|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass
class HarmonyParser:
    """An answer begins inside a message's header, since the prompt has opened it."""

    _held: str = ""
    _header: str | None = None  # of the message whose body is being read

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        held, self._held = self._held, ""
        if self._header is None:
            return [] if "<|" in held or not held.strip() else [Words("text", held)]
        return self._message(held, whole=not cut)

    def _advance(self, pieces: list[Piece]) -> bool:
        if self._header is None:
            header, found, rest = self._held.partition(_BODY)
            if found:
                self._header, self._held = header, rest
            return bool(found)
        cuts = [(self._held.find(end), end) for end in _ENDS if end in self._held]
        if cuts:
            position, end = min(cuts)
            pieces += self._message(self._held[:position], whole=True)
            self._header, self._held = None, self._held[position + len(end) :]
            return True
        if not self._is_call:
            keep = max(_overlap(self._held, end) for end in _ENDS)
            pieces += self._message(self._held[: len(self._held) - keep], whole=False)
            self._held = self._held[len(self._held) - keep :]
        return False

    @property
    def _is_call(self) -> bool:
        return _RECIPIENT.search(self._header or "") is not None

    def _message(self, body: str, whole: bool) -> list[Piece]:
        header = self._header or ""
        recipient = _RECIPIENT.search(header)
        if recipient and whole:
            try:
                return [make_call(recipient[1], body)]
            except UNPARSABLE:
                return [Words("text", body)] if body else []
        channel = _CHANNEL.search(header)
        kind = "reasoning" if channel and channel[1] == "analysis" else "text"
        return [Words(kind, body)] if body else []  # type: ignore[arg-type]


def _overlap(text: str, marker: str) -> int:
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
