"""`metalctl rm`: models off this machine."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from metalctl.app import Invocation, command
from metalctl.engine.errors import MetalctlError, NotCachedError, UsageError
from metalctl.models import cached_fields, models_of, short_path, size_of
from metalctl.output import human_bytes

if TYPE_CHECKING:
    from metalctl.engine.models.references import Reference
    from metalctl.engine.models.sources.base import CachedModel


@command("rm")
def remove(
    invocation: Invocation,
    references: Annotated[list[str], typer.Argument(metavar="REF", help="Models to delete.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete models from this machine.

    Without a tag all quantisations of a repository go, without a revision all its revisions. Files that another model
    shares stay.
    """
    output = invocation.output
    models = models_of(invocation)
    cached = models.cached()
    doomed: list[CachedModel] = []
    for text in references:
        doomed += [model for model in _matching(cached, models.read(text), text) if model not in doomed]
    for model in doomed:
        output.note(f"{model.reference}  {size_of(model)}  {short_path(model.path)}")
    if not yes:
        _ask(invocation, doomed)
    freed = sum(
        models.source(source).remove([model for model in doomed if model.source == source])
        for source in sorted({model.source for model in doomed})
    )
    output.result({"removed": [cached_fields(model) for model in doomed], "freed": freed})
    output.note(f"{human_bytes(freed)} freed")


def _matching(cached: "list[CachedModel]", wanted: "Reference", text: str) -> "list[CachedModel]":
    if wanted.source == "local":
        raise UsageError(f"{text} is a path. metalctl deletes only what it can fetch again.", "Delete it yourself.")
    found = [model for model in cached if _means(wanted, model)]
    if not found:
        raise NotCachedError(f"{text} is not on this machine.", "`metalctl list` shows what is.")
    return found


def _means(wanted: "Reference", model: "CachedModel") -> bool:
    have = model.identity
    if wanted.source != have.source or _normal(wanted) != _normal(have):
        return False
    untold = model.format is None  # the start of a download, of which nobody knows the tag or revision
    if wanted.tag and not untold and wanted.tag not in (have.tag, model.quantisation, model.path.name):
        return False
    asked, revisions = wanted.revision, (have.revision, model.revision)
    return asked is None or untold or asked in revisions or _is_short_for(asked, model.revision or "")


def _normal(reference: "Reference") -> str:
    return re.sub(r"[-_.]+", "-", reference.name).lower() if reference.source == "pypi" else reference.name


def _is_short_for(short: str, commit: str) -> bool:
    return len(short) >= 7 and commit.startswith(short)


def _ask(invocation: Invocation, doomed: "list[CachedModel]") -> None:
    output = invocation.output
    if not output.interactive:
        raise UsageError("Nothing was deleted: there is nobody to ask.", "Add --yes.")
    total = human_bytes(sum(model.size for model in doomed))
    if not typer.confirm(f"Delete {len(doomed)} model{'s' if len(doomed) > 1 else ''}, {total}?", err=True):
        raise MetalctlError("Nothing was deleted.")
