"""The commands of a conversation: `/help` and the like."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from metalctl.engine.errors import MetalctlError, UsageError
from metalctl.repl.conversation import is_conversation, load, save
from metalctl.repl.options import NAMES

if TYPE_CHECKING:
    from metalctl.repl.loop import Repl


class Leave(Exception):
    """The user wants to go."""


def run(repl: "Repl", line: str) -> None:
    """Carry out one command. Raises UsageError for one that there is not, Leave for the last one."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else "/help lists what there is."
        raise UsageError(f"there is no command {name}", f"{hint} Another / in front sends it as a message.")
    command[1](repl, argument.strip())


def _help(repl: "Repl", _argument: str) -> None:
    width = max(len(usage) for usage, _ in HELP)
    for usage, summary in HELP:
        repl.say(f"  {usage.ljust(width)}  {summary}")


def _system(repl: "Repl", text: str) -> None:
    conversation = repl.chat.conversation
    if text:
        conversation.system = None if text == "none" else text
    repl.say(f"System prompt: {conversation.system}" if conversation.system else "There is no system prompt.")


def _set(repl: "Repl", argument: str) -> None:
    name, _, value = argument.partition(" ")
    if value.strip():
        repl.chat.options.set(name, value.strip())
    rows = repl.chat.options.listing(repl.chat.generation_defaults)
    if name and not value.strip() and name.replace("-", "_") not in dict(rows):
        raise UsageError(f"there is no setting {name}", f"There are {', '.join(NAMES)}.")
    for row, shown in rows:
        if not name or row == name.replace("-", "_"):
            repl.say(f"  {row.ljust(20)}{shown}")


def _retry(repl: "Repl", _argument: str) -> None:
    messages = repl.chat.conversation.messages
    before = list(messages)
    text = repl.chat.conversation.undo()
    if text is None:
        raise UsageError("there is nothing to retry")
    params = repl.chat.options.params(repl.chat.generation_defaults)
    if params.temperature == 0 or params.seed is not None:
        repl.say("With temperature 0 or a seed the answer is the same again; /set temperature 0.7 changes that.")
    try:
        repl.answer(text)
    finally:
        if len(messages) < len(before):  # it brought nothing
            messages[:] = before


def _undo(repl: "Repl", _argument: str) -> None:
    text = repl.chat.conversation.undo()
    if text is None:
        raise UsageError("there is nothing to take back")
    repl.say(f"Taken back: {shortened(text)}")


def _clear(repl: "Repl", _argument: str) -> None:
    repl.chat.conversation.messages.clear()
    repl.say("A new conversation; the system prompt stays." if repl.chat.conversation.system else "A new conversation.")


def _save(repl: "Repl", argument: str) -> None:
    path = _path(argument, "/save FILE")
    if path.exists() and not is_conversation(path):
        raise MetalctlError(f"{path} exists and is no conversation; it is left as it is.")
    save(repl.chat.conversation, path)
    repl.say(f"Saved {len(repl.chat.conversation.messages)} messages to {path}.")


def _load(repl: "Repl", argument: str) -> None:
    loaded = load(_path(argument, "/load FILE"))
    conversation = repl.chat.conversation
    conversation.system, conversation.messages[:] = loaded.system, loaded.messages
    repl.recall()


def _bye(_repl: "Repl", _argument: str) -> None:
    raise Leave


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise UsageError("a file name is missing", f"It is written {usage}.")
    return Path(argument.strip("\"'")).expanduser()


def shortened(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


_Command = Callable[["Repl", str], None]

COMMANDS: dict[str, tuple[str, _Command]] = {
    "/help": ("show this", _help),
    "/system": ("show the system prompt, or set it; none removes it", _system),
    "/set": ("show the settings, or set one; default forgets it", _set),
    "/retry": ("answer the last message again", _retry),
    "/undo": ("take back the last exchange", _undo),
    "/save": ("write the conversation to FILE", _save),
    "/load": ("go on with the conversation in FILE", _load),
    "/clear": ("start a new conversation", _clear),
    "/bye": ("leave; so do Ctrl-D, and Ctrl-C twice", _bye),
}
_OTHER_NAMES = {"/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/?": "/help", "/new": "/clear"}
_TAKES = {"/system": "[TEXT]", "/set": "[NAME [VALUE]]", "/save": "FILE", "/load": "FILE"}
ARGUMENTS = {"/set": NAMES, "/save": "path", "/load": "path"}
HELP = [
    *((f"{name} {_TAKES.get(name, '')}".strip(), summary) for name, (summary, _) in COMMANDS.items()),
    ("Enter", "send; Alt-Enter, Ctrl-J or a \\ before it: a new line"),
    ('"""', "begins a message of several lines, and ends it"),
    ("Ctrl-C", "stop the answer and keep what it said"),
    ("Ctrl-R", "search earlier lines; Ctrl-X Ctrl-E opens an editor"),
]
