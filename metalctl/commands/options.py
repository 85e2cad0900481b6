"""Options that more than one command has."""

from typing import Annotated

import typer

Context = Annotated[
    int | None, typer.Option(min=1, help="Tokens that a sequence may have in all; by default the model's own limit.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
