"""The tokenizer of a GGUF file, from its metadata alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.chat_template import ChatTemplates, default_template
from metalctl.engine.models.gguf.pretokenizers import pre_tokenizer
from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.tokenizer import SPACE, Tokenizer

PLAIN_LOOKING = ("</s>", "<eos>", "[EOS]", "[EOT]", "<EOT>", "_<EOT>")  # ends only where they are control tokens
# Texts of tokens that end an answer, for the many files that name only one of theirs.
END_TOKENS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<｜end▁of▁sentence｜>", "[e~[", *PLAIN_LOOKING),
    )
)


OUT_OF_REACH = 1000.0  # a score below all others, so that no text is cut into control tokens


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a tokenizer model implies where the file does not say: special tokens, and what stands around a text."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    separator: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False


_KINDS = {
    "gpt2": _Kind(bos=11, eos=11),
    "gemma4": _Kind(add_bos=True),
    "llama": _Kind(bos=1, eos=2, unknown=0, add_bos=True, space_prefix=True),
    "bert": _Kind(bos=101, unknown=100, separator=102, add_bos=True, add_eos=True),
    "t5": _Kind(eos=1, unknown=2, add_eos=True, space_prefix=True),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The lists of the file, checked to be of one length. `types` are TokenType numbers."""

    tokens: list[str]
    types: list[int]
    scores: list[float]

    def of_type(self, *types: TokenType) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]


def build_tokenizer(header: Header) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and notes on what the file left open.

    Raises UnsupportedModelError for a kind of tokenizer that is not known, CheckpointError for a broken vocabulary.
    """
    model = header.require("tokenizer.ggml.model", str)
    if model not in _KINDS:
        raise UnsupportedModelError(
            f"The tokenizer of {header.name} is of the kind {model!r}; known are {', '.join(sorted(_KINDS))}.",
            "Use the MLX version of this model.",
        )
    kind = _KINDS[model]
    vocabulary = _read_vocabulary(header)
    specials = _special_ids(header, kind, len(vocabulary.tokens))
    ends = _end_ids(header, vocabulary, specials)
    for index in ends:
        if vocabulary.types[index] == TokenType.NORMAL:
            vocabulary.types[index] = TokenType.CONTROL
    try:
        backend = _BUILDERS[model](header, vocabulary, kind)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception for vocabularies that contradict themselves
        raise CheckpointError(f"The vocabulary of {header.name} is broken: {error}") from error
    _add_tokens(backend, vocabulary, eats_space=_is_phi3(header))
    templates, notes = _chat_templates(header, vocabulary, specials)
    if model == "gpt2" and not header.get("tokenizer.ggml.pre", str):
        notes.append("The file does not say how words are cut before merging (tokenizer.ggml.pre): a guess is used.")
    prefix, suffix = _surroundings(header, kind, specials)
    tokenizer = Tokenizer(
        backend,
        bos_token_id=specials.get("bos"),
        eos_token_ids=ends,
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_bos_id=prefix[0] if prefix else None,
        chat_templates=templates,
    )
    return tokenizer, notes


def _read_vocabulary(header: Header) -> _Vocabulary:
    tokens = header.require("tokenizer.ggml.tokens", list)
    count = len(tokens)
    if not count or not isinstance(tokens[0], str):
        raise CheckpointError(f"{header.name}: tokenizer.ggml.tokens is not a list of texts.")
    types = _numbers(header, "tokenizer.ggml.token_type", count, int(TokenType.NORMAL))
    scores = _numbers(header, "tokenizer.ggml.scores", count, 0.0)
    seen: set[str] = set()
    for index, token in enumerate(tokens):
        if not token or token in seen:
            tokens[index] = token = f"[EMPTY_{index}]" if not token else f"[DUPLICATE_{index}]{token}"
            types[index] = int(TokenType.UNUSED)
        seen.add(token)
    return _Vocabulary(tokens, types, scores)


def _numbers(header: Header, key: str, count: int, default: float) -> list[Any]:
    values = header.get(key, np.ndarray)
    if values is None:
        return [default] * count
    if len(values) < count:
        raise CheckpointError(f"{header.name}: {key} has {len(values)} entries for {count} tokens.")
    return list(values[:count].tolist())


def _special_ids(header: Header, kind: _Kind, count: int) -> dict[str, int]:
    """The ids of bos, eos and so on that lie within the vocabulary."""
    keys = {
        "bos": ("bos_token_id", kind.bos),
        "eos": ("eos_token_id", kind.eos),
        "eot": ("eot_token_id", None),
        "eom": ("eom_token_id", None),
        "unknown": ("unknown_token_id", kind.unknown),
        "separator": ("seperator_token_id", kind.separator),
        "pad": ("padding_token_id", None),
    }
    found = {name: header.get(f"tokenizer.ggml.{key}", int, default) for name, (key, default) in keys.items()}
    if "tokenizer.ggml.separator_token_id" in header.metadata:
        found["separator"] = header.get("tokenizer.ggml.separator_token_id", int)
    return {name: index for name, index in found.items() if index is not None and 0 <= index < count}


def _end_ids(header: Header, vocabulary: _Vocabulary, specials: dict[str, int]) -> set[int]:
    """All tokens that end an answer.

    In vocabularies that have `<|return|>` or `<|flush|>` beside `<|call|>`, `<|end|>` ends a message inside an answer;
    where `<|tool_response>` stands, `</s>` is plain text.
    """
    texts = {
        token: index
        for index, token in enumerate(vocabulary.tokens)
        if token in END_TOKENS and (token not in PLAIN_LOOKING or vocabulary.types[index] == TokenType.CONTROL)
    }
    if texts.keys() & {"<|return|>", "<|flush|>"} and texts.keys() & {"<|call|>", "<|calls|>"}:
        texts.pop("<|end|>", None)
    if "<|tool_response>" in texts:
        texts.pop("</s>", None)
    return set(texts.values()) | {specials[name] for name in ("eos", "eot", "eom") if name in specials}


def _surroundings(header: Header, kind: _Kind, specials: dict[str, int]) -> tuple[list[int], list[int]]:
    """What stands before and after a text that is encoded with its special tokens."""
    add_bos = kind.add_bos
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        add_bos = pre_tokenizer(header.get("tokenizer.ggml.pre", str) or "default").add_bos
    add_bos = bool(header.get("tokenizer.ggml.add_bos_token", bool, add_bos))
    add_eos = bool(header.get("tokenizer.ggml.add_eos_token", bool, kind.add_eos))
    if header.metadata.get("tokenizer.ggml.model") == "bert":
        return _present(specials, "bos"), _present(specials, "separator")
    if header.metadata.get("tokenizer.ggml.model") == "gemma4":
        add_bos = True
    return _present(specials, "bos") if add_bos else [], _present(specials, "eos") if add_eos else []


def _present(specials: dict[str, int], name: str) -> list[int]:
    return [specials[name]] if name in specials else []


def _chat_templates(
    header: Header, vocabulary: _Vocabulary, specials: dict[str, int]
) -> tuple[ChatTemplates, list[str]]:
    prefix = "tokenizer.chat_template"
    sources = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in header.metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    notes: list[str] = []
    if not sources:
        known = default_template({vocabulary.tokens[index]: index for index in vocabulary.of_type(TokenType.CONTROL)})
        if known:
            sources["default"] = known[1]
            notes.append(f"The file has no chat template: the {known[0]} format is used, after its control tokens.")
    texts = {f"{name}_token": vocabulary.tokens[index] for name, index in specials.items()}
    return ChatTemplates(sources, {"bos_token": "", "eos_token": "", **texts}), notes


def _add_tokens(backend: Backend, vocabulary: _Vocabulary, eats_space: bool) -> None:
    """Control tokens, and those that stand in the text whole. `normalized=False`: matched before any rewriting.

    With `eats_space` they take the white space after them along; a mask takes that before it.
    """

    def token(index: int, special: bool) -> AddedToken:
        text = vocabulary.tokens[index]
        return AddedToken(
            text,
            normalized=False,
            special=special,
            lstrip=text in ("<mask>", "[MASK]"),
            rstrip=eats_space and text not in ("<unk>", "<s>", "<|endoftext|>"),
        )

    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    whole = vocabulary.of_type(TokenType.USER_DEFINED)
    backend.add_special_tokens([token(index, special=True) for index in control])
    backend.add_tokens([token(index, special=False) for index in whole])


def _is_phi3(header: Header) -> bool:
    """Phi-3's tokens swallow the white space after them, which GGUF has no place for: it goes by the name."""
    name = (header.get("general.name", str) or "").lower()
    return "phi-3" in name or "phi3" in name


def _merges(header: Header, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges whose parts and result are tokens; others can never apply."""
    merges = []
    for line in header.require("tokenizer.ggml.merges", list):
        split = line.find(" ", 1)
        left, right = line[:split], line[split + 1 :]
        if split > 0 and left in ids and right in ids and left + right in ids:
            merges.append((left, right))
    return merges


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    return {token: index for index, token in enumerate(vocabulary.tokens)}


def _byte_level(header: Header, vocabulary: _Vocabulary, kind: _Kind) -> Backend:
    rules = pre_tokenizer(header.get("tokenizer.ggml.pre", str) or "default")
    ids = _ids(vocabulary)
    backend = Backend(BPE(ids, _merges(header, ids), ignore_merges=rules.ignore_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _piece_decoder(strips_space: bool) -> decoders.Decoder:
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)


def _escaped_spaces(space_prefix: bool) -> normalizers.Normalizer:
    spaces = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if space_prefix else spaces


def _sentencepiece(header: Header, vocabulary: _Vocabulary, kind: _Kind) -> Backend:
    """Byte-pair merging by score: the pair whose union has the highest score is merged first."""
    ids = _ids(vocabulary)
    space_prefix = bool(header.get("tokenizer.ggml.add_space_prefix", bool, kind.space_prefix))
    unknown = vocabulary.tokens[_special_ids(header, kind, len(ids)).get("unknown", 0)]
    model = BPE(ids, _merges_by_score(vocabulary, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = _escaped_spaces(space_prefix)
    backend.decoder = _piece_decoder(space_prefix)
    return backend


def _merges_by_score(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a normal token together from two others, best first; of one token, shorter left parts first."""
    normal = vocabulary.of_type(TokenType.NORMAL)
    scores = vocabulary.scores
    merges = []
    for index in sorted(normal, key=lambda index: (-scores[index], index)):
        token = vocabulary.tokens[index]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    return merges


def _merged_pieces(header: Header, vocabulary: _Vocabulary, kind: _Kind) -> Backend:
    """Pieces as SentencePiece spells them, merged by a list. Only line breaks part words."""
    ids = _ids(vocabulary)
    backend = Backend(BPE(ids, _merges(header, ids), byte_fallback=True))
    backend.normalizer = _escaped_spaces(False)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    backend.decoder = _piece_decoder(False)
    return backend


def _unigram(header: Header, vocabulary: _Vocabulary, kind: _Kind) -> Backend:
    unknown = _special_ids(header, kind, len(vocabulary.tokens)).get("unknown")
    has_bytes = TokenType.BYTE in vocabulary.types
    scores = list(vocabulary.scores)
    for index in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN):
        scores[index] = min(vocabulary.scores) - OUT_OF_REACH
    model = Unigram(list(zip(vocabulary.tokens, scores, strict=True)), unknown, has_bytes)
    backend = Backend(model)
    charsmap = header.get("tokenizer.ggml.precompiled_charsmap", np.ndarray)
    steps: list[Any] = [] if charsmap is None else [normalizers.Precompiled(charsmap.astype(np.uint8).tobytes())]
    if header.get("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    space_prefix = bool(header.get("tokenizer.ggml.add_space_prefix", bool, kind.space_prefix))
    scheme = "always" if space_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=True)
    backend.decoder = _piece_decoder(space_prefix)
    return backend


def _word_piece(header: Header, vocabulary: _Vocabulary, kind: _Kind) -> Backend:
    """GGUF marks the starts of words where BERT's own files mark the rest."""
    special = set(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    for index, token in enumerate(vocabulary.tokens):
        if token.startswith(SPACE):
            vocabulary.tokens[index] = token[1:]
        elif index not in special and not _is_bracketed(token):
            vocabulary.tokens[index] = "##" + token
    unknown = vocabulary.tokens[_special_ids(header, kind, len(vocabulary.tokens)).get("unknown", 0)]
    backend = Backend(WordPiece(_ids(vocabulary), unk_token=unknown, max_input_chars_per_word=1 << 30))
    lowercase = bool(header.get("tokenizer.ggml.normalizer.lowercase", bool, True))
    accents = header.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _is_bracketed(token: str) -> bool:
    """[CLS], [unused7] and their like, which start no word and go on with none."""
    return token.startswith("[") and token.endswith("]") and len(token) > 2


_BUILDERS = {
    "gpt2": _byte_level,
    "gemma4": _merged_pieces,
    "llama": _sentencepiece,
    "bert": _word_piece,
    "t5": _unigram,
}
