"""Markdown comes out the same in pieces as whole, nothing of it is lost, and nothing that was drawn is drawn again."""

import io
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from metalctl.repl.inline import parse
from metalctl.repl.markdown import MarkdownStream

ANSWER = """\
# A title

A paragraph with **bold claims**, *slanted* words, `code_spans`, [a link](https://example.com/a_(b)) and ~~errors~~.
2 * 3 * 4 = 24, snake_case_names stay, *args and **kwargs too. 漢字漢字漢字漢字漢字漢字漢字漢字漢字 and 👩‍👩‍👧.

- a first item that is so long that it has to be continued in a second line, surely
  - a nested **item**
1. one

> a quotation

---

```python
def f(x):
    '''A docstring
    of two lines.'''
    return x ** 2
```

| name | value |
|------|-------|
| one  | **1** |

| no table
Escaped \\*stars\\*, [x] and [1].
"""
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def render(text: str, cuts: list[int], width: int = 60) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=width)
    stream = MarkdownStream(console, lambda: width)
    position = 0
    for cut in [*sorted(cuts), len(text)]:
        stream.feed(text[position:cut])
        position = cut
    stream.finish()
    return file.getvalue()


def cells(rendered: str) -> list[tuple[str, str]]:
    """Each character with the style that it is drawn in."""
    drawn, style, position = [], "", 0
    for match in ESCAPE.finditer(rendered):
        drawn += [(character, style) for character in rendered[position : match.start()]]
        style = "" if match[1] == "0" else match[1]
        position = match.end()
    return drawn + [(character, style) for character in rendered[position:]]


def plain(rendered: str) -> str:
    return ESCAPE.sub("", rendered)


def test_pieces_of_any_size_are_drawn_like_the_whole() -> None:
    whole = cells(render(ANSWER, []))
    assert cells(render(ANSWER, list(range(len(ANSWER))))) == whole
    rng = random.Random(0)
    for _ in range(30):
        assert cells(render(ANSWER, [rng.randrange(len(ANSWER)) for _ in range(60)])) == whole


@given(st.text("*_`~[]()!#>-|\\ \nab1.漢"), st.lists(st.integers(0, 40)))
def test_any_text_is_drawn_in_pieces_as_whole(text: str, cuts: list[int]) -> None:
    assert cells(render(text, [min(cut, len(text)) for cut in cuts], 12)) == cells(render(text, [], 12))


@given(st.text())
def test_no_letter_is_lost_and_no_control_character_gets_through(text: str) -> None:
    shown = plain(render(text, []))
    letters = [c for c in text if c.isalnum()]
    assert [c for c in shown if c.isalnum()][: len(letters)] == letters or _has_marks(text)
    assert not any(ord(c) < 32 and c != "\n" for c in shown)


def _has_marks(text: str) -> bool:
    """The name of a fence's language is not shown, and a table is laid out anew."""
    return "```" in text or "~~~" in text or "|" in text


def test_a_terminal_escape_in_an_answer_is_shown_and_not_obeyed() -> None:
    assert "\x1b]0;" not in render("look \x1b]0;owned\x07 here", [])


def test_lines_keep_to_the_width_and_words_whole() -> None:
    for line in plain(render(ANSWER, [])).splitlines():
        assert cell_len(line.rstrip()) <= 60
    assert "continued" in plain(render(ANSWER, []))


def test_markup_becomes_style_and_code_stays_as_it_is() -> None:
    shown = render(ANSWER, [])
    text = plain(shown)
    for words in (
        "bold claims",
        "2 * 3 * 4 = 24",
        "snake_case_names",
        "*args",
        "**kwargs",
        "Escaped *stars*",
        "• a first",
    ):
        assert words in " ".join(text.split())
    assert "    return x ** 2\n" in text
    assert "https://example.com/a_(b)" in text
    assert "| no table" in text
    assert "```" not in text
    assert "**bold" not in text


def test_a_paragraph_appears_word_by_word_while_it_is_written() -> None:
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, force_terminal=True, width=60), lambda: 60)
    stream.feed("These words are al")
    assert "These words are" in plain(file.getvalue())
    stream.feed("ready here")
    assert "already" in plain(file.getvalue())


def test_the_cursor_never_moves_back() -> None:
    assert not re.search(r"\x1b\[[0-9;]*[A-HJKfsu]|\r", render(ANSWER, list(range(len(ANSWER)))))


def test_a_marker_without_a_partner_does_not_stall_the_answer() -> None:
    spans, rest = parse("*args " + "word " * 100, ended=False)
    assert rest == ""
    assert spans[0].text.startswith("*args word")


@pytest.mark.parametrize(
    ("text", "styles"),
    [("**b**", {"bold"}), ("_i_", {"italic"}), ("***x***", {"bold", "italic"}), ("`` a`b ``", {"code"})],
)
def test_spans_have_the_styles_that_they_ask_for(text: str, styles: set[str]) -> None:
    [span], rest = parse(text, ended=True)
    assert span.styles == styles
    assert rest == ""


def test_a_long_answer_costs_time_in_proportion() -> None:
    def seconds(size: int) -> float:
        text = "word **bold** and `code` " * size + "\n```c\n" + "int x = 1;\n" * size + "```\n"
        began = time.process_time()
        render(text, list(range(0, len(text), 4)))
        return time.process_time() - began

    seconds(20)
    assert seconds(400) < 30 * seconds(50)  # 8 times as long; 64 times the cost if each piece drew the whole again
