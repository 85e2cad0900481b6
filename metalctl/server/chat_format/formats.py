"""What a model's template says of the way it is asked and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from metalctl.engine.grammar import Marker, Preamble
from metalctl.reasoning import TAGS, ReasoningSplitter, opened_by
from metalctl.server.chat_format.calls import CallSplitter
from metalctl.server.chat_format.harmony import HarmonyParser
from metalctl.server.chat_format.pieces import Piece, Words
from metalctl.server.chat_format.syntaxes import TAGGED, Syntax, Tools, json_calls, syntax_of

if TYPE_CHECKING:
    from metalctl.engine.models.tokenizer import Tokenizer

_SWITCHES = ("enable_thinking", "reasoning_effort", "thinking")


class AnswerParser(Protocol):
    """Gets an answer's text in any pieces; what it gives, joined, does not depend on where they are cut.

    `finish` is told whether the answer was cut off by a limit.
    """

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, cut: bool = False) -> list[Piece]: ...


@dataclass(frozen=True)
class ChatFormat:
    """How a model takes tools and how it writes calls and reasoning."""

    templates: str  # the sources of all templates
    syntax: Syntax
    control: Mapping[str, int]  # the control tokens, by their text
    tokens: Mapping[str, int]  # those of the reasoning tags that are one token each

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "ChatFormat":
        templates = "\n".join(tokenizer.chat_templates.sources.values())
        named = tokenizer.backend.id_to_token
        control = {name: token for token in tokenizer.special_ids if (name := named(token))}
        tags = {tag for pair in TAGS for tag in pair}
        tokens = {tag: token for tag in tags if (token := tokenizer.backend.token_to_id(tag)) is not None}
        return cls(templates, syntax_of(templates), control, tokens)

    @property
    def marker(self) -> Marker:
        """What begins a call."""
        return Marker(self.syntax.start, self.control.get(self.syntax.start))

    @property
    def calls_are_json(self) -> bool:
        """Whether a call is an object with name and arguments between two tags."""
        return self.syntax is TAGGED and "<function=" not in self.templates and "<arg_key>" not in self.templates

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.templates

    @property
    def takes_developer(self) -> bool:
        return "developer" in self.templates

    @property
    def can_switch_reasoning(self) -> bool:
        return any(switch in self.templates for switch in _SWITCHES)

    @property
    def is_harmony(self) -> bool:
        return "<|channel|>" in self.templates and "<|message|>" in self.templates

    def hides_markers(self, with_tools: bool) -> bool:
        """Whether a marker that must be seen in the text is a control token, which is left out by default."""
        markers = [tag for pair in TAGS for tag in pair if pair[0] in self.templates]
        if with_tools:
            markers += [self.syntax.start, self.syntax.end]
        pieces = {part for marker in markers for part in self.control if part and part in marker}
        return self.is_harmony or bool(pieces)

    def parser(self, prompt: str, tools: Tools, forced: bool = False) -> AnswerParser:
        """For the answer to a rendered prompt. `forced`: a grammar makes the answer the JSON of calls."""
        if forced:
            return AnswerSplitter(ReasoningSplitter(opened_by(prompt)), ForcedCalls())
        if self.is_harmony:
            return HarmonyParser()
        return AnswerSplitter(ReasoningSplitter(opened_by(prompt)), CallSplitter(self.syntax, tools) if tools else None)

    def preamble(self, prompt: str) -> Preamble | None:
        """The reasoning that may come before a structured answer to the prompt."""
        closing = opened_by(prompt)
        for start, close in TAGS:
            known = start in self.tokens and close in self.tokens
            if known and (close == closing or (closing is None and start in self.templates)):
                return Preamble(self.tokens[start], self.tokens[close], opened=closing is not None)
        return None


class ForcedCalls:
    """Calls that a grammar has made: JSON and nothing else, seen when it is whole."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self, cut: bool = False) -> list[Piece]:
        try:
            return list(json_calls(self._text))
        except ValueError:
            return [Words("text", self._text)] if self._text else []


class AnswerSplitter:
    """Reasoning first, then text with calls in it."""

    def __init__(self, reasoning: ReasoningSplitter, calls: CallSplitter | ForcedCalls | None):
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        return self._convert(self._reasoning.feed(text))

    def finish(self, cut: bool = False) -> list[Piece]:
        pieces = self._convert(self._reasoning.finish())
        return pieces + (self._calls.finish(cut) if self._calls else [])

    def _convert(self, pieces: Sequence[Any]) -> list[Piece]:
        result: list[Piece] = []
        for piece in pieces:
            if piece.kind == "text" and self._calls is not None:
                result += self._calls.feed(piece.text)
            else:
                result.append(Words(piece.kind, piece.text))
        return result
