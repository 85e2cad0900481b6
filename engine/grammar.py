"""Structured output: which tokens a grammar allows next, by llguidance.

A compiler belongs to one tokenizer and is slow to make; a compiled grammar belongs to one request. Neither needs the
engine's thread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from metalctl.engine.errors import MetalctlError, UsageError
from metalctl.engine.models.tokenizer import Tokenizer

# Between the parts of a JSON text: room for indenting, but not for a model that would write blanks for ever.
WHITE_SPACE = r"[ \n]{0,16}"

_SENTINEL = b"\x02"  # a character that no token joins to others


class GrammarError(MetalctlError):
    """A grammar that was accepted came to a dead end, or grew beyond llguidance's limits."""

    type = "grammar"


@dataclass(frozen=True, slots=True)
class Preamble:
    """Reasoning that may stand before what a grammar describes, by its two control tokens."""

    open_id: int
    close_id: int
    opened: bool = False  # by the prompt


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON texts that a schema describes; True: of any JSON text.

    Raises UsageError for a schema that is nested too deeply; whether it can be used is seen when it is compiled.
    """
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "coerce_one_of": True}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the schema cannot be used: {error}") from None


def any_object() -> str:
    """The grammar of JSON objects."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """The grammar of the texts that match a regular expression from beginning to end."""
    return LLMatcher.grammar_from_regex(pattern)


def lark(definition: str) -> str:
    """A grammar in llguidance's variant of Lark."""
    return json.dumps({"grammars": [{"name": "lark", "lark_grammar": definition}]})


@dataclass(frozen=True, slots=True)
class Marker:
    """What begins something special in a text: a control token, or with `token_id` None plain characters."""

    text: str
    token_id: int | None = None

    @property
    def lark(self) -> str:
        return json.dumps(self.text) if self.token_id is None else f"<[{self.token_id}]>"


def or_marked(grammar: str, marker: Marker) -> str:
    """Either what the grammar describes, or any text that begins with the marker."""
    inner = json.loads(grammar)["grammars"][0]
    definition = f"start: @answer | {marker.lark} REST\nREST: /(.|\\n)*/"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": definition}, {**inner, "name": "answer"}]})


def text_with(marker: Marker, variants: Sequence[tuple[str, Mapping[str, Any], str]]) -> str:
    """Any text, in which a marker is always followed by one of the variants: (before, JSON schema, after)."""
    named = [{"name": f"schema_{i}", **_inner(schema)} for i, (_, schema, _) in enumerate(variants)]
    bodies = (f"{json.dumps(a)} @schema_{i} {json.dumps(b)}" for i, (a, _, b) in enumerate(variants))
    opening = f"opening: TEXT {marker.lark}" if marker.token_id is not None else f"opening[lazy]: TEXT {marker.lark}"
    definition = f"start: (opening body)* ending\nending: TEXT\nTEXT: /(.|\\n)*/\n{opening}\nbody: {' | '.join(bodies)}"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": definition}, *named]})


def _after_space(grammar: str) -> str:
    """The grammar, with a space before it allowed."""
    parts = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"name": "spaced", "lark_grammar": f'start: " "? @{parts[0]["name"]}'}, *parts]})


def _inner(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"json_schema": json.loads(json_schema(schema))["grammars"][0]["json_schema"]}


class GrammarCompiler:
    """Compiles grammars for the tokens of one tokenizer. `vocab_size` is the number of logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @cached_property
    def _tokens(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
        ends = sorted(vocabulary.eos_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=ends)

    @cached_property
    def _puts_space_first(self) -> bool:
        """Whether the model has learned to begin a text with a space, which is no part of it."""
        first = self._tokenizer.encode("a")[:1]
        return bool(first) and (self._tokenizer.token_bytes(first[0]) or b"").startswith(b" ")

    def compile(self, grammar: str, preamble: Preamble | None = None) -> "TokenGrammar":
        """Raises UsageError for a grammar that is wrong or too large. May take long: up to a second."""
        grammar = _after_space(grammar) if self._puts_space_first else grammar
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise UsageError(f"the grammar or schema cannot be used: {_reason(matcher)}")
        return TokenGrammar(matcher, self._vocab_size, preamble)


class TokenGrammar:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, preamble: Preamble | None = None):
        self._matcher = matcher
        self._preamble = preamble
        self._reasoning = preamble is not None and preamble.opened
        self._words = np.zeros((vocab_size + 31) // 32, np.int32)
        self._read()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can follow."""
        return not self._reasoning and self._matcher.is_stopped()

    def fill(self, allowed: NDArray[np.bool_]) -> None:
        """Write into `allowed` `[V]` which tokens may come next."""
        if self._reasoning:
            allowed[:] = True
            return
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: allowed.size]
        allowed[: bits.size] = bits
        allowed[bits.size :] = False

    def advance(self, token_id: int) -> None:
        """Take note of the token that was chosen. Raises GrammarError."""
        if self._preamble is not None and self._is_aside(token_id, self._preamble):
            return
        self._preamble = None
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"the grammar does not allow what was chosen: {_reason(self._matcher)}")
        self._read()

    def _is_aside(self, token_id: int, preamble: Preamble) -> bool:
        """Whether the token belongs to the reasoning before the text proper."""
        if self._reasoning:
            if token_id == preamble.close_id:
                self._reasoning, self._preamble = False, None
                self._read()
            return True
        self._reasoning = token_id == preamble.open_id
        return self._reasoning

    def _read(self) -> None:
        """Compute the mask once for each token, in the thread that learns of it."""
        if self._reasoning or self._matcher.is_stopped():
            return
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_reason(self._matcher)}")
        if self._preamble is not None:
            word, bit = divmod(self._preamble.open_id, 32)
            self._words.view(np.uint32)[word] |= np.uint32(1 << bit)


class _Vocabulary:
    """A tokenizer as llguidance asks for it: the bytes of each token, and which of them are control tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int):
        self._tokenizer = tokenizer
        spelled = [tokenizer.token_bytes(token) for token in range(size)]
        names = tokenizer.backend.id_to_token
        special = sorted(token for token in tokenizer.special_ids if token < size)
        self.tokens = [b"" if text is None else text for text in spelled]
        for token in special:
            self.tokens[token] = (names(token) or "").encode()
        self.special_token_ids = special
        self.bos_token_id = tokenizer.bos_token_id
        # A model without an end of sequence stops when its grammar does; llguidance wants some token all the same.
        self.eos_token_ids = {token for token in tokenizer.eos_token_ids if token < size} or {size - 1}
        self.eos_token_id = min(self.eos_token_ids)

        self._by_bytes = {text: token for token, text in reversed(list(enumerate(spelled))) if text}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens that spell exactly this text, as the model would write them where that can be had."""
        data = text.encode() if isinstance(text, str) else text
        for before in (b"", _SENTINEL):
            tokens = self._tokenizer.encode((before + data).decode("utf-8", "replace"))
            tokens = self._without(before, tokens)
            if b"".join(self.tokens[token] for token in tokens) == data:
                return tokens
        return self._longest_first(data)

    def _without(self, before: bytes, tokens: list[int]) -> list[int]:
        """The tokens after those that spell `before`, and the space that some tokenizers put first."""
        spelled = b""
        for index, token in enumerate(tokens):
            if spelled.lstrip() == before:
                return tokens[index:]
            spelled += self.tokens[token]
        return tokens

    def _longest_first(self, data: bytes) -> list[int]:
        tokens = []
        while data:
            pieces = (data[:length] for length in range(min(self._longest, len(data)), 0, -1))
            piece = next((piece for piece in pieces if piece in self._by_bytes), None)
            if piece is None:
                break
            tokens.append(self._by_bytes[piece])
            data = data[len(piece) :]
        return tokens


def _reason(matcher: LLMatcher) -> str:
    """llguidance's message in one line."""
    return " ".join(matcher.get_error().split())[:300] or "a dead end"
