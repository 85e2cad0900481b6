"""Small vocabularies of every kind, as headers that no file holds."""

from typing import Any

import numpy as np
from gguf.constants import TokenType

from metalctl.engine.models.gguf.reader import Header
from tests.engine.models.gguf.writer import byte_alphabet

NORMAL, CONTROL, DEFINED, BYTE, UNKNOWN = (
    TokenType.NORMAL,
    TokenType.CONTROL,
    TokenType.USER_DEFINED,
    TokenType.BYTE,
    TokenType.UNKNOWN,
)
SPACE = "\u2581"


def vocabulary_header(tokens: list[tuple[str, TokenType, float]], model: str, **keys: Any) -> Header:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text for text, _, _ in tokens],
        "tokenizer.ggml.token_type": np.array([int(kind) for _, kind, _ in tokens], np.int32),
        "tokenizer.ggml.scores": np.array([score for _, _, score in tokens], np.float32),
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in keys.items()}
    return Header("vocabulary.gguf", metadata, (), 0, 0)


def byte_level(pre: str = "gpt-2", **keys: Any) -> Header:
    merges = ["t h", "th e", "a n", "Ġ the", "i n", "Ġ a", "l l", "e ll", "h ell", "hell o"]
    tokens = [(character, NORMAL, 0.0) for character in byte_alphabet()]
    tokens += [(merge.replace(" ", ""), NORMAL, 0.0) for merge in merges]
    tokens += [("<|im_start|>", CONTROL, 0.0), ("<|im_end|>", CONTROL, 0.0), ("<tool>", DEFINED, 0.0)]
    ids = {text: index for index, (text, _, _) in enumerate(tokens)}
    defaults = {
        "ggml__pre": pre,
        "ggml__merges": merges,
        "ggml__bos_token_id": ids["<|im_start|>"],
        "ggml__eos_token_id": ids["<|im_end|>"],
    }
    return vocabulary_header(tokens, "gpt2", **{**defaults, **keys})


def sentencepiece(**keys: Any) -> Header:
    words = ["th", "the", SPACE + "the", SPACE + "t", "he", "hello", SPACE + "hello", "ll", "lo", "llo", "ello", SPACE]
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, NORMAL, -float(rank)) for rank, text in enumerate(words)]
    tokens += [(text, NORMAL, -100.0 - rank) for rank, text in enumerate("abcdefghijklmnopqrstuvwxyz</>é你")]
    return vocabulary_header([*tokens, ("[TOOL]", DEFINED, 0.0)], "llama", **keys)


def unigram(**keys: Any) -> Header:
    words = [("the", -3.0), (SPACE + "the", -2.0), (SPACE, -4.0), ("hello", -3.0), (SPACE + "hello", -2.5)]
    tokens = [("<pad>", CONTROL, 0.0), ("</s>", CONTROL, 0.0), ("<unk>", UNKNOWN, 0.0)]
    tokens += [(text, NORMAL, score) for text, score in words]
    tokens += [(character, NORMAL, -10.0) for character in "abcdefghijklmnopqrstuvwxyz</>é"]
    return vocabulary_header(tokens, "t5", **{"ggml__unknown_token_id": 2, "ggml__eos_token_id": 1, **keys})


def word_piece(**keys: Any) -> Header:
    special = [("[PAD]", CONTROL, 0.0), ("[UNK]", UNKNOWN, 0.0), ("[CLS]", CONTROL, 0.0), ("[SEP]", CONTROL, 0.0)]
    words = ["the", "hello", "un", "play", "!", ".", ",", "[", "]", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [*special, *((SPACE + word, NORMAL, 0.0) for word in words)]
    tokens += [(piece, NORMAL, 0.0) for piece in ["ing", "able", *"abcdefghijklmnopqrstuvwxyz"]]
    ids = {
        "ggml__unknown_token_id": 1,
        "ggml__bos_token_id": 2,
        "ggml__seperator_token_id": 3,
        "ggml__padding_token_id": 0,
    }
    return vocabulary_header(tokens, "bert", **{**ids, **keys})


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram, "word piece": word_piece}
