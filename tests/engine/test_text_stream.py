"""Stop strings: found wherever tokens begin and end, and nothing held back longer than it must be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metalctl.engine.text_stream import TextStream

ALPHABET = "ab é漢🙂"


class Pieces:
    """A detokenizer whose tokens are pieces of text."""

    def __init__(self, pieces: list[str]):
        self._pieces = pieces

    def add(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return ""


def streamed(pieces: list[str], stop: tuple[str, ...]) -> tuple[list[str], str | None]:
    stream = TextStream(Pieces(pieces), stop)
    out = []
    for token in range(len(pieces)):
        out.append(stream.add(token))
        if stream.stopped_by is not None:
            return out, stream.stopped_by
    out.append(stream.finish())
    return out, stream.stopped_by


texts = st.text(ALPHABET, max_size=12)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.lists(texts, max_size=8), stops)
def test_the_text_ends_before_the_first_stop_string(pieces, stop):
    whole = "".join(pieces)
    out, stopped_by = streamed(pieces, stop)
    text = "".join(out)
    assert whole.startswith(text)
    if stopped_by is None:
        assert text == whole
        assert not any(s in whole for s in stop)
    else:
        assert whole[len(text) :].startswith(stopped_by)
        assert not any(s in text for s in stop)


@given(st.lists(texts, min_size=1, max_size=8), stops)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(pieces, stop):
    stream = TextStream(Pieces(pieces), stop)
    shown = ""
    for token in range(len(pieces)):
        shown += stream.add(token)
        if stream.stopped_by is not None:
            return
        held = "".join(pieces[: token + 1])[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)


@given(st.text(ALPHABET, max_size=20), stops, st.randoms(use_true_random=False))
def test_where_tokens_end_makes_no_difference(whole, stop, rng):
    cuts = sorted({rng.randint(0, len(whole)) for _ in range(5)} | {0, len(whole)})
    pieces = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    one, one_stop = streamed(list(whole), stop)
    other, other_stop = streamed(pieces, stop)
    assert ("".join(other), other_stop) == ("".join(one), one_stop) or len(stop) > 1


def test_the_earliest_match_wins():
    assert streamed(["xaby"], ("b", "ab"))[1] == "ab"
    assert streamed(["xa", "by"], ("b", "ab"))[1] == "ab"


def test_unwatched_tokens_pass():
    stream = TextStream(Pieces(["a", "b"]), ("ab", "a"))
    assert stream.add(0, watch=False) == "a"
    assert stream.add(1) == "b"


@pytest.mark.parametrize("stop", [("never",), ()])
def test_no_match_gives_everything(stop):
    out, stopped_by = streamed(["nev", "e", "nev"], stop)
    assert "".join(out) == "nevenev"
    assert stopped_by is None
