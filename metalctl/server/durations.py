"""Spans of time as people write them."""

import re

from metalctl.engine.errors import UsageError

FOR_EVER = float("inf")

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 10 * 365 * 86400.0


def keep_alive(given: str | float | None) -> float | None:
    """What a request says of how long its model stays loaded, in seconds; None: nothing. Raises UsageError."""
    return parse_seconds(given) if isinstance(given, str) else given if given is None else _bounded(given)


def parse_seconds(text: str) -> float:
    """Seconds: "5m", "90s", "1h30m", "300"; infinity for negative ones. Raises UsageError."""
    text = text.strip()
    if text.startswith("-"):
        return FOR_EVER
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise UsageError(f"{text[:40]!r} is not a time.", "Write 5m, 90s, 1h, or -1 for never.")
    return _bounded(sum(float(number) * _UNITS[unit] for number, unit in parts))


def _bounded(seconds: float) -> float:
    """Infinity for negative values and for many years."""
    return FOR_EVER if seconds < 0 or seconds > _LONGEST else seconds
