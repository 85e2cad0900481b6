"""Models in files and folders that the user names."""

import json
from collections.abc import Sequence
from pathlib import Path

from metalctl.engine.errors import CheckpointError, ModelNotFoundError, UsageError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.references import Reference
from metalctl.engine.models.selection import gguf_models, missing_parts, missing_shards, select
from metalctl.engine.models.sources.base import CachedModel, Plan, PlannedFile, Progress, RemoteFile

INDEX = "model.safetensors.index.json"


class Local:
    """Paths. Nothing is fetched, listed or removed here."""

    def plan(self, reference: Reference, progress: Progress) -> Plan:
        found = self.find(reference)
        files = tuple(PlannedFile(str(file), file.stat().st_size, True) for file in found.files)
        return Plan(reference, found.format, found.path, files)

    def fetch(self, plan: Plan, progress: Progress) -> Checkpoint:
        return self.find(plan.reference)

    def find(self, reference: Reference) -> Checkpoint:
        """Raises ModelNotFoundError where nothing is, CheckpointError where parts are missing."""
        path = Path(reference.name).expanduser()
        if path.is_dir():
            return checkpoint_in(path, reference)
        if not path.exists():
            hint = "For a repository on a hub write owner/name, without ./ in front."
            raise ModelNotFoundError(f"There is no file or folder {reference.name}.", hint)
        if path.suffix.lower() != ".gguf":
            raise UsageError(
                f"{reference.name} is not a GGUF file.", "Give a .gguf file, or a folder with a config.json."
            )
        if reference.tag:
            message = f"{reference.name} is one file; the tag {reference.tag} has nothing to choose from."
            raise UsageError(message, "Leave the tag out.")
        parts = _all_parts(path)
        return Checkpoint(str(reference), "gguf", parts[0], parts)

    def open_remote(self, plan: Plan, path: str, progress: Progress) -> RemoteFile:
        raise AssertionError("what is local is never remote")

    def licence(self, reference: Reference, progress: Progress) -> str | None:
        return None

    def cached(self) -> Sequence[CachedModel]:
        return ()

    def remove(self, models: Sequence[CachedModel]) -> int:
        raise UsageError("Files that you keep yourself are not removed by metalctl.", "Delete them as you made them.")


def checkpoint_in(folder: Path, reference: Reference) -> Checkpoint:
    """The model in a folder. Raises as `select` does, and CheckpointError for shards that its index names."""
    paths = [path.relative_to(folder).as_posix() for path in two_levels(folder)]
    chosen = select(paths, reference.tag, reference.name)
    check_shards(folder, paths)
    files = tuple(folder / path for path in chosen.files)
    return Checkpoint(str(reference), chosen.format, files[0] if chosen.format == "gguf" else folder, files)


def check_shards(folder: Path, paths: Sequence[str]) -> None:
    """Raise CheckpointError if the folder's index names weights that are not among `paths`."""
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{index} is not JSON: {error}.", "Fetch the model again.") from error
    if missing := missing_shards(paths, content if isinstance(content, dict) else {}):
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names.", "Fetch it again.")


def folder_quantisation(folder: Path) -> str | None:
    """How the weights of a folder are stored, as its config.json tells: `4-bit`, `mxfp4`, or a dtype."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    quantisation = config.get("quantization") or config.get("quantization_config")
    if isinstance(quantisation, dict):
        mode = quantisation.get("mode") or quantisation.get("quant_method")
        plain = "bits" in quantisation and mode in (None, "affine")
        return f"{quantisation['bits']}-bit" if plain else str(mode)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return str(dtype) if dtype else None


def two_levels(folder: Path) -> list[Path]:
    """The files in a folder and in the folders directly inside it."""
    files: list[Path] = []
    for entry in folder.iterdir():
        if entry.is_file():
            files.append(entry)
        elif entry.is_dir() and not entry.name.startswith("."):
            files.extend(inner for inner in entry.iterdir() if inner.is_file())
    return files


def _all_parts(path: Path) -> tuple[Path, ...]:
    """All parts of the (perhaps split) file that `path` is one of, the first one first."""
    names = [entry.name for entry in path.parent.iterdir()]
    model = next((model for model in gguf_models(names) if path.name in model.parts), None)
    if model is None:
        return (path,)
    if missing := missing_parts(model.parts):
        raise CheckpointError(f"{path.parent} lacks {', '.join(missing)}, a part of {path.name}.")
    return tuple(path.parent / part for part in model.parts)
