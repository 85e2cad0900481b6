"""`metalctl list`: the models on this machine."""

from typing import Annotated

import typer

from metalctl.app import Invocation, command
from metalctl.models import ago, cached_fields, models_of, size_of
from metalctl.output import human_bytes


@command("list", short_help="Show the models on this machine.")
def list_models(
    invocation: Invocation,
    aliases: Annotated[bool, typer.Option("--aliases", help="Show what each alias means instead.")] = False,
) -> None:
    """Show the models on this machine, from the caches of both hubs and metalctl's own.

    Models that other programs fetched into those caches are among them.
    """
    if aliases:
        _list_aliases(invocation)
        return
    output = invocation.output
    models = models_of(invocation).cached()
    output.result({"models": [cached_fields(model) for model in models], "size": sum(model.size for model in models)})
    if not models:
        output.note("There are no models on this machine. `metalctl pull smollm2` fetches a small one.")
        return
    rows = [
        [model.reference, model.format or "?", model.quantisation or "?", size_of(model), ago(model.last_used)]
        for model in models
    ]
    output.table(["REFERENCE", "FORMAT", "QUANTISATION", "SIZE", "LAST USED"], rows, right=[3])
    output.note(
        f"{len(models)} model{'s' if len(models) > 1 else ''}, {human_bytes(sum(model.size for model in models))}"
    )


def _list_aliases(invocation: Invocation) -> None:
    models = models_of(invocation)
    meanings = sorted(models.all_aliases.items())
    own = {name.lower() for name in models.aliases}
    rows = [{"alias": name, "reference": target, "own": name in own} for name, target in meanings]
    invocation.output.result({"aliases": rows})
    invocation.output.table(["ALIAS", "MEANS", ""], [[n, t, "yours" if n in own else ""] for n, t in meanings])
