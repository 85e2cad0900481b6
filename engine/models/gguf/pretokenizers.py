"""How byte-pair vocabularies cut text into words before merging, by the name in `tokenizer.ggml.pre`.

Each name has patterns that are applied one after the other, each to the pieces that the ones before left. Patterns are
those of the models' own tokenizers, in the syntax of Oniguruma, as llama.cpp's list of names refers to them.
"""

from dataclasses import dataclass

from metalctl.engine.errors import UnsupportedModelError


def _characters(ranges: str) -> str:
    """The inside of a character class, from code points and ranges of them in hexadecimal."""
    return "".join("-".join(rf"\x{{{point}}}" for point in part.split("-")) for part in ranges.split())


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_OR_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

# Words by case: capitals, then small letters; "serverHTTP" is two words.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, ending: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}[{upper}]*[{lower}]+{ending}|{lead}[{upper}]+[{lower}]*{ending}"


_TEKKEN = rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}|{_SYMBOLS_OR_SLASHES}|{_SPACES}"
_GPT4O = rf"{_cased(_UPPER, _LOWER, _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_OR_SLASHES}|{_SPACES}"
_YOUTU = rf"{_cased(_UPPER, _LOWER, _CONTRACTIONS + '?')}|\p{{N}}|{_SYMBOLS_OR_SLASHES}|{_SPACES}"
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"\p{{Han}}+|{_cased(_UPPER + _NO_HAN, _LOWER + _NO_HAN, _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)

_CJK = f"[{_characters('4E00-9FA5 3040-30FF')}]+"
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")

_DEEPSEEK_LETTERS = _characters(
    "41-5A 61-7A "
    "B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
    "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D "
    "2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE "
    "2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_HAN = f"[{_characters('800-9FA5 AC00-D7FF')}]+"
_BLOOM = rf" ?[^(\s|.,!?{_characters('2026 3002 FF0C 3001 964 6D4 60C')})]+"
_AFMOE_ASIAN = _characters(
    "E40-E7F E80-EFF 1000-109F 1100-11FF 1780-17FF 2F00-2FDF 3040-30FF 3400-4DBF 4E00-9FFF A9E0-A9FF AA60-AA7F "
    "AC00-D7AF F900-FAFF FF65-FF9F"
)
_YOUTU_ASIAN = (
    f"[{_characters('AC00-D7A3 3131-318E')}]+|[{_characters('FF01 2026 201C 201D 2018 2019 2014 FF1A-FF1B FF0C')}"
    f"{_characters('3001-303F FE30-FE4F')}]+|[{_characters('3105-312F')}]+|{_CJK}"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is taken as it is. `add_bos`: what holds where the file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_TABLE: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(_DEFAULT)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True)),
    (
        "jais-2",
        PreTokenizer(
            (
                _LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
                + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
                + r"|\s{1}",
            )
        ),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    ("ufakzeka", PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS + "|"),))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"
                + _WORD
                + r"|\p{N}|"
                + _SYMBOLS
                + r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    ("seed-coder", PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))),
    (
        "exaone-moe",
        PreTokenizer(
            (
                _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GPT4O,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    (
        "youtu",
        PreTokenizer((_YOUTU_ASIAN, _YOUTU), ignore_merges=True),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais trillion "
        "granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[!-/:-~{_characters('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
                r"\s+$",
                _DEEPSEEK_HAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CJK,
                rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
    ),
    (
        "afmoe",
        PreTokenizer(
            (
                r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",
                f"[{_AFMOE_ASIAN}]+",
                rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
            )
        ),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: entry for names, entry in _TABLE for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Raises UnsupportedModelError for a name that is not in the table: a guess would spoil answers unseen."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"The file's tokenizer cuts words by the rules {name!r}, which this version does not know.",
            "A newer metalctl may know them; the MLX version of the model does not need them.",
        )
    return PRE_TOKENIZERS[name]
