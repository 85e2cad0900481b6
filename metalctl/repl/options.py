"""What `/set` can change while a conversation runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metalctl.engine.errors import UsageError
from metalctl.engine.sequence import SamplingParams
from metalctl.sampling import sampling_params

_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


def _switch(text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ValueError
    return text.lower() in _ON


_READ: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number; 0 always takes the likeliest token"),
    "top_p": (float, "a number above 0 and at most 1"),
    "top_k": (int, "a whole number; 0 keeps all"),
    "min_p": (float, "a number from 0 to 1"),
    "repetition_penalty": (float, "a number; 1 is none"),
    "presence_penalty": (float, "a number; 0 is none"),
    "frequency_penalty": (float, "a number; 0 is none"),
    "max_tokens": (int, "a whole number"),
    "seed": (int, "a whole number"),
    "stop": (lambda text: (text.encode().decode("unicode_escape"),), "a string at which the answer ends"),
    "think": (_switch, "on or off"),
    "stats": (_switch, "on or off"),
    "markdown": (_switch, "on or off"),
}
_ALIASES = {"repeat_penalty": "repetition_penalty"}
NAMES = tuple(_READ)


@dataclass
class ChatOptions:
    """The user's own choices; None is "not chosen", for which the checkpoint's recommendation or the default stands."""

    sampling: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    stats: bool = False
    markdown: bool | None = None

    def params(self, generation_defaults: Mapping[str, Any]) -> SamplingParams:
        return sampling_params(self.sampling, generation_defaults)

    @property
    def template_variables(self) -> dict[str, Any]:
        return {} if self.think is None else {"enable_thinking": self.think}

    def set(self, name: str, text: str) -> None:
        """Raises UsageError for a name or a value that is none. "default" forgets the choice."""
        key = name.replace("-", "_")
        key = _ALIASES.get(key, key)
        if key not in _READ:
            raise UsageError(f"there is no setting {name}", f"There are {', '.join(NAMES)}.")
        value: Any = (False if key == "stats" else None) if text == "default" else _value(key, text)
        if key in ("think", "stats", "markdown"):
            setattr(self, key, value)
            return
        if value is not None:
            replace(SamplingParams(), **{key: value})  # checks the range
        self.sampling[key] = value

    def listing(self, generation_defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Each setting with the value that is in force, those of the user marked."""
        params = self.params(generation_defaults)
        rows = []
        for name in NAMES:
            chosen = getattr(self, name) if hasattr(self, name) else self.sampling.get(name)
            value = chosen if hasattr(self, name) else getattr(params, name)
            marked = chosen is not None and (name, chosen) != ("stats", False)
            rows.append((name, _shown(value) + (" (set)" if marked else "")))
        return rows


def _value(key: str, text: str) -> Any:
    read, expected = _READ[key]
    try:
        return read(text)
    except ValueError:
        raise UsageError(f"{key} cannot be {text!r}; it must be {expected}.") from None


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "default" if value is None else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(repr(part) for part in value) if isinstance(value, tuple) else str(value)
