"""`metalctl show`: what a model is, without fetching it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metalctl.app import Invocation, command
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import HubError, ModelNotFoundError, NotCachedError
from metalctl.models import models_of, short_path
from metalctl.output import Output, human_bytes
from metalctl.progress import fetch_progress

if TYPE_CHECKING:
    from metalctl.engine.models.checkpoint import Checkpoint
    from metalctl.engine.models.facts import Facts
    from metalctl.engine.models.references import Reference
    from metalctl.engine.models.sources.base import ModelSource, Plan, Progress


@command("show", short_help="Tell what a model is, and whether it fits here.")
def show(
    invocation: Invocation,
    reference: Annotated[str, typer.Argument(metavar="REF", help="The model.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, where REF names none.")] = None,
    token: Annotated[str | None, typer.Option(help="For gated and private models; HF_TOKEN is read too.")] = None,
) -> None:
    """Tell what a model is: architecture, size, quantisation, context, licence, and whether it fits here.

    Of a model that is not on this machine only the headers are read; nothing is kept.
    """
    models = models_of(invocation, token)
    wanted = models.read(reference, revision)
    source = models.source(wanted.source)
    with fetch_progress(invocation.output, default_source=models.default_source) as progress:
        try:
            fields = _local(source.find(wanted))
        except NotCachedError:
            if invocation.offline:
                raise
            fields = _remote(source, wanted, progress)
        if fields["licence"] is None and not invocation.offline:
            fields["licence"] = _licence(source, wanted, progress, invocation.output)
    fields = {"reference": wanted.written(models.default_source), "source": wanted.source, **fields}
    invocation.output.result(fields)
    _render(invocation.output, fields)


def _local(found: "Checkpoint") -> dict[str, Any]:
    from metalctl.engine.models.facts import read_facts
    from metalctl.engine.models.gguf.reader import FileSource
    from metalctl.engine.models.selection import select

    root = found.path.parent if found.format == "gguf" else found.path
    # A GGUF file may lie in a folder of its quantisation, and its projector beside that folder.
    names = {_name_in(file, root): file for file in found.files}
    tag = found.path.name if found.format == "gguf" else None
    chosen = select(names, tag, found.reference)
    facts = read_facts(found.format, chosen.files, chosen.weights, lambda path: FileSource(names[path]))
    return _fields(facts, found.format, found.size, found.path, found.revision)


def _name_in(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name


def _remote(source: "ModelSource", wanted: "Reference", progress: "Progress") -> dict[str, Any]:
    from metalctl.engine.models.facts import read_facts
    from metalctl.engine.models.selection import select

    plan = source.plan(wanted, progress)
    if plan.size is None or wanted.source == "pypi":
        source.open_remote(plan, plan.files[0].path, progress)  # says why not
    chosen = select([file.path for file in plan.files], _tag_in(plan), wanted.name)
    facts = read_facts(plan.format, chosen.files, chosen.weights, lambda path: source.open_remote(plan, path, progress))
    return _fields(facts, plan.format, plan.size or 0, None, plan.revision)


def _tag_in(plan: "Plan") -> str | None:
    return plan.files[0].path if plan.format == "gguf" else None


def _licence(source: "ModelSource", wanted: "Reference", progress: "Progress", output: Output) -> str | None:
    try:
        return source.licence(wanted, progress)
    except (HubError, ModelNotFoundError) as error:
        output.detail(f"the licence is not known: {error.message}")
        return None


def _fields(facts: "Facts", format: str, size: int, path: Path | None, revision: str | None) -> dict[str, Any]:
    from metalctl.engine.memory import device_memory
    from metalctl.engine.models.facts import context_that_fits

    device = device_memory()
    usable = int(EngineConfig().gpu_memory_utilization * device.recommended)
    fields = asdict(facts)
    fields["quantisation"] = [asdict(share) for share in facts.quantisation]
    return {
        "format": format,
        "size": size,
        "path": None if path is None else str(path),
        "revision": revision,
        **fields,
        "bits_per_weight": facts.bits_per_weight,
        "fits": {
            "device": device.name,
            "usable": usable,
            "weights": facts.weights_bytes <= usable,
            "context": context_that_fits(facts, usable),
        },
    }


def _render(output: Output, fields: dict[str, Any]) -> None:
    fits = fields["fits"]
    rows = [
        ("reference", fields["reference"]),
        ("architecture", fields["architecture"]),
        ("parameters", _count(fields["parameters"])),
        ("size", human_bytes(fields["size"])),
        ("format", _format(fields)),
        ("context", f"{fields['context_length']} tokens" if fields["context_length"] else None),
        ("layers", fields["layers"]),
        ("vocabulary", fields["vocabulary"]),
        ("chat template", "yes" if fields["chat_template"] else "no"),
        ("licence", fields["licence"]),
        ("revision", fields["revision"]),
        ("where", short_path(Path(fields["path"])) if fields["path"] else "not on this machine"),
        ("fits here", _verdict(fits, fields["context_length"])),
    ]
    for name, value in rows:
        output.text(f"{name:<14} {'?' if value is None else value}")
    if not output.json:
        output.text()
    output.table(
        ["TYPE", "TENSORS", "SIZE", "VALUES", "LOADED AS"],
        [
            [s["type"], str(s["tensors"]), human_bytes(s["bytes"]), _count(s["values"]), s["loaded_as"] or "as stored"]
            for s in fields["quantisation"]
        ],
        right=[1, 2, 3],
    )


def _format(fields: dict[str, Any]) -> str:
    bits = fields["bits_per_weight"]
    return fields["format"] if bits is None else f"{fields['format']}, {bits} bits a weight"


def _verdict(fits: dict[str, Any], most: int | None) -> str:
    memory = f"of {human_bytes(fits['usable'])} that can be used on {fits['device']}"
    if not fits["weights"]:
        return f"no, the weights alone need more than the {human_bytes(fits['usable'])} usable on {fits['device']}"
    if fits["context"] is None:
        return f"yes, {memory}"
    context = "its whole context" if fits["context"] == most else f"about {fits['context']} tokens of context"
    return f"yes, with {context}, {memory}"


def _count(number: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
