"""What the stages of loading hand to each other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import mlx.nn as nn

    from metalctl.engine.models.tokenizer import Tokenizer

Format = Literal["gguf", "mlx"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of one model on this machine, all of one revision.

    `path` is the folder of an MLX or safetensors checkpoint, or the (first) GGUF file; `files` are all of its files.
    """

    reference: str  # as a user may write it again, with what was defaulted left out
    format: Format
    path: Path
    files: tuple[Path, ...]
    source: Literal["hf", "ms", "pypi", "local"] = "local"
    revision: str | None = None  # the commit, where the source has one

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and all that belongs to it.

    `config` is in the form of mlx-lm's `config.json`; `generation_defaults` holds the sampling parameters that the
    checkpoint asks for, by their names in `generation_config.json`. `fingerprint` names the weights exactly: two
    models with the same one give the same logits.
    """

    model: "nn.Module"
    tokenizer: "Tokenizer"
    config: dict[str, Any]
    context_length: int  # tokens
    fingerprint: str
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was decided while loading that a user may want to know
