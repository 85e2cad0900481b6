"""What the commands about models share: finding them as the settings say, and telling what they are."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalctl.app import Invocation
from metalctl.output import human_bytes

if TYPE_CHECKING:
    from metalctl.engine.models.resolve import Models
    from metalctl.engine.models.sources.base import CachedModel


def models_of(invocation: Invocation, token: str | None = None) -> "Models":
    """The engine's door to models, with what environment and config.toml say."""
    from metalctl.engine.models.resolve import Models

    settings = invocation.settings
    return Models(settings.default_source, settings.aliases, token, settings.cache)


def cached_fields(model: "CachedModel") -> dict[str, Any]:
    """A cached model as JSON: bytes, and ISO 8601 in UTC."""
    used = model.last_used
    return {
        "reference": model.reference,
        "source": model.source,
        "format": model.format,
        "quantisation": model.quantisation,
        "size": model.size,
        "last_used": None if used is None else datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds"),
        "path": str(model.path),
        "revision": model.revision,
        "complete": model.complete,
    }


def ago(moment: float | None) -> str:
    """How long since a time in seconds since 1970, as a person says it."""
    if moment is None:
        return "?"
    seconds = max(0.0, datetime.now(UTC).timestamp() - moment)
    for size, unit in ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def short_path(path: Path) -> str:
    """A path with `~` for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def size_of(model: "CachedModel") -> str:
    return human_bytes(model.size) + ("" if model.complete else ", in part")
