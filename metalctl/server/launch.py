"""Starting and stopping the server: what stands between the command line and the application."""

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from metalctl.app import Invocation
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import MetalctlError, ModelNotFoundError, StorageError, UsageError
from metalctl.engine_start import find_model, running_engine
from metalctl.server.app import create_app
from metalctl.server.embeddings import served_vectors
from metalctl.server.guard import GuardOptions
from metalctl.server.models import Limits, ModelManager, ModelSpec, ServedModel
from metalctl.server.protocol import BACKLOG, uvicorn_config

if TYPE_CHECKING:
    from metalctl.engine.models.checkpoint import Checkpoint

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Launch:
    """What `metalctl serve` was told. `names` are those of `references`, in the same order."""

    references: list[str]
    names: list[str]
    cached: bool
    host: str
    port: int
    api_keys: tuple[str, ...]
    no_auth: bool
    allowed_hosts: list[str]
    origins: list[str]
    engine: EngineConfig
    max_queue: int
    max_loaded: int
    memory: int | None
    keep_alive: float
    pinned: list[str]
    max_body: int
    drain_timeout: float
    trust_remote_code: bool


class PortError(MetalctlError):
    type = "port"


def run(invocation: Invocation, launch: Launch) -> None:
    """Serve until a signal comes. Raises what finding models and loading the first raise, and PortError."""
    _refuse_open_door(launch)
    _check_names(launch)
    _log_to_stderr(invocation.output.verbose)
    with _listener(launch.host, launch.port) as listener:
        specs, load = _specs(invocation, launch), _loader(invocation, launch)
        first = load(specs[0]) if launch.references else None  # here, where Ctrl-C ends it at once
        limits = Limits(launch.max_loaded, launch.memory, launch.keep_alive)
        asyncio.run(_serve(invocation, launch, ModelManager(specs, load, limits, first), listener))


async def _serve(invocation: Invocation, launch: Launch, manager: ModelManager, listener: socket.socket) -> None:
    config = uvicorn_config(create_app(manager, guard_options(launch)), launch.drain_timeout)
    # uvicorn raises the signal that stopped it once more at its end; by then it has done its work.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    listener.listen(BACKLOG)  # whoever reads the announcement can connect
    _announce(invocation, [spec.name for spec in manager.specs], listener)
    await uvicorn.Server(config).serve(sockets=[listener])
    invocation.output.event("done", status="ok")


def _announce(invocation: Invocation, names: list[str], listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    invocation.output.event("listening", url=url, models=names)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    invocation.output.note(f"Serving {shown} at {url} (OpenAI: {url}/v1). Ctrl-C stops.")


def guard_options(launch: Launch) -> GuardOptions:
    hosts: frozenset[str] | None = None
    if "*" not in launch.allowed_hosts and (_is_loopback(launch.host) or launch.allowed_hosts):
        hosts = _LOOPBACK | {launch.host.lower()} | {name.lower() for name in launch.allowed_hosts}
    return GuardOptions(launch.api_keys, hosts, frozenset(launch.origins), launch.max_body)


def keys(given: list[str], path: Path | None) -> tuple[str, ...]:
    """The keys from the command line and from a file with one a line. Raises UsageError and StorageError."""
    lines: list[str] = []
    if path is not None:
        try:
            lines = path.expanduser().read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"cannot read the keys in {path}: {error}") from error
    found = [key.strip() for key in [*given, *lines] if key.strip() and not key.strip().startswith("#")]
    if not found and (given or path):
        raise UsageError("there is no API key: what was given is empty.")
    return tuple(found)


def parse_size(text: str) -> int:
    """Bytes: "32MB", "1.5 GiB", "1000". Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in _SIZES:
        raise UsageError(f"{text!r} is not a size.", "Write 24GB, 512MiB or a number of bytes.")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK


def _refuse_open_door(launch: Launch) -> None:
    if not _is_loopback(launch.host) and not launch.api_keys and not launch.no_auth:
        raise UsageError(
            f"{launch.host} can be reached from other machines, and no API key is set.",
            "Set one by --api-key-file or METALCTL_SERVE_API_KEY, or say --no-auth.",
        )


def _check_names(launch: Launch) -> None:
    if len(set(launch.names)) < len(launch.names):
        raise UsageError("two models have the same name.", "Tell them apart by --served-name.")
    unknown = set(launch.pinned) - {*launch.names, *launch.references}
    if unknown and not launch.cached:
        raise UsageError(
            f"--pin {min(unknown)}: there is no such model here.", f"There are: {', '.join(launch.names)}."
        )


def _specs(invocation: Invocation, launch: Launch) -> list[ModelSpec]:
    """The models by name, those named on the command line first. These are fetched now, where they are not here."""
    specs = [
        _spec(name, reference, find_model(invocation, reference), launch.pinned)
        for name, reference in zip(launch.names, launch.references, strict=True)
    ]
    if launch.cached:
        known = {spec.name for spec in specs} | {spec.reference for spec in specs}
        specs += [spec for spec in _cached(invocation, launch.pinned) if spec.name not in known]
    if not specs:
        raise ModelNotFoundError(
            "no model was named, and none is cached.", "`metalctl serve smollm2` serves the starter."
        )
    return specs


def _spec(name: str, reference: str, checkpoint: "Checkpoint", pinned: list[str]) -> ModelSpec:
    return ModelSpec(
        name,
        reference,
        size=checkpoint.size,
        pinned=bool({name, reference} & set(pinned)),
        created=int(max((file.stat().st_mtime for file in checkpoint.files), default=0)),
        format=checkpoint.format,
    )


def _cached(invocation: Invocation, pinned: list[str]) -> list[ModelSpec]:
    from metalctl.engine.models.resolve import find_cached

    models = find_cached(invocation.settings.default_source, invocation.settings.cache)
    return [
        ModelSpec(
            model.reference,
            model.reference,
            model.size,
            model.reference in pinned,
            int(model.last_used or 0),
            model.format,
        )
        for model in models
        if model.complete and model.format is not None
    ]


def _loader(invocation: Invocation, launch: Launch) -> Callable[[ModelSpec], ServedModel]:
    """What the manager calls to load a model. Several share the memory that one would have."""
    share = launch.engine.gpu_memory_utilization / launch.max_loaded
    config = replace(launch.engine, gpu_memory_utilization=share)

    def load(spec: ModelSpec) -> ServedModel:
        slots = config.max_num_seqs + launch.max_queue
        if vectors := served_vectors(invocation, spec, slots, launch.trust_remote_code):
            return vectors
        with ExitStack() as stack:
            engine = stack.enter_context(
                running_engine(invocation, spec.reference, config, trust_remote_code=launch.trust_remote_code)
            )
            close = stack.pop_all().close
        size = engine.checkpoint.size
        return ServedModel(spec.name, engine.thread, engine.generation_defaults, slots, close, size)

    return load


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket: a port that is taken is noticed before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.bind(address)
    except OSError as error:
        raise PortError(
            f"cannot listen at {host}:{port}: {error.strerror or error}", "Choose another --port."
        ) from error
    return listener


def _log_to_stderr(verbose: int) -> None:
    """Warnings; with -v each request, with -vv more. What is asked and answered is in no log."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("metalctl.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
