"""The record that every check returns."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, what was found, and for what is not ok what to do about it."""

    name: str
    state: State
    detail: str
    fix: str | None = None


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warning(name: str, detail: str, fix: str) -> Check:
    return Check(name, "warning", detail, fix)


def failure(name: str, detail: str, fix: str) -> Check:
    return Check(name, "failure", detail, fix)
