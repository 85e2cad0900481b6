"""Streamed pieces, joined, are what decoding all at once gives, and no piece ends inside a character."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel

from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.gguf.vocabulary import build_tokenizer
from metalctl.engine.models.tokenizer import Tokenizer
from tests.engine.models.gguf.corpus import texts
from tests.engine.models.gguf.vocabularies import KINDS, byte_level, sentencepiece


def streamed(made: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = made.detokenizer(skip)
    return [*map(stream.add, ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_random_tokens_join_to_the_whole(kind: str, skip: bool) -> None:
    made = build_tokenizer(KINDS[kind]())[0]
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(made.vocab_size) for _ in range(rng.randrange(40))]
        assert "".join(streamed(made, ids, skip)) == made.decode(ids, skip)


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_text_comes_back_through_any_cut_of_its_bytes(kind: Callable[[], Header]) -> None:
    made = build_tokenizer(kind())[0]
    for text in texts(100, seed=11):
        pieces = streamed(made, made.encode(text))
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize(("kind", "lead"), [(byte_level, 0), (sentencepiece, 0)])
def test_character_comes_out_whole_with_its_last_byte(kind: Callable[[], Header], lead: int) -> None:
    made = build_tokenizer(kind())[0]
    ids = made.encode("😀")[-4:]
    assert streamed(made, ids) == ["", "", "", "😀", ""]


def test_invalid_bytes_become_one_replacement_each_stretch() -> None:
    made = build_tokenizer(byte_level())[0]
    four = made.encode("😀")
    letter = made.encode("x")
    assert "".join(streamed(made, [*four[:3], *letter])) == "\ufffdx"
    assert "".join(streamed(made, four[:2])) == "\ufffd"
    assert made.decode([*four[:3], *letter]) == "\ufffdx"
    assert made.decode([four[1], *letter]) == "\ufffdx"


def test_control_tokens_are_left_out_even_inside_a_character() -> None:
    made = build_tokenizer(byte_level())[0]
    first, *rest = made.encode("é")
    end = next(iter(made.eos_token_ids))
    assert "".join(streamed(made, [first, end, *rest])) == "é"
    assert "".join(streamed(made, [end], skip=False)) == "<|im_end|>"


def test_leading_space_is_taken_off_once_unless_the_text_continues() -> None:
    made = build_tokenizer(sentencepiece())[0]
    ids = made.encode("the the")
    assert made.decode(ids) == "the the"
    stream = made.detokenizer(continues=True)
    assert "".join([*map(stream.add, ids), stream.finish()]) == " the the"


def test_ids_outside_the_vocabulary_give_nothing() -> None:
    made = build_tokenizer(byte_level())[0]
    assert streamed(made, [10**6]) == ["", ""]
    assert made.token_bytes(10**6) is None


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """A decoder that is none of the known kinds is asked for a few tokens at a time only."""
    words = {f"w{index}": index for index in range(50)}
    backend = Backend(WordLevel(words, unk_token="w0"))
    backend.decoder = decoders.WordPiece()
    made = Tokenizer(backend)
    longest = 0
    stream = made.detokenizer()
    inner = stream._decode  # type: ignore[attr-defined]

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return inner(ids)

    stream._decode = counted  # type: ignore[attr-defined]
    ids = [index % 50 for index in range(500)]
    assert "".join([*map(stream.add, ids), stream.finish()]) == made.decode(ids)
    assert longest <= 2
