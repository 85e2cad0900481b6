"""The line at which the user types: keys, history, completion."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_QUOTES = '"""'


class CommandCompleter(Completer):
    """Slash commands, and the words that some of them take. `arguments` maps a command to its words, or to "path"."""

    def __init__(self, commands: Mapping[str, str], arguments: Mapping[str, Any]):
        self._commands, self._arguments = commands, arguments
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            for command, summary in self._commands.items():
                if command.startswith(name):
                    yield Completion(command, -len(name), display_meta=summary)
        elif self._arguments.get(name) == "path":
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)
        else:
            words = self._arguments.get(name, ())
            yield from (Completion(word, -len(rest)) for word in words if word.startswith(rest))


def prompt_session(history: Path | None, completer: Completer, **streams: Any) -> "PromptSession[str]":
    """A prompt at which Enter sends, and pasted lines stay together.

    Alt-Enter, Ctrl-J, a backslash at the end and an open triple quote make a new line.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(history),
        completer=completer,
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=lambda _width, _line, _soft: FormattedText([("ansibrightblack", "... ")]),
        placeholder=FormattedText([("ansibrightblack", "Send a message, or /help")]),
        enable_open_in_editor=True,
        **streams,
    )
    return session


def unquote(text: str) -> str:
    """What was typed between triple quotes, without them; anything else as it is."""
    stripped = text.strip()
    if len(stripped) >= 2 * len(_QUOTES) and stripped.startswith(_QUOTES) and stripped.endswith(_QUOTES):
        return stripped[len(_QUOTES) : -len(_QUOTES)].strip("\n")
    return text


def _history(path: Path | None) -> History:
    """A file that only its owner can read; memory when it cannot be written, or must not."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send_or_continue(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text
        if text.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) == 1:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
