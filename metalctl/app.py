"""The application object, and the options that every command has.

A command is a function whose first parameter is an `Invocation`. `@command()` registers it and adds the shared options
(`--json`, `--offline`, `-q`, `-v`, `--debug`), so that they may stand before or after the command's name.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any

import typer

from metalctl.output import Output
from metalctl.settings import Settings

EPILOG = """\
Every option has an environment variable: METALCTL_OFFLINE, METALCTL_CHAT_TEMPERATURE and so on. It comes after the
option itself and before config.toml.

Exit codes: 0 ok, 1 expected failure, 2 usage, 3 model not found (or not cached while offline), 4 network or hub,
5 does not fit in memory, 70 internal error, 130 interrupted."""

app = typer.Typer(
    name="metalctl",
    add_completion=False,
    invoke_without_command=True,  # the callback prints the help
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "METALCTL"},
    epilog=EPILOG,
)


@dataclass
class Run:
    """What one run of the program shares with its command through the parser's context."""

    output: Output = field(default_factory=Output)
    settings: Settings = field(default_factory=Settings)
    debug: bool = False


@dataclass(frozen=True)
class Invocation:
    """What every command gets beside its own arguments."""

    output: Output
    offline: bool
    debug: bool
    settings: Settings = field(default_factory=Settings)


JsonFlag = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
OfflineFlag = Annotated[bool, typer.Option("--offline", help="Use only what is cached; open no connection.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, notes or warnings.")]
VerboseCount = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; twice for most.")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_SHARED: dict[str, Any] = {
    "json": JsonFlag,
    "offline": OfflineFlag,
    "quiet": QuietFlag,
    "verbose": VerboseCount,
    "debug": DebugFlag,
}


def command(name: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register `function(invocation, ...)` as the command `name`, with the shared options added to its own."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        shared = [_keyword(key, 0 if key == "verbose" else False, annotation) for key, annotation in _SHARED.items()]
        context = inspect.Parameter("parser_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

        @wraps(function)
        def run(parser_context: typer.Context, **values: Any) -> None:
            flags = {key: values.pop(key) for key in _SHARED}
            function(_invocation(name, parser_context, flags), **values)

        run.__signature__ = inspect.Signature([context, *own, *shared])  # type: ignore[attr-defined]
        app.command(name, **settings)(run)
        return function

    return register


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _invocation(name: str, context: typer.Context, flags: dict[str, Any]) -> Invocation:
    """The shared options as given before the command's name, after it, or both."""
    run = context.find_object(Run) or Run()
    before = context.parent.params if context.parent else {}
    output = run.output
    output.command = name
    output.json = bool(flags["json"] or before.get("json"))
    output.quiet = bool(flags["quiet"] or before.get("quiet"))
    output.verbose = flags["verbose"] + (before.get("verbose") or 0)
    run.debug = bool(flags["debug"] or before.get("debug"))
    offline = bool(flags["offline"] or before.get("offline")) or offline_by_environment()
    return Invocation(output, offline, run.debug, run.settings)


def offline_by_environment() -> bool:
    """`METALCTL_OFFLINE` and the hubs' own `HF_HUB_OFFLINE`, in the usual spellings of yes."""
    return any(truthy(os.environ.get(key)) for key in ("METALCTL_OFFLINE", "HF_HUB_OFFLINE"))


def truthy(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on")
