"""What ModelScope's library raises, as metalctl's errors."""

import re
from pathlib import Path

from modelscope_hub.errors import (
    APIError,
    AuthenticationError,
    FileDownloadError,
    FileIntegrityError,
    InvalidParameter,
    NotExistError,
    PermissionDeniedError,
    RateLimitError,
)

from metalctl.engine.errors import HubError, MetalctlError, ModelNotFoundError, UsageError
from metalctl.engine.models.references import Reference
from metalctl.engine.models.sources.base import as_storage_error

KEPT = "What was fetched is kept; pull again to go on."


def translated(error: BaseException, reference: Reference, cache: Path) -> MetalctlError:
    """The MetalctlError for what the library raised while `reference` was asked for."""
    if isinstance(error, FileDownloadError) and error.failed_files:
        error = next(iter(error.failed_files.values()))
    if isinstance(error, MetalctlError):
        return error
    if (storage := as_storage_error(error, cache)) is not None:
        return storage
    name = reference.name
    match error:
        case NotExistError():
            return _missing(error, reference)
        case AuthenticationError() | PermissionDeniedError():
            hint = f"Ask for access at https://modelscope.cn/models/{name}, then give a token: MODELSCOPE_API_TOKEN."
            return HubError(f"ModelScope refused access to {name} ({error.status_code}).", hint)
        case RateLimitError():
            wait = getattr(error, "retry_after", None)
            when = f"in {wait:.0f} seconds" if wait else "later"
            return HubError("ModelScope limits how often this address may ask (429).", f"Try again {when}. {KEPT}")
        case FileIntegrityError():
            hint = "Something between here and the hub changes files, perhaps a proxy or a mirror."
            return HubError(f"A file of {name} arrived damaged and was not kept: {short(error)}.", hint)
        case InvalidParameter():
            return UsageError(f"ModelScope does not take {reference}: {short(error)}.")
        case APIError():
            return HubError(f"ModelScope answered {error.status_code} for {reference}.", f"Try again later. {KEPT}")
        case _:
            hint = f"Check the connection and MODELSCOPE_ENDPOINT. {KEPT}"
            return HubError(f"ModelScope could not be reached for {reference}: {short(error)}.", hint)


def short(error: BaseException) -> str:
    """The core of what the library says: the system's own words if they are in it, else its first line."""
    text = str(getattr(error, "message", "") or next(iter(str(error).splitlines()), "") or type(error).__name__)
    if cause := re.search(r"\[Errno -?\d+\] [^'\")]+|[Rr]ead timed out|[Nn]ame resolution", text):
        return cause[0]
    return re.sub(r"^(\[\w+\] )+", "", text).rstrip(".")


def _missing(error: NotExistError, reference: Reference) -> ModelNotFoundError:
    if reference.revision and "revision" in str(error).lower():
        hint = f"Its branches and tags are at https://modelscope.cn/models/{reference.name}/files."
        return ModelNotFoundError(f"{reference.name} has no revision {reference.revision} on ModelScope.", hint)
    hint = "Check its spelling. A private one needs a token: MODELSCOPE_API_TOKEN. Other hubs are not asked."
    return ModelNotFoundError(f"ModelScope has no repository {reference.name} that this account can see.", hint)
