"""Text to tokens and back, over a tokenizer of the tokenizers library."""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from metalctl.engine.models.chat_template import ChatTemplates, Message
from metalctl.engine.models.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

SPACE = "\u2581"  # how SentencePiece spells a space


class Tokenizer:
    """One model's vocabulary, its control tokens and its chat templates. Safe to use from several threads.

    `prefix_ids` and `suffix_ids` stand around a text that is encoded with `add_special_tokens`. `chat_bos_id` is put in
    front of a rendered conversation that does not start with it. Text of a user never becomes a control token, unless
    `parse_special` asks for it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        chat_bos_id: int | None = None,
        chat_templates: ChatTemplates | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefix_ids = list(prefix_ids)
        self.suffix_ids = list(suffix_ids)
        self.chat_bos_id = chat_bos_id
        self.chat_templates = chat_templates or ChatTemplates({})
        self._lock = threading.Lock()
        self._spelling = _Spelling.of(backend)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The control tokens: they are not part of an answer's text."""
        return frozenset(token for token, content in self._added.items() if content.special)

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`. Half a surrogate pair, which no encoding has, becomes U+FFFD."""
        with self._lock:
            self.backend.encode_special_tokens = not parse_special
            ids = self.backend.encode(_well_formed(text), add_special_tokens=False).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else list(ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary give nothing."""
        if self._spelling is None:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join([*map(detokenizer.add, ids), detokenizer.finish()])

    def detokenizer(self, skip_special_tokens: bool = True, *, continues: bool = False) -> Detokenizer:
        """A new stream of text. With `continues` the text goes on from other text, and keeps its leading space."""
        if self._spelling is None:
            return WindowDetokenizer(lambda ids: self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        spell = self.token_bytes if skip_special_tokens else self._bytes
        return ByteDetokenizer(spell, strip_space=self._spelling.strips_space and not continues)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token adds to a text, in UTF-8, maybe part of a character; None: a control token, or no token."""
        return None if token_id in self.special_ids else self._bytes(token_id)

    def _bytes(self, token_id: int) -> bytes | None:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return None
        if self._spelling is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return self._spelling.spell(token, added=token_id in self._added)

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    def render_chat_template(self, messages: Sequence[Message], **variables: Any) -> str:
        """The conversation as the model's template writes it; for parameters and errors see ChatTemplates.render."""
        return self.chat_templates.render(messages, **variables)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The conversation as tokens; control tokens in the rendered text are recognised, wherever they come from."""
        text = self.render_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        ids = self.encode(text, parse_special=True)
        if self.chat_bos_id is not None and ids[:1] != [self.chat_bos_id]:
            ids.insert(0, self.chat_bos_id)
        return ids


class _Spelling:
    """How the tokens of a vocabulary spell bytes."""

    def __init__(self, byte_level: bool, strips_space: bool = False):
        self.byte_level = byte_level
        self.strips_space = strips_space

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "_Spelling | None":
        """Read off the decoder: byte-level, or SentencePiece with byte fallback; None: something else."""
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        pieces = [step for step in steps if step["type"] not in ("Fuse", "ByteFallback")]
        spaces = [step for step in pieces if step["type"] == "Replace"]
        strips = [step for step in pieces if step["type"] == "Strip"]
        if "ByteFallback" not in kinds or len(spaces) + len(strips) != len(pieces) or len(spaces) != 1:
            return None
        plain = spaces[0].get("pattern") == {"String": SPACE} and spaces[0].get("content") == " "
        one_space = all(s.get("content") == " " and (s.get("start"), s.get("stop")) == (1, 0) for s in strips)
        return cls(byte_level=False, strips_space=bool(strips)) if plain and one_space else None

    def spell(self, token: str, added: bool) -> bytes:
        if not self.byte_level:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return _byte_token(token)
            return token.replace(SPACE, " ").encode()
        if added:
            return token.encode()
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:
            return token.encode()


def _byte_token(token: str) -> bytes:
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return token.encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_BYTES = _byte_alphabet()


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
