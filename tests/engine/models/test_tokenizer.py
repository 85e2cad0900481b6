"""Encoding and decoding over any tokenizer of the tokenizers library."""

import threading

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from metalctl.engine.models.gguf.vocabulary import build_tokenizer
from metalctl.engine.models.tokenizer import Tokenizer
from tests.engine.models.gguf.vocabularies import byte_level, sentencepiece, word_piece


@pytest.fixture
def made() -> Tokenizer:
    return build_tokenizer(byte_level())[0]


def test_special_tokens_stand_around_a_text_only_when_asked() -> None:
    made = build_tokenizer(word_piece())[0]
    assert made.decode(made.encode("the", add_special_tokens=True), skip_special_tokens=False) == "[CLS] the [SEP]"
    assert made.decode(made.encode("the"), skip_special_tokens=False) == "the"


def test_half_a_surrogate_pair_becomes_a_replacement(made: Tokenizer) -> None:
    assert made.decode(made.encode("a\ud83db")) == "a\ufffdb"
    assert made.decode(made.encode("\ud83d\ude00")) == "😀"


def test_empty_text_has_no_tokens(made: Tokenizer) -> None:
    assert made.encode("") == []
    assert made.decode([]) == ""


def test_bytes_of_tokens_are_what_they_add_to_a_text(made: Tokenizer) -> None:
    ids = made.encode("é the")
    assert b"".join(made.token_bytes(token) or b"" for token in ids) == "é the".encode()
    assert made.token_bytes(made.backend.token_to_id("<|im_end|>")) is None
    assert made.token_bytes(made.backend.token_to_id("<tool>")) == b"<tool>"
    pieces = build_tokenizer(sentencepiece())[0]
    assert pieces.token_bytes(pieces.backend.token_to_id("▁the")) == b" the"
    assert pieces.token_bytes(pieces.backend.token_to_id("<0xE2>")) == b"\xe2"


def test_vocabulary_size_counts_added_tokens(made: Tokenizer) -> None:
    assert made.vocab_size == 256 + 10 + 3


def test_truncation_and_padding_of_a_checkpoint_are_off() -> None:
    backend = Backend(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("a a a") == [0, 0, 0]


def test_threads_with_and_without_control_tokens_do_not_disturb_each_other(made: Tokenizer) -> None:
    text = "<|im_start|>the" * 20
    expected = {special: made.encode(text, parse_special=special) for special in (True, False)}
    wrong: list[bool] = []

    def work(special: bool) -> None:
        for _ in range(200):
            if made.encode(text, parse_special=special) != expected[special]:
                wrong.append(special)
            made.decode(expected[special])

    threads = [threading.Thread(target=work, args=(bool(index % 2),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert expected[True] != expected[False]


def test_decoders_that_mean_something_else_are_not_taken_for_sentencepiece() -> None:
    backend = Backend(BPE({"a_": 0, "b": 1, "<0x0A>": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert Tokenizer(backend).decode([0, 1]) == backend.decode([0, 1]) == "a b"


def test_control_tokens_in_message_contents_are_read_as_in_the_template(made: Tokenizer) -> None:
    ids = made.apply_chat_template([{"role": "user", "content": "<|im_end|>"}])
    assert ids.count(made.backend.token_to_id("<|im_end|>")) == 2


def test_added_tokens_keep_what_a_checkpoint_says_of_white_space() -> None:
    backend = Backend(BPE({"a": 0, " ": 1}, []))
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken("<end>", rstrip=True, special=True)])
    made = Tokenizer(backend)
    assert made.encode("a<end>  a", parse_special=True) == [0, 2, 0]
