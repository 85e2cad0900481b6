"""Reasoning is told from the answer at whatever places the text is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metalctl.reasoning import ReasoningSplitter, opened_by

CASES = [
    ("<think>Let me see.</think>Paris.", "", "Let me see.", "Paris."),
    ("\n<think>\nLet me\nsee.\n</think>\n\nParis.", "", "Let me\nsee.", "Paris."),
    ("<think>\n\n</think>\n\nParis.", "", "", "Paris."),
    ("[THINK]a < b[/THINK] Yes", "", "a < b", "Yes"),
    ("<think>a</thin b</think>c", "", "a</thin b", "c"),
    ("<think>cut by the limit", "", "cut by the limit", ""),
    ("<think>cut in the tag</th", "", "cut in the tag</th", ""),
    ("The tag <think> starts a thought.", "", "", "The tag <think> starts a thought."),
    ("<thing>", "", "", "<thing>"),
    ("<th", "", "", "<th"),
    ("  indented answer\n", "", "", "  indented answer\n"),
    ("see.</think>Paris.", "user: hi\nassistant:<think>\n", "see.", "Paris."),
    ("", "", "", ""),
]


def split(text: str, prompt: str, cuts: list[int]) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened_by(prompt))
    pieces = []
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        pieces += splitter.feed(text[start:end])
    pieces += splitter.finish()
    assert all(piece.text for piece in pieces)
    reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    return reasoning, "".join(piece.text for piece in pieces if piece.kind == "text")


@pytest.mark.parametrize(("text", "prompt", "reasoning", "answer"), CASES)
def test_split_is_the_same_at_every_cut(text: str, prompt: str, reasoning: str, answer: str) -> None:
    assert split(text, prompt, []) == (reasoning, answer)
    assert split(text, prompt, list(range(len(text)))) == (reasoning, answer)
    for cut in range(len(text)):
        assert split(text, prompt, [cut]) == (reasoning, answer)


@given(st.text("<>/think[] \na"), st.lists(st.integers(0, 60)))
def test_any_text_splits_the_same_in_pieces_as_whole(text: str, cuts: list[int]) -> None:
    cuts = [min(cut, len(text)) for cut in cuts]
    assert split(text, "", cuts) == split(text, "", [])


def test_text_is_held_back_only_while_it_may_become_a_tag() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed("<") == []
    assert "".join(piece.text for piece in splitter.feed("b")) == "<b"
    assert "".join(piece.text for piece in splitter.feed(" <th")) == " <th"
