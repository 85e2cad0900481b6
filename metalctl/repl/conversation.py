"""A conversation: its messages, and its file."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from metalctl.engine.errors import MetalctlError, StorageError
from metalctl.settings import state_folder

SCHEMA = 1
_KIND = "metalctl conversation"

Role = Literal["user", "assistant"]


@dataclass
class Message:
    role: Role
    content: str
    reasoning: str = ""

    def for_template(self) -> dict[str, Any]:
        message = {"role": self.role, "content": self.content}
        return message | {"reasoning_content": self.reasoning} if self.reasoning else message


@dataclass
class Conversation:
    """`messages` alternate between user and assistant. The system prompt stands apart, so that it can be changed."""

    model: str | None = None
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def for_template(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message.for_template() for message in self.messages]

    def undo(self) -> str | None:
        """Take back the last exchange. Returns what the user had said, None when nothing was."""
        while self.messages:
            message = self.messages.pop()
            if message.role == "user":
                return message.content
        return None


def last_conversation() -> Path:
    return state_folder() / "conversation.json"


def save(conversation: Conversation, path: Path) -> None:
    """Write the file whole or not at all, readable by its owner only. Raises StorageError."""
    record = {"kind": _KIND, "schema": SCHEMA, **asdict(conversation)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file, ensure_ascii=False, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise StorageError(f"cannot save the conversation to {path}: {error.strerror}") from error


def is_conversation(path: Path) -> bool:
    """Whether `path` holds a conversation that `save` wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("kind") == _KIND


def load(path: Path) -> Conversation:
    """Raises StorageError when `path` cannot be read, MetalctlError when it holds something else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"there is no conversation at {path}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MetalctlError(f"{path} is not a saved conversation: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != _KIND:
        raise MetalctlError(f"{path} is not a saved conversation.", "/save writes one.")
    if record.get("schema") != SCHEMA:
        raise MetalctlError(f"{path} was saved by another version of metalctl.")
    try:
        messages = [Message(**message) for message in record["messages"]]
        return Conversation(record["model"], record["system"], messages)
    except (KeyError, TypeError) as error:
        raise MetalctlError(f"{path} is not a saved conversation: {error}") from error
