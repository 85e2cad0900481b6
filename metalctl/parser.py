"""The command line's parser, made from the commands that are registered, and the defaults that config.toml gives it."""

import difflib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import typer

from metalctl.app import app
from metalctl.engine.errors import UsageError
from metalctl.settings import Settings


def build_parser() -> Any:
    """The parser of all commands. Environment variables are explained once, at the end of the help."""
    root = typer.main.get_command(app)
    for parser in (root, *_commands(root).values()):
        for option in _options(parser).values():
            option.show_envvar = False
            option.show_default = option.show_default and not option.count and not isinstance(option.default, bool)
            option.allow_from_autoenv = option.name not in ("version", "help")
        for parameter in filter(lambda each: hasattr(each, "display_type_rich"), parser.params):  # not in old versions
            parameter.display_type_rich = partial(_shown_type, parameter.param_type_name, parameter.display_type_rich)
    return root


_SHOWN = {"str": "TEXT", "int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "path": "FILE"}


def _shown_type(kind: str, original: Callable[..., str], ctx: Any) -> str:
    """What stands behind an option in the help; an argument's own name says enough."""
    inner = original(ctx=ctx).strip("<>")
    inner = inner.removeprefix("list[").removesuffix("]")
    return "" if kind == "argument" else _SHOWN.get(inner, inner)


def default_map(root: Any, settings: Settings) -> dict[str, Any]:
    """`settings.options` checked against the options that there are. Raises UsageError for any other key."""
    shared, tables = _options(root), _commands(root)
    defaults: dict[str, Any] = {}
    for key, value in settings.options.items():
        if key in tables and isinstance(value, dict):
            defaults[key] = _table(tables[key], key, value, settings)
        elif key in shared and key not in ("version", "help"):
            defaults[key] = value
        else:
            raise _unknown(key, [*tables, *shared, "model", "hub", "aliases"], settings)
    return defaults


def _table(parser: Any, name: str, table: dict[str, Any], settings: Settings) -> dict[str, Any]:
    options = _options(parser)
    for key in table:
        if key not in options or key == "help":
            raise _unknown(f"{name}.{key}", [f"{name}.{option}" for option in options], settings)
    return {key: _as_given(options[key], value) for key, value in table.items()}


def _as_given(option: Any, value: Any) -> Any:
    """An option that may be repeated takes a list; one value is written without brackets."""
    return [value] if option.multiple and not isinstance(value, list) else value


def _unknown(key: str, known: Iterable[str], settings: Settings) -> UsageError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0].replace('_', '-')}?" if near else "`metalctl COMMAND --help` lists the options."
    return UsageError(f"{key.replace('_', '-')} in {settings.path} is not a setting.", hint)


def _commands(root: Any) -> dict[str, Any]:
    return {name.replace("-", "_"): parser for name, parser in getattr(root, "commands", {}).items()}


def _options(parser: Any) -> dict[str, Any]:
    return {option.name: option for option in parser.params if option.param_type_name == "option"}
