"""Emphasis, code and links inside a line of Markdown, as far as the line has come."""

import re
from typing import NamedTuple

_HOLD_AT_MOST = 240  # characters that wait for a closing marker before the opening one is taken as plain text
_MARKER = re.compile(r"\\|`+|\*+|_+|~+|!?\[|!$")
_LINK = re.compile(r"!?\[((?:[^\[\]\\]|\\.)*)\]\(<?((?:[^()\s<>]|\([^()\s]*\))*)>?(?:\s+\"[^\"]*\")?\)")
_NO_LINK = re.compile(r"!?\[[^\[\]]*(\[|\][^(]|\]\([^()\s]*\s[^\"])")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_STYLE = {
    **{"*": "italic", "**": "bold", "***": "bold italic"},
    **{"_": "italic", "__": "bold", "___": "bold italic"},
    "~~": "strike",
}

Styles = frozenset[str]
PLAIN: Styles = frozenset()


class Span(NamedTuple):
    text: str
    styles: Styles  # of "bold", "italic", "strike", "code", "link", "url"


class _Markup(NamedTuple):
    spans: list[Span]
    end: int


class _Undecided:
    """What follows decides."""


_UNDECIDED = _Undecided()


def parse(text: str, ended: bool, styles: Styles = PLAIN, before: str = " ") -> tuple[list[Span], str]:
    """The spans of `text` that are certain, and the rest that needs what follows.

    `ended` says that nothing follows, so that no rest is left. `before` is the character that stands before `text`.
    A marker without its partner is plain text: no character of the answer is lost.
    """
    spans: list[Span] = []
    position = start = 0
    while match := _MARKER.search(text, position):
        markup = _markup(text, match, ended, styles, text[match.start() - 1] if match.start() else before)
        waits = isinstance(markup, _Undecided) and not ended and len(text) - match.start() <= _HOLD_AT_MOST
        if isinstance(markup, _Markup) or waits:
            _add(spans, text[start : match.start()], styles)
        if waits:
            return spans, text[match.start() :]
        position = match.end()
        if isinstance(markup, _Markup):
            spans += markup.spans
            position = start = markup.end
    _add(spans, text[start:], styles)
    return spans, ""


def _add(spans: list[Span], text: str, styles: Styles) -> None:
    if text:
        spans.append(Span(text, styles))


def _markup(text: str, match: re.Match[str], ended: bool, styles: Styles, before: str) -> _Markup | _Undecided | None:
    """The markup that begins at `match`; None when its marker is plain text for certain."""
    if match.end() == len(text):
        return None if ended else _UNDECIDED
    marker = match[0]
    if marker == "\\":
        escaped = text[match.end()]
        return _Markup([Span(escaped, styles)], match.end() + 1) if escaped in _PUNCTUATION else None
    if marker[0] == "`":
        return _code(text, match, styles)
    if marker[-1] == "[":
        return _link(text, match, styles)
    return _emphasis(text, match, ended, styles, before)


def _code(text: str, match: re.Match[str], styles: Styles) -> _Markup | _Undecided:
    close = re.compile(rf"(?<!`){match[0]}(?!`)").search(text, match.end())
    if not close:
        return _UNDECIDED
    code = text[match.end() : close.start()]
    if code.startswith(" ") and code.endswith(" ") and code.strip():
        code = code[1:-1]
    return _Markup([Span(code, styles | {"code"})], close.end())


def _link(text: str, match: re.Match[str], styles: Styles) -> _Markup | _Undecided | None:
    link = _LINK.match(text, match.start())
    if not link:
        return None if _NO_LINK.match(text, match.start()) else _UNDECIDED
    label, url = link[1], link[2]
    spans, _ = parse(label or url, True, styles | {"link"})
    if label and label != url:
        spans.append(Span(f" ({url})", styles | {"url"}))
    return _Markup(spans, link.end())


def _emphasis(text: str, match: re.Match[str], ended: bool, styles: Styles, before: str) -> _Markup | _Undecided | None:
    marker, kind = match[0], match[0][0]
    inside_word = kind == "_" and before.isalnum()
    if marker not in _STYLE or text[match.end()].isspace() or inside_word:
        return None
    for close in re.compile(rf"{re.escape(kind)}+").finditer(text, match.end() + 1):
        if close.end() == len(text) and not ended:
            return _UNDECIDED
        after = text[close.end()] if close.end() < len(text) else " "
        if close[0] == marker and not text[close.start() - 1].isspace() and not (kind == "_" and after.isalnum()):
            inner, _ = parse(text[match.end() : close.start()], True, styles | set(_STYLE[marker].split()), marker)
            return _Markup(inner, close.end())
    return _UNDECIDED
