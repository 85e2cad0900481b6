"""Where metalctl keeps its things, and what the user's `config.toml` says.

A value comes from the flag, else from the environment (`METALCTL_*`), else from `config.toml`, else from the model,
else it is built in. The file looks like this:

    model = "smollm2"            # what chat, serve and bench run when no model is named
    hub = "modelscope"           # where a name without a source is looked for; "huggingface" if not set
    offline = true               # and any other option that every command has

    [aliases]
    small = "mlx-community/Qwen3-0.6B-4bit"

    [chat]                       # a table for each command: its options by their long names
    temperature = 0.2
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from metalctl.engine.errors import StorageError, UsageError

Source = Literal["hf", "ms"]

_HUBS: Mapping[str, Source] = {"huggingface": "hf", "hf": "hf", "modelscope": "ms", "ms": "ms"}
_OWN_KEYS = frozenset({"model", "hub", "aliases"})


@dataclass(frozen=True)
class Settings:
    """What is set for all commands. `options` are defaults of flags, as the parser wants them: {"chat": {...}, ...}."""

    model: str | None = None
    default_source: Source = "hf"
    aliases: Mapping[str, str] = field(default_factory=dict)
    cache: Path | None = None  # for models that no hub's own cache holds; None: the platform's folder
    options: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None  # the file that was read


def config_path() -> Path:
    """`METALCTL_CONFIG`, else config.toml in the platform's folder for it."""
    given = os.environ.get("METALCTL_CONFIG")
    if given:
        return Path(given).expanduser()
    import platformdirs

    return platformdirs.user_config_path("metalctl") / "config.toml"


def state_folder() -> Path:
    """`METALCTL_STATE`, else the platform's folder for what a program remembers. Not created here."""
    given = os.environ.get("METALCTL_STATE")
    if given:
        return Path(given).expanduser()
    import platformdirs

    return platformdirs.user_state_path("metalctl")


def load_settings() -> Settings:
    """Environment over file. Raises UsageError when the file is not what it should be."""
    path = config_path()
    content = _read(path)
    hub = _hub_from_environment() or content.get("hub")
    model = os.environ.get("METALCTL_MODEL") or content.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError(f"model is {model!r} in {path}; it must be a string.")
    return Settings(
        model=model,
        default_source=_source(hub, path),
        aliases=_aliases(content.get("aliases", {}), path),
        cache=Path(os.environ["METALCTL_CACHE"]).expanduser() if os.environ.get("METALCTL_CACHE") else None,
        options={key.replace("-", "_"): _options(value) for key, value in content.items() if key not in _OWN_KEYS},
        path=path if content else None,
    )


def _hub_from_environment() -> str | None:
    """`METALCTL_HUB`, or `METALCTL_USE_MODELSCOPE` in the usual spellings of yes and no."""
    if named := os.environ.get("METALCTL_HUB"):
        return named
    switch = os.environ.get("METALCTL_USE_MODELSCOPE", "").strip().lower()
    if switch in ("1", "true", "yes", "on"):
        return "modelscope"
    if switch in ("0", "false", "no", "off"):
        return "huggingface"
    if switch:
        raise UsageError(f"METALCTL_USE_MODELSCOPE is {switch!r}; it must be yes or no.")
    return None


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get("METALCTL_CONFIG"):
            raise UsageError(f"METALCTL_CONFIG names {path}, which does not exist.") from None
        return {}
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "Correct that line, or move the file away.") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _source(hub: Any, path: Path) -> Source:
    if hub is None:
        return "hf"
    source = _HUBS.get(str(hub).strip().lower())
    if source is None:
        where = "METALCTL_HUB" if os.environ.get("METALCTL_HUB") else f"hub in {path}"
        raise UsageError(f"{where} is {hub!r}; it must be huggingface or modelscope.")
    return source


def _aliases(table: Any, path: Path) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise UsageError(f"[aliases] in {path} must be a table of strings.", 'For example: small = "owner/name:Q4_K_M"')
    return dict(table)


def _options(value: Any) -> Any:
    """Option names with dashes as the parser's names, which have underscores."""
    if isinstance(value, dict):
        return {key.replace("-", "_"): _options(inner) for key, inner in value.items()}
    return value
