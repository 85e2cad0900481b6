"""Where models and settings lie: whether it can be written to, how much is free, and what stopped half-way."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.engine.models.resolve import Models, default_cache
from metalctl.engine.models.sources.base import SPACE_RESERVE, free_space
from metalctl.engine.models.sources.huggingface import HuggingFace
from metalctl.engine.models.sources.modelscope import UNFINISHED, ModelScope
from metalctl.engine.models.sources.pypi import PyPI
from metalctl.models import short_path
from metalctl.output import human_bytes
from metalctl.settings import Settings, config_path, state_folder

LITTLE = 5 * 10**9  # bytes, less than a model of 8 billion weights in 4 bits
_HOW = {
    "Hugging Face cache": "HF_HOME",
    "ModelScope cache": "MODELSCOPE_CACHE",
    "metalctl cache": "METALCTL_CACHE",
    "conversations": "METALCTL_STATE",
}


def folders(settings: Settings) -> dict[str, Path]:
    """Every folder that metalctl writes to, by what it is for."""
    own = settings.cache or default_cache()
    places = (HuggingFace().cache, ModelScope(own).cache, own, state_folder())
    return dict(zip(_HOW, places, strict=True))


def writable(places: dict[str, Path]) -> Iterator[Check]:
    for name, folder in places.items():
        problem = _problem(folder)
        if problem:
            fix = f"chown or chmod it, or set {_HOW[name]} to a folder of your own."
            yield failure(name, f"{short_path(folder)} cannot be written to: {problem}", fix)
        else:
            yield ok(name, short_path(folder))


def _problem(folder: Path) -> str | None:
    """Why nothing can be written below `folder`. A folder that is not there yet is not made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def free(places: dict[str, Path]) -> Iterator[Check]:
    """One line for each disk that a cache lies on."""
    disks: dict[int, tuple[Path, list[str]]] = {}
    for name, folder in places.items():
        disks.setdefault(_disk(folder), (folder, []))[1].append(name)
    for folder, names in disks.values():
        size = free_space(folder)
        shown = f"{human_bytes(size)} free for {', '.join(names)}"
        fix = "metalctl list shows what takes how much, metalctl rm deletes it."
        if size < SPACE_RESERVE:
            yield failure("disk", shown, fix)
        elif size < LITTLE:
            yield warning("disk", shown, fix)
        else:
            yield ok("disk", shown)


def _disk(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.stat(folder).st_dev


def unfinished(models: Models) -> Iterator[Check]:
    """Models of which only a part is here, and what broken downloads left behind."""
    cached = models.cached()
    partial = [model for model in cached if not model.complete]
    for model in partial:
        fix = f"metalctl pull {model.reference} fetches the rest, metalctl rm {model.reference} deletes it."
        yield warning("downloads", f"{model.reference} is here only in part ({human_bytes(model.size)})", fix)
    own = models.cache or default_cache()
    known = {file for model in cached for file in model.files}
    scope, packages = ModelScope(own).cache, PyPI(own).root
    rest = [path for suffix in UNFINISHED for path in scope.rglob(f"*{suffix}")]
    rest += [path for path in packages.glob(".fetch-*") if any(path.iterdir())] if packages.is_dir() else []
    for path in (path for path in rest if path not in known):
        yield warning(
            "downloads", f"a download that stopped left {short_path(path)}", f"Pull it again, or: rm -r {path}"
        )
    if not partial and not rest:
        count = f"{len(cached)} model{'' if len(cached) == 1 else 's'}"
        yield ok("downloads", f"{count} here, {human_bytes(sum(model.size for model in cached))}, none in part")


def config(settings: Settings) -> Iterator[Check]:
    """Aliases that mean nothing, in a file that is otherwise sound: it has been read by now."""
    from metalctl.engine.errors import MetalctlError

    models = Models(settings.default_source, settings.aliases)
    where = settings.path or config_path()
    broken = 0
    for name, target in settings.aliases.items():
        try:
            models.read(target)
        except MetalctlError as error:
            broken += 1
            yield warning("config", f"the alias {name} in {where}: {error.message}", f"Correct it, or delete {name}.")
    if not broken:
        yield ok("config", short_path(where) if settings.path else f"none, all as built in ({short_path(where)})")
