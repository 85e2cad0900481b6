"""`metalctl doctor`: what may keep models from running here, and what to do about it."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from metalctl.app import Invocation, command
from metalctl.commands.options import TrustRemoteCode
from metalctl.output import Output

if TYPE_CHECKING:
    from metalctl.doctor.check import Check

_STYLES = {"ok": "green", "warning": "bold yellow", "failure": "bold red"}


@command("doctor", short_help="Look for what may keep models from running here.")
def doctor(
    invocation: Invocation,
    reference: Annotated[str | None, typer.Argument(metavar="REF", help="A model to load and check, too.")] = None,
    network: Annotated[bool, typer.Option("--network", help="Ask the hubs, too; nothing else connects.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Look for what may keep models from running here, and say what to do about it.

    With REF every file of that model is checked and the model is loaded. Then it reads and continues three prompts
    through the paged cache, and must compute what it computes by itself; where it does not, the first layer that
    differs is named. Ends with exit code 1 if something failed; warnings do not count.
    """
    output = invocation.output
    found = []
    for check in _checks(invocation, reference, network, trust_remote_code):
        found.append(check)
        _show(output, check)
    counts = Counter(check.state for check in found)
    output.result(
        {
            "healthy": not counts["failure"],
            "ok": counts["ok"],
            "warnings": counts["warning"],
            "failures": counts["failure"],
            "checks": [asdict(check) for check in found],
        }
    )
    output.note(f"{counts['ok']} ok, {_count(counts['warning'], 'warning')}, {_count(counts['failure'], 'failure')}")
    if counts["failure"]:
        raise typer.Exit(1)


def _checks(invocation: Invocation, reference: str | None, network: bool, trust_remote_code: bool) -> "Iterator[Check]":
    from metalctl.kernels import blas

    library = blas.preload()  # before anything imports mlx
    from metalctl.doctor import disk, hubs, machine, shell, versions
    from metalctl.models import models_of

    settings = invocation.settings
    yield versions.python_version()
    yield versions.processor()
    yield from versions.packages()
    yield versions.mlx()
    device = machine.device()
    yield device
    if device.state == "failure":
        return  # all that follows needs MLX
    on_cpu = machine.on_cpu()
    yield machine.memory()
    yield machine.wired_limit()
    yield machine.compiler(on_cpu)
    yield machine.blas(on_cpu, library)
    places = disk.folders(settings)
    yield from disk.writable(places)
    yield from disk.free(places)
    yield from disk.unfinished(models_of(invocation))
    yield from disk.config(settings)
    yield hubs.offline(invocation.offline, settings)
    yield hubs.hugging_face(settings)
    yield hubs.modelscope(settings)
    yield hubs.package_index()
    yield shell.port(_serve_port(invocation))
    yield shell.completions()
    if network:
        yield from hubs.network(settings)
    if reference:
        from metalctl.doctor import model

        yield from model.checks(invocation, reference, trust_remote_code)


def _serve_port(invocation: Invocation) -> int:
    """The port that `serve` takes when it is not told."""
    table = invocation.settings.options.get("serve")
    given = os.environ.get("METALCTL_SERVE_PORT") or (table.get("port") if isinstance(table, dict) else None) or 8000
    return int(given) if str(given).isdecimal() else 8000


def _show(output: Output, check: "Check") -> None:
    if output.json:
        return
    console = output.stdout
    console.print(f"{check.state:<8}", style=_STYLES[check.state], end=" ")
    console.print(f"{check.name:<19}", style="bold", end=" ", highlight=False)
    console.print(check.detail, highlight=False, markup=False, soft_wrap=True)
    if check.fix:
        console.print(f"{'':<8} {'fix:':<19}", style="cyan", end=" ")
        console.print(check.fix, highlight=False, markup=False, soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
