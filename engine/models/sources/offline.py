"""What both hubs say of a model that is not all on this machine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from metalctl.engine.errors import (
    CheckpointError,
    IncompleteModelError,
    NotCachedError,
    RevisionNotCachedError,
    TagNotCachedError,
    TagNotFoundError,
)
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.references import Hub, Reference
from metalctl.engine.models.selection import GGUFModel, Selection, gguf_models, missing_parts
from metalctl.engine.models.sources.local import checkpoint_in


def online(reference: Reference) -> str:
    """The hint for what a connection would cure."""
    return f"Run `metalctl pull {reference}` while online."


def not_cached(reference: Reference, others: Sequence[str]) -> NotCachedError:
    """Nothing of the revision that was asked for is here; `others` are the revisions that are."""
    if not others:
        return NotCachedError(f"{reference} has not been pulled.", online(reference))
    asked = reference.revision or "its default branch"
    there = ", ".join(others)
    return RevisionNotCachedError(f"{reference.name} is here, but not at {asked}; there is {there}.", online(reference))


def incomplete(reference: Reference, chosen: Selection, folder: Path, missing: Sequence[str]) -> NotCachedError:
    """Some of `chosen` is `missing` from the snapshot in `folder`: it is here in other quantisations, or in part."""
    others = [model.label for model in _whole_models(folder) if model.parts != chosen.weights]
    if chosen.format == "gguf" and others and set(chosen.weights) <= set(missing):
        there = ", ".join(sorted(set(others)))
        message = f"{reference.name} is here as {there}, not as {chosen.tag or chosen.weights[0]}."
        return TagNotCachedError(message, online(reference))
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    message = f"{reference} is only partly here: {len(missing)} of {len(chosen.files)} files are missing ({shown})."
    return IncompleteModelError(message, f"`metalctl pull {reference}` goes on from where it stopped.")


def whole_in_folder(folder: Path, reference: Reference, source: Hub, revision: str) -> Checkpoint:
    """The model in a snapshot of which no listing is known, as when another program fetched its files one by one."""
    try:
        found = checkpoint_in(folder, reference)
    except TagNotFoundError as error:
        raise TagNotCachedError(error.message, online(reference)) from error
    except CheckpointError as error:
        raise IncompleteModelError(error.message, online(reference)) from error
    return replace(found, source=source, revision=revision)


def _whole_models(folder: Path) -> list[GGUFModel]:
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")] if folder.is_dir() else []
    return [model for model in gguf_models(paths) if not missing_parts(model.parts)]
