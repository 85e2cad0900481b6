"""The names of the models that are here, fast enough for a key press.

The hubs' libraries take longer to import than a person waits for a Tab. So what they said is remembered, with all that
it depends on: the settings that move the caches, and when each of their folders changed.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from metalctl.engine.errors import MetalctlError
from metalctl.settings import Settings, load_settings, state_folder

DEPTH = 4  # folders below a cache's root: the hubs put a model's files that deep
_MOVES = ("HF_", "HUGGINGFACE_", "MODELSCOPE_", "METALCTL_", "XDG_")  # variables that move a cache


def print_names() -> int:
    """What a shell asks for at a Tab: `names`, one a line. Returns the exit code, and says nothing of errors."""
    try:
        found = names(load_settings())
    except MetalctlError as error:
        return error.exit_code
    sys.stdout.write("\n".join([*found, ""]))
    return 0


def names(settings: Settings) -> list[str]:
    """Aliases, and the references of all models that are here and whole."""
    from metalctl.engine.models.references import BUILTIN_ALIASES

    return sorted({*BUILTIN_ALIASES, *(name.lower() for name in settings.aliases), *_cached(settings)})


def _cached(settings: Settings) -> list[str]:
    path = state_folder() / "completion.json"
    situation = _situation(settings)
    remembered = _remembered(path)
    if remembered.get("situation") == situation and remembered.get("folders") == _folders(remembered["roots"]):
        return list(remembered["names"])
    found = _ask(settings)
    with suppress(OSError):  # a memory is not worth an error
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps({"situation": situation, **found}), encoding="utf-8")
        scratch.replace(path)
    return list(found["names"])


def _ask(settings: Settings) -> dict[str, Any]:
    """What the caches hold, by the hubs' own libraries. The folders are looked at first: what changes meanwhile is seen
    the next time."""
    from metalctl.engine.models.resolve import default_cache, find_cached
    from metalctl.engine.models.sources.huggingface import HuggingFace
    from metalctl.engine.models.sources.modelscope import ModelScope
    from metalctl.engine.models.sources.pypi import PyPI

    own = settings.cache or default_cache()
    scope = ModelScope(own)
    roots = [str(root) for root in (HuggingFace().cache, scope.cache, scope.records, PyPI(own).root)]
    folders = _folders(roots)
    names = sorted(model.reference for model in find_cached(settings.default_source, settings.cache) if model.complete)
    return {"roots": roots, "folders": folders, "names": names}


def _remembered(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _situation(settings: Settings) -> list[str]:
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_MOVES))
    return [*variables, str(Path.home()), settings.default_source, str(settings.cache)]


def _folders(roots: list[str]) -> dict[str, int]:
    """When each folder in the caches last changed, in nanoseconds."""
    return {path: changed for root in roots for path, changed in _walk(root, DEPTH)}


def _walk(folder: str, depth: int) -> Iterator[tuple[str, int]]:
    try:
        yield folder, os.stat(folder).st_mtime_ns
        inner = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)] if depth else []
    except OSError:
        return
    for path in inner:
        yield from _walk(path, depth - 1)
