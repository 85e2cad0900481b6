"""The tokenizer comes from the file alone, for every kind of vocabulary."""

import pytest

from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.gguf.pretokenizers import PRE_TOKENIZERS
from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.gguf.vocabulary import build_tokenizer
from metalctl.engine.models.tokenizer import Tokenizer
from tests.engine.models.gguf.corpus import texts
from tests.engine.models.gguf.vocabularies import (
    CONTROL,
    DEFINED,
    KINDS,
    NORMAL,
    byte_level,
    sentencepiece,
    unigram,
    vocabulary_header,
    word_piece,
)


def tokenizer(header: Header) -> Tokenizer:
    return build_tokenizer(header)[0]


def pieces(made: Tokenizer, text: str, **options: bool) -> list[str]:
    return [made.backend.id_to_token(token) for token in made.encode(text, **options)]


def test_byte_level_merges_by_rank() -> None:
    assert pieces(tokenizer(byte_level()), "the hello") == ["the", "Ġ", "hello"]
    assert pieces(tokenizer(byte_level()), "a the é") == ["a", "Ġthe", "Ġ", "Ã", "©"]


def test_sentencepiece_merges_the_best_score_first() -> None:
    made = tokenizer(sentencepiece())
    assert pieces(made, "the") == ["▁the"]
    assert pieces(made, "hello the") == ["▁hello", "▁the"]
    assert pieces(made, "😀") == ["▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


def test_space_prefix_follows_the_file() -> None:
    assert pieces(tokenizer(sentencepiece(ggml__add_space_prefix=False)), "the") == ["the"]
    assert pieces(tokenizer(unigram(ggml__add_space_prefix=False)), "the") == ["the"]


def test_unigram_takes_the_likeliest_cut() -> None:
    assert pieces(tokenizer(unigram()), "hello the") == ["▁hello", "▁the"]
    assert pieces(tokenizer(unigram(ggml__remove_extra_whitespaces=True)), "  hello   the ") == ["▁hello", "▁the"]


def test_word_piece_goes_by_words() -> None:
    made = tokenizer(word_piece())
    assert pieces(made, "Hello, unplayable!") == ["hello", ",", "un", "##p", "##l", "##a", "##y", "##able", "!"]
    assert pieces(made, "PLAYING", add_special_tokens=True) == ["[CLS]", "play", "##ing", "[SEP]"]
    assert pieces(made, "你") == ["[UNK]"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_becomes_a_control_token_unless_asked(kind: str) -> None:
    made = tokenizer(KINDS[kind]())
    controls = [made.backend.id_to_token(token) for token in made.special_ids]
    for token in controls:
        for text in (token, f"the {token} hello", token * 3):
            assert not made.special_ids.intersection(made.encode(text)) - {made.encode("€")[0]}
    asked = next(token for token in controls if "unk" not in token.lower())
    assert made.backend.token_to_id(asked) in made.encode(f"the{asked}", parse_special=True)


def test_defined_tokens_are_found_in_any_text() -> None:
    assert pieces(tokenizer(byte_level()), "a<tool>b") == ["a", "<tool>", "b"]
    assert pieces(tokenizer(sentencepiece()), "the[TOOL]the") == ["▁the", "[TOOL]", "▁the"]


def test_beginning_and_end_follow_the_file_and_the_kind() -> None:
    def around(header: Header) -> tuple[list[str], list[str]]:
        made = tokenizer(header)
        name = made.backend.id_to_token
        return [name(token) for token in made.prefix_ids], [name(token) for token in made.suffix_ids]

    assert around(byte_level()) == ([], [])
    assert around(byte_level("llama-bpe")) == (["<|im_start|>"], [])
    assert around(byte_level("llama-bpe", ggml__add_bos_token=False)) == ([], [])
    assert around(byte_level(ggml__add_bos_token=True, ggml__add_eos_token=True)) == (["<|im_start|>"], ["<|im_end|>"])
    assert around(sentencepiece()) == (["<s>"], [])
    assert around(unigram()) == ([], ["</s>"])
    assert around(word_piece()) == (["[CLS]"], ["[SEP]"])


def ends(tokens: list[tuple[str, object]], **keys: int) -> set[str]:
    alphabet = [(chr(33 + index), NORMAL, 0.0) for index in range(20)]
    header = vocabulary_header(
        [*alphabet, *((text, kind, 0.0) for text, kind in tokens)],  # type: ignore[misc]
        "gpt2",
        ggml__merges=[],
        ggml__eos_token_id=20,
        **keys,
    )
    made = tokenizer(header)
    return {made.backend.id_to_token(token) for token in made.eos_token_ids}


def test_all_tokens_that_end_an_answer_are_known() -> None:
    assert ends([("<end>", CONTROL), ("<|im_end|>", CONTROL)]) == {"<end>", "<|im_end|>"}
    assert ends([("<end>", CONTROL), ("<|eot_id|>", NORMAL)]) == {"<end>", "<|eot_id|>"}
    assert ends([("<end>", CONTROL), ("x", CONTROL)], ggml__eot_token_id=21) == {"<end>", "x"}


def test_message_ends_inside_an_answer_do_not_end_it() -> None:
    harmony = [("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|end|>", CONTROL)]
    assert ends(harmony) == {"<|return|>", "<|call|>"}
    assert ends([("<end>", CONTROL), ("<|end|>", CONTROL)]) == {"<end>", "<|end|>"}


def test_markup_that_looks_like_an_end_is_text() -> None:
    assert ends([("<end>", CONTROL), ("</s>", DEFINED)]) == {"<end>"}
    assert ends([("<end>", CONTROL), ("</s>", NORMAL)]) == {"<end>"}


def test_every_known_name_cuts_any_text_without_losing_a_byte() -> None:
    corpus = texts(60, seed=3)
    for name in PRE_TOKENIZERS:
        made = tokenizer(byte_level(name))
        for text in corpus:
            assert made.decode(made.encode(text), skip_special_tokens=False) == text, name


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("llama-bpe", "It's 12345\n\nx", ["It", "'s", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("tekken", "HTTPServer", ["HTTPServer"]),
        ("tekken", "serverHTTP", ["server", "HTTP"]),
        ("gpt-4o", "I'LL do", ["I'LL", " do"]),
        ("kimi-k2", "你好abc", ["你好", "abc"]),
        ("deepseek-v3", "abc你好1234", ["abc", "你好", "123", "4"]),
        ("superbpe", "a1234567", ["a", "1", "234", "567"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "12345", ["12", "345"]),
    ],
)
def test_words_are_cut_as_the_model_was_trained(name: str, text: str, words: list[str]) -> None:
    made = tokenizer(byte_level(name))
    found = made.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == words


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        build_tokenizer(vocabulary_header([("a", NORMAL, 0.0)], "rwkv"))
    with pytest.raises(UnsupportedModelError, match="'cuneiform'"):
        build_tokenizer(byte_level("cuneiform"))


def test_broken_vocabularies_are_refused() -> None:
    header = byte_level()
    del header.metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.merges"):
        build_tokenizer(header)
    header = byte_level()
    header.metadata["tokenizer.ggml.token_type"] = header.metadata["tokenizer.ggml.token_type"][:5]
    with pytest.raises(CheckpointError, match="5 entries for 269 tokens"):
        build_tokenizer(header)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.model"):
        build_tokenizer(Header("x", {}, (), 0, 0))


def test_file_that_does_not_say_how_words_are_cut_is_noted() -> None:
    header = byte_level(chat_template="x")
    del header.metadata["tokenizer.ggml.pre"]
    assert "tokenizer.ggml.pre" in build_tokenizer(header)[1][0]


def test_empty_and_repeated_tokens_do_no_harm() -> None:
    header = byte_level()
    header.metadata["tokenizer.ggml.tokens"][200:202] = ["", "the"]
    made = tokenizer(header)
    assert made.vocab_size == 269
    assert made.encode("the")


def test_several_chat_templates_are_kept_by_name() -> None:
    made = tokenizer(byte_level(chat_template="default", chat_template__tool_use="tools: {{ tools }}"))
    assert made.chat_templates.names == ["default", "tool_use"]


def test_missing_chat_template_is_filled_from_the_control_tokens_and_said() -> None:
    made, notes = build_tokenizer(byte_level())
    assert "ChatML" in notes[0]
    assert made.render_chat_template([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    _, notes = build_tokenizer(byte_level(chat_template="x"))
    assert notes == []


def test_bos_is_put_before_a_conversation_only_where_the_file_adds_it() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    without = tokenizer(byte_level(chat_template=template))
    assert pieces_of(without, without.apply_chat_template([{"role": "user", "content": "the"}])) == ["the"]
    added = tokenizer(byte_level(chat_template=template, ggml__add_bos_token=True))
    assert pieces_of(added, added.apply_chat_template([{"role": "user", "content": "the"}])) == ["<|im_start|>", "the"]
    once = tokenizer(byte_level(chat_template="{{ bos_token }}" + template, ggml__add_bos_token=True))
    assert pieces_of(once, once.apply_chat_template([{"role": "user", "content": "the"}])) == ["<|im_start|>", "the"]


def pieces_of(made: Tokenizer, ids: list[int]) -> list[str]:
    return [made.backend.id_to_token(token) for token in ids]
