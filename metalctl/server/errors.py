"""Failures of a request, and how each API writes them.

Whatever goes wrong becomes an ApiError; what was not foreseen becomes one without a word about its cause, which goes to
the log instead.
"""

import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from metalctl.engine.errors import (
    ContextLengthError,
    HubError,
    MetalctlError,
    ModelNotFoundError,
    OutOfMemoryError,
    StorageError,
    UsageError,
)

log = logging.getLogger("metalctl.server")

Dialect = Literal["openai", "anthropic", "ollama"]


@dataclass
class ApiError(Exception):
    """An HTTP status, and what the body says. `param` is the path of the parameter that is to blame."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def overloaded(message: str, seconds: int = 1) -> ApiError:
    """503 with the seconds after which to try again."""
    return ApiError(503, message, code="overloaded", headers={"retry-after": str(seconds)})


def not_supported(what: str, param: str) -> ApiError:
    return bad_request(f"{what} not supported by this server.", param, "unsupported")


def translate(error: BaseException) -> ApiError:
    """What to tell a client of any failure. Causes inside the server are logged, not told."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, _said(error), code="context_length_exceeded")
        case UsageError():
            return ApiError(400, _said(error))
        case ModelNotFoundError():
            return ApiError(404, _said(error), "model", "model_not_found")
        case MetalctlError(type="grammar"):
            return ApiError(400, _said(error), "response_format", "grammar")
        case MetalctlError(type="engine_dead"):
            return ApiError(503, "the model has stopped answering.", code="engine_dead")
        case OutOfMemoryError() | HubError() | StorageError():
            log.error("%s", error.message)
            what = {"out_of_memory": "it does not fit in memory", "hub": "its hub does not answer"}.get(error.type, "")
            return ApiError(503, "the model cannot be used now" + (f": {what}." if what else "."), code=error.type)
        case MetalctlError():
            log.error("%s", error.message)
            return ApiError(500, "the model cannot be used.", code=error.type)
    _log_bug(error)
    return ApiError(500, "the server failed at this request.", code="internal")


def _log_bug(error: BaseException) -> None:
    """Where it happened. Messages of exceptions may quote what was asked: those are for the debug log."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames[-8:]))
    log.error("a request failed: %s at %s", type(error).__name__, places)
    log.debug("its traceback", exc_info=error)


def _said(error: MetalctlError) -> str:
    return f"{error.message} {error.hint}" if error.hint else error.message


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def body(error: ApiError, dialect: Dialect) -> dict[str, Any]:
    """The error as the API's clients read it."""
    kind = _TYPES.get(error.status, "api_error")
    if dialect == "ollama":
        return {"error": error.message}
    if dialect == "anthropic":
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def dialect_of(path: str) -> Dialect:
    """Which API a path belongs to."""
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if path.startswith("/v1/messages") else "openai"
