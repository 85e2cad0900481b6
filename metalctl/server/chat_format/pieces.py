"""What an answer consists of, in the order in which it is written."""

import json
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Words:
    """Part of the reasoning or of the answer proper."""

    kind: Literal["reasoning", "text"]
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str | None = None  # where the model names its calls


Piece = Words | Call


def make_call(name: Any, arguments: Any, id: Any = None) -> Call:
    """Raises ValueError for what is not the name of a tool with an object of arguments."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("not a tool call")
    return Call(name.strip(), json.dumps(arguments, ensure_ascii=False), id if isinstance(id, str) else None)


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind put together."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Words) and isinstance(last, Words) and last.kind == piece.kind:
            result[-1] = Words(last.kind, last.text + piece.text)
        else:
            result.append(piece)
    return result
