"""The application object, and the options that every command has.

A command is a function whose first parameter is an `Invocation`. `@command()` registers it and adds the shared options
(`--json`, `--offline`, `-q`, `-v`, `--debug`), so that they may stand before or after the command's own arguments.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from metalctl.output import Output

EXIT_CODES = """\
Exit codes: 0 ok, 1 expected failure, 2 usage, 3 model not found (or not cached while offline), 4 network or hub,
5 does not fit in memory, 70 internal error, 130 interrupted."""

app = typer.Typer(
    name="metalctl",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "METALCTL"},
    epilog=EXIT_CODES,
)


@dataclass(frozen=True)
class Invocation:
    """What every command gets beside its own arguments."""

    output: Output
    offline: bool
    debug: bool


_SHARED: dict[str, Any] = {
    "json": Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")],
    "offline": Annotated[bool, typer.Option("--offline", help="Use only what is cached; open no connection.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="No progress, notes or warnings.")],
    "verbose": Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; twice for most.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}


def command(name: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register `function(invocation, ...)` as the command `name`, with the shared options added to its own."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        shared = [
            inspect.Parameter(f"shared_{key}", inspect.Parameter.KEYWORD_ONLY, default=0 if key == "verbose" else False,
                              annotation=annotation)
            for key, annotation in _SHARED.items()
        ]  # fmt: skip
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        @wraps(function)
        def run(**values: Any) -> None:
            flags = {key: values.pop(f"shared_{key}") for key in _SHARED}
            output = Output(flags["json"], flags["quiet"], flags["verbose"], name)
            offline = flags["offline"] or offline_by_environment()
            function(Invocation(output, offline, flags["debug"]), **values)

        run.__signature__ = inspect.Signature(own + shared)  # type: ignore[attr-defined]
        app.command(name, **settings)(run)
        return function

    return register


def offline_by_environment() -> bool:
    """`METALCTL_OFFLINE` and the hubs' own `HF_HUB_OFFLINE`, in the usual spellings of yes."""
    return any(truthy(os.environ.get(key)) for key in ("METALCTL_OFFLINE", "HF_HUB_OFFLINE"))


def truthy(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on")
