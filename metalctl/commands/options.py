"""Options that more than one command has."""

from typing import Annotated

import typer

from metalctl.engine.config import Precision

Context = Annotated[
    int | None, typer.Option(min=1, help="Tokens that a sequence may have in all; by default the model's own limit.")
]
GGUFPrecision = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="GGUF types that MLX has no like of: 'size' rounds them to 8 bits, 'exact' keeps floats, twice as large.",
    ),
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
