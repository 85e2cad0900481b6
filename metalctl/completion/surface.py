"""What can be completed: the program's commands and options, read off the functions behind them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

from metalctl.app import app

Kind = Literal["models", "files", "words", "nothing"]


@dataclass(frozen=True, slots=True)
class Value:
    """What may stand in a place: models' names, files, one of some words, or what cannot be foreseen."""

    kind: Kind
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    names: tuple[str, ...]  # the long one first
    help: str
    value: Value | None  # None: it is a switch
    repeats: bool


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    help: str
    options: tuple[Option, ...]
    argument: Value  # the first
    repeats: bool  # whether more of the same may follow


def surface() -> tuple[Command, tuple[Command, ...]]:
    """The program itself with the options that stand before a command, and its commands."""
    import metalctl.cli  # noqa: F401  (it collects the commands)

    assert app.registered_callback is not None and app.registered_callback.callback is not None
    root = _command("metalctl", app.registered_callback.callback)
    commands = [_command(entry.name or "", entry.callback) for entry in app.registered_commands if entry.callback]
    return root, tuple(commands)


def _command(name: str, function: Callable[..., Any]) -> Command:
    options, arguments = [], []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        annotation, *metadata = get_args(parameter.annotation) or (parameter.annotation,)
        for info in metadata:
            if isinstance(info, OptionInfo) and not info.hidden:
                options.append(_option(parameter.name, annotation, info))
            elif isinstance(info, ArgumentInfo) and not info.hidden:
                arguments.append((_argument(annotation, info), _is_list(annotation)))
    options.append(Option(("--help", "-h"), "Show this message and exit.", None, False))
    argument, repeats = arguments[0] if arguments else (Value("nothing"), False)
    return Command(name, _first_sentence(function.__doc__ or ""), tuple(options), argument, repeats)


def _option(name: str, annotation: Any, info: OptionInfo) -> Option:
    # In an Annotated, typer.Option takes the first of the names for a default.
    declared = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    written = [part for text in declared for part in text.split("/")]
    names = sorted(written or [f"--{name.replace('_', '-')}"], key=lambda text: not text.startswith("--"))
    switch = info.count or _plain(annotation) is bool
    repeats = info.count or _is_list(annotation)
    return Option(tuple(names), info.help or "", None if switch else _value(annotation), bool(repeats))


def _argument(annotation: Any, info: ArgumentInfo) -> Value:
    return Value("models") if (info.metavar or "").startswith("REF") else _value(annotation)


def _value(annotation: Any) -> Value:
    plain = _plain(annotation)
    if get_origin(plain) is Literal:
        return Value("words", get_args(plain))
    return Value("files" if plain is Path else "nothing")


def _plain(annotation: Any) -> Any:
    """The type without `None`, and that of a list's members."""
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    return _plain(get_args(annotation)[0]) if get_origin(annotation) is list else annotation


def _is_list(annotation: Any) -> bool:
    return any(get_origin(part) is list for part in (annotation, *get_args(annotation)))


def _first_sentence(text: str) -> str:
    return " ".join(text.strip().split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
