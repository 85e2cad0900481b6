"""The table of architectures: GGUF's name, and how to make mlx-lm's module of it."""

from metalctl.engine.errors import UnsupportedModelError
from metalctl.engine.models.gguf.delta_net import DELTA_NET
from metalctl.engine.models.gguf.dense import DENSE
from metalctl.engine.models.gguf.experts import WITH_EXPERTS
from metalctl.engine.models.gguf.gemma4 import GEMMA4
from metalctl.engine.models.gguf.mapping import Architecture
from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.gguf.recurrent import RECURRENT

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **WITH_EXPERTS, **RECURRENT, **DELTA_NET, **GEMMA4}


def architecture(header: Header) -> Architecture:
    """Raises UnsupportedModelError when the file's architecture is not in the table."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.name} is of the architecture {name!r}, which cannot be loaded from GGUF.",
            f"These can: {', '.join(sorted(ARCHITECTURES))}. The MLX version of the model may work.",
        )
    row = ARCHITECTURES[name]
    return (row.variant(header) if row.variant else None) or row
