"""The program's entry: commands are collected here, and errors become messages and exit codes here and nowhere else."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from metalctl.app import app
from metalctl.engine.errors import MetalctlError, UsageError
from metalctl.output import Output
from metalctl.version import __version__

# Typer's own parse errors share this base; it is not exported under a name of its own.
_ParseError: type[Exception] = typer.BadParameter.__bases__[0]

INTERRUPTED = 130
INTERNAL = 70


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Run language models on this machine: Metal, CUDA or a plain CPU, from Hugging Face, ModelScope or disk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Never raises, never prints a traceback without `--debug`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    output = Output(json="--json" in arguments, command=next((a for a in arguments if not a.startswith("-")), ""))
    try:
        return _run(arguments, output)
    except BrokenPipeError:
        # The reader went away (`| head`); give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str], output: Output) -> int:
    debug = "--debug" in arguments
    try:
        if "--version" in arguments[:2]:
            return _print_version(output)
        code = app(arguments, prog_name="metalctl", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort):
        if output.json:
            output.error(MetalctlError("interrupted"))
        return INTERRUPTED
    except _ParseError as error:
        return _fail(_from_parser(error), output, debug)
    except MetalctlError as error:
        return _fail(error, output, debug)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  the boundary: whatever else escapes is our bug, and is said to be one
        return _internal(error, output, debug)


def _print_version(output: Output) -> int:
    if output.json:
        output.command = "version"
        output.result({"version": __version__, "python": sys.version.split()[0]})
    else:
        output.text(f"metalctl {__version__}")
    return 0


def _from_parser(error: Exception) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "metalctl"
    return UsageError(error.format_message(), f"`{path} --help` lists what it takes.")  # type: ignore[attr-defined]


def _fail(error: MetalctlError, output: Output, debug: bool) -> int:
    output.error(error)
    if debug:
        traceback.print_exception(error)
    return error.exit_code


def _internal(error: Exception, output: Output, debug: bool) -> int:
    hint = "This is a bug in metalctl. Please report it with the output of the same command under --debug."
    output.error(MetalctlError(f"internal error: {type(error).__name__}: {error}", hint))
    if debug:
        traceback.print_exception(error)
    return INTERNAL
