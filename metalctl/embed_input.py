"""Where the texts of `metalctl embed` come from: arguments, a pipe, or a file of lines, JSONL or CSV."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from metalctl.engine.errors import StorageError, UsageError

FIELDS = ("text", "input", "content")  # where a record's text is looked for


class InputFormat(StrEnum):
    LINES = "lines"
    JSONL = "jsonl"
    CSV = "csv"
    TEXT = "text"  # all of it is one text


@dataclass(frozen=True, slots=True)
class Text:
    """A text, the id that its record had, and what to call its place in an error."""

    text: str
    id: Any
    place: str


def from_arguments(words: Iterable[str]) -> Iterator[Text]:
    for number, word in enumerate(words, 1):
        yield Text(word, None, f"text {number}")


def from_file(path: Path, kind: InputFormat | None, field: str | None) -> Iterator[Text]:
    """The texts of a file, as they are read. Without `kind` its name tells. Raises UsageError and StorageError."""
    try:
        with path.expanduser().open(encoding="utf-8-sig", newline="") as stream:
            yield from _texts(stream, kind or kind_of(path), field, str(path))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}.", "`iconv -t utf-8` converts it.") from error


def from_pipe(kind: InputFormat | None, field: str | None) -> Iterator[Text]:
    """The texts of standard input, one a line unless `kind` says otherwise. Raises UsageError."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("there is no text.", "Give texts as arguments, pipe lines in, or name a --file.")
    try:
        lines = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(sys.stdin.buffer))
        yield from _texts(lines, kind or InputFormat.LINES, field, "standard input")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8 text: {error.reason}.", "`iconv -t utf-8` converts it."
        ) from error


def kind_of(path: Path) -> InputFormat:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return InputFormat.JSONL
        case ".csv" | ".tsv":
            return InputFormat.CSV
        case _:
            return InputFormat.LINES


def _texts(lines: Iterable[str], kind: InputFormat, field: str | None, where: str) -> Iterator[Text]:
    match kind:
        case InputFormat.TEXT:
            yield Text("".join(lines).rstrip("\r\n"), None, where)
        case InputFormat.LINES:
            for number, line in enumerate(lines, 1):
                yield Text(line.rstrip("\r\n"), None, f"{where}, line {number}")
        case InputFormat.JSONL:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _from_json(line, field, f"{where}, line {number}")
        case InputFormat.CSV:
            yield from _from_csv(lines, field, where)


def _from_json(line: str, field: str | None, place: str) -> Text:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}") from error
    if isinstance(record, str):
        return Text(record, None, place)
    if not isinstance(record, dict):
        raise UsageError(f"{place} is neither a string nor an object.")
    name = field or next((name for name in FIELDS if name in record), FIELDS[0])
    text = record.get(name)
    if not isinstance(text, str):
        there = ", ".join(record) or "nothing"
        raise UsageError(f"{place} has no text in {name!r}.", f"It has {there}; --field says where the text is.")
    return Text(text, record.get("id"), place)


def _from_csv(lines: Iterable[str], field: str | None, where: str) -> Iterator[Text]:
    reader = csv.DictReader(lines, dialect="excel-tab" if where.lower().endswith(".tsv") else "excel")
    columns = list(reader.fieldnames or [])
    name = field or next((name for name in FIELDS if name in columns), columns[0] if len(columns) == 1 else None)
    if name is None or name not in columns:
        there = ", ".join(columns) or "none"
        raise UsageError(f"{where} has no column {name or FIELDS[0]!r}.", f"It has {there}; --field says which.")
    try:
        for record in reader:
            yield Text(record[name] or "", record.get("id"), f"{where}, line {reader.line_num}")
    except csv.Error as error:
        raise UsageError(f"{where}, line {reader.line_num}: {error}.") from error
