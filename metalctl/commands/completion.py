"""`metalctl completion`: the scripts that make shells complete what metalctl takes."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from metalctl.app import Invocation, command
from metalctl.engine.errors import UsageError

Shell = Literal["bash", "zsh", "fish"]


@command("completion", short_help="Print completions for bash, zsh or fish.")
def completion(
    invocation: Invocation,
    shell: Annotated[
        Shell | None, typer.Argument(metavar="SHELL", help="bash, zsh or fish; by default $SHELL.")
    ] = None,
) -> None:
    """Print what makes a shell complete commands, options and the names of cached models.

    bash: metalctl completion bash > ~/.local/share/bash-completion/completions/metalctl

    zsh: metalctl completion zsh > ~/.zfunc/_metalctl (with ~/.zfunc in fpath, before compinit)

    fish: metalctl completion fish > ~/.config/fish/completions/metalctl.fish
    """
    output = invocation.output
    text = script(shell or _current())
    output.result({"script": text})
    output.text(text, end="")


def script(shell: Shell) -> str:
    """The completion script for a shell."""
    from metalctl.completion import bash, fish, zsh

    return {"bash": bash, "zsh": zsh, "fish": fish}[shell].script()


def _current() -> Shell:
    match Path(os.environ.get("SHELL", "")).name:
        case "bash" | "zsh" | "fish" as name:
            return name
        case other:
            hint = "Say which: metalctl completion bash, zsh or fish."
            raise UsageError(f"there is no completion for {other!r}." if other else "SHELL is not set.", hint)
