"""Texts that tokenizers stumble over, put together at random from a seed."""

import random

PIECES = [
    "hello", "Hello", "HELLO", "world", "it's", "I'LL", "don't", "we've", "the", "and", "tion", "ſ", "K",
    "def f(x):\n    return x*2\n", "if (a != b) { c += 1; }", "<div class=\"x\">", "</s>", "<s>",
    "<|im_end|>", "[INST]", "你好", "世界", "こんにちは", "カタカナ", "안녕하세요", "ไทย", "हिन्दी", "مرحبا",
    "שלום", "Привет", "Ελληνικά", "ÀÉÎõü", "ñ", "é", "ё", "😀", "👩‍👩‍👧‍👦", "🇫🇷", "🏳️‍🌈", "👍🏽", "𝔘𝔫𝔦",
    "½", "²", "Ⅷ", "①", "١٢٣", "０１２", "1", "12", "123", "1234", "1234567", "3.14", "1,000", "0x1F", "-7",
    ".", ",", "!", "?", "...", "—", "«»", "“”", "$", "€", "^", "`", "~", "|", "+=", "->", "::", "@@", "#",
    "%", "&", "*", "\\", "'", '"', "_", "/", "=", "(", ")", "{}", "[]", "e\u0301", "a\u0308\u0323", "\u200d",
    "\u200b", "\ufeff", "\u00a0", "\u3000", "\u2028", "\u0000", "\x07", "\u00ad", "\ufffd",
]  # fmt: skip
SPACES = ["", " ", " ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\n  ", "    ", "        "]


def texts(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    rng = random.Random(seed)
    return [_text(rng, longest) for _ in range(count)]


def _text(rng: random.Random, longest: int) -> str:
    parts = []
    for _ in range(rng.randrange(1, longest)):
        parts.append(rng.choice(SPACES))
        parts.append(rng.choice(PIECES) if rng.random() < 0.9 else chr(_code_point(rng)))
    parts.append(rng.choice(SPACES))
    return "".join(parts)


def _code_point(rng: random.Random) -> int:
    """Any character that has an encoding."""
    while True:
        point = rng.choice((rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x20000)))
        if not 0xD800 <= point < 0xE000:
            return point
