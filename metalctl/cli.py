"""The program's entry: commands are collected here, and errors become messages and exit codes here and nowhere else."""

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from metalctl.app import DebugFlag, JsonFlag, OfflineFlag, QuietFlag, Run, VerboseCount, app, truthy
from metalctl.commands import bench, chat, completion, doctor, embed, list_models, pull, rm, serve, show  # noqa: F401  (importing a command registers it)
from metalctl.engine.errors import MetalctlError, StorageError, UsageError
from metalctl.output import Output
from metalctl.parser import build_parser, default_map
from metalctl.settings import Settings, load_settings
from metalctl.version import __version__, versions

# Typer's own parse errors share this base; it is not exported under a name of its own.
_ParseError: type[Exception] = typer.BadParameter.__bases__[0]

INTERRUPTED = 130
INTERNAL = 70


class Interrupted(MetalctlError):
    exit_code = INTERRUPTED
    type = "interrupted"


class InternalError(MetalctlError):
    exit_code = INTERNAL
    type = "internal"


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    json: JsonFlag = False,
    offline: OfflineFlag = False,
    quiet: QuietFlag = False,
    verbose: VerboseCount = 0,
    debug: DebugFlag = False,
) -> None:
    """Run language models on this machine: Metal, CUDA or a plain CPU, from Hugging Face, ModelScope or disk."""
    if version:
        _print_version(Output(json=json, command="version"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Never raises, never prints a traceback without `--debug`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _quieten_libraries()
    run = _first_guess(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 gets "?", not a crash
    try:
        return _run(arguments, run)
    except BrokenPipeError:
        # The reader went away (`| head`); give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _quieten_libraries() -> None:
    """What is fetched and loaded is shown by metalctl itself, and nothing is reported to anyone."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _first_guess(arguments: list[str]) -> Run:
    """How to report an error that comes before the options have been parsed."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    json = "--json" in flags or truthy(os.environ.get("METALCTL_JSON"))
    command = next((argument for argument in flags if not argument.startswith("-")), "")
    return Run(Output(json=json, command=command), debug="--debug" in flags or truthy(os.environ.get("METALCTL_DEBUG")))


def _run(arguments: list[str], run: Run) -> int:
    try:
        _parse_and_call(arguments, run)
        sys.stdout.flush()
        return 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(run)
    except _ParseError as error:
        return _fail(_from_parser(error, run.settings), run)
    except MetalctlError as error:
        return _fail(error, run)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(_disk_full(error), run) if error.errno == errno.ENOSPC else _internal(error, run)
    except Exception as error:  # noqa: BLE001  the boundary: whatever else escapes is our bug, and is said to be one
        return _internal(error, run)


def _parse_and_call(arguments: list[str], run: Run) -> None:
    parser = build_parser()
    asks_for_help = bool({"-h", "--help", "--version"} & set(arguments))  # which a broken config.toml must not prevent
    run.settings = Settings() if asks_for_help else load_settings()
    defaults = default_map(parser, run.settings)
    # Not parser.main(), which has its own mind about interrupts and closed pipes.
    with parser.make_context("metalctl", arguments, obj=run, default_map=defaults) as context:
        parser.invoke(context)


def _print_version(output: Output) -> None:
    output.result(versions() if output.json else None)
    output.text(f"metalctl {__version__}")


def _from_parser(error: Any, settings: Settings) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "metalctl"
    hint = f"`{path} --help` lists what it takes."
    parameter = getattr(error, "param", None)
    if context and parameter:
        source = context.get_parameter_source(parameter.name)
        if source and source.name == "DEFAULT_MAP":
            hint = f"It is set in {settings.path}."
        elif source and source.name == "ENVIRONMENT":
            hint = f"It is set by the environment variable {context.auto_envvar_prefix}_{parameter.name.upper()}."
    return UsageError(error.format_message(), hint)


def _interrupted(run: Run) -> int:
    if run.output.json:
        run.output.error(Interrupted("interrupted"))
    return INTERRUPTED


def _disk_full(error: OSError) -> StorageError:
    where = error.filename or "standard output"
    return StorageError(f"{where}: no space left on the disk.", "Free some and try again.")


def _fail(error: MetalctlError, run: Run) -> int:
    run.output.error(error)
    if run.debug:
        traceback.print_exception(error)
    return error.exit_code


def _internal(error: Exception, run: Run) -> int:
    hint = "This is a bug in metalctl. Please report it with the output of the same command under --debug."
    run.output.error(InternalError(f"internal error: {type(error).__name__}: {error}", hint))
    if run.debug:
        traceback.print_exception(error)
    return INTERNAL
