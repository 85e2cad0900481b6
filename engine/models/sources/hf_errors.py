"""What Hugging Face's library raises, as metalctl's errors, and which of it is worth another try."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from metalctl.engine.errors import HubError, MetalctlError, ModelNotFoundError, NotCachedError, UsageError
from metalctl.engine.models.references import Reference
from metalctl.engine.models.sources.base import Progress, as_storage_error
from metalctl.engine.models.sources.offline import online

RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
QUESTION_TRIES = 3  # for what is asked of the hub's API
LONGEST_WAIT = 60.0  # seconds; a hub that asks for more is left alone and the user told

_Answer = TypeVar("_Answer")


def ask(question: Callable[[], _Answer], reference: Reference, progress: Progress, cache: Path) -> _Answer:
    """Put a question to the hub, again after a pause if it fails in a way that may pass.

    Raises what `translated` makes of the last failure.
    """
    for attempt in range(1, QUESTION_TRIES + 1):
        try:
            return question()
        except (HTTPError, HFValidationError, EntryNotFoundError, OSError) as failure:
            # What the library says of a file that is not cached hides why it could not ask for it.
            hidden = isinstance(failure, LocalEntryNotFoundError) and isinstance(failure.__cause__, Exception)
            error = failure.__cause__ if hidden else failure
            assert isinstance(error, Exception)
            wait = pause(error, attempt)
            if wait is None or attempt == QUESTION_TRIES:
                raise translated(error, reference, cache) from error
            progress.retry(str(reference), short(error), wait)
            Event().wait(wait)
    raise AssertionError("the loop returns or raises")


def pause(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before trying again after the failure number `attempt`; None if that makes no sense."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in RETRIED_STATUS:
            return None
        asked = retry_after(error)
        if asked is not None:
            return asked if asked <= LONGEST_WAIT else None
    elif not isinstance(error, HTTPError | ConnectionError | TimeoutError) or isinstance(error, OfflineModeIsEnabled):
        return None
    return min(2.0 ** (attempt - 1), LONGEST_WAIT)


def retry_after(error: HfHubHTTPError) -> float | None:
    """Seconds that the hub asks to wait, from either header that it may say it in."""
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    if error.response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "")
    return float(value) if value.strip().isdigit() else None


def short(error: BaseException) -> str:
    """One line of what went wrong."""
    if isinstance(error, HfHubHTTPError):
        return f"the hub answered {error.response.status_code}"
    text = next(iter(str(error).strip().splitlines()), "")
    return text.rstrip(".") or type(error).__name__


def translated(error: BaseException, reference: Reference, cache: Path) -> MetalctlError:
    """The MetalctlError for what the library raised while `reference` was asked for."""
    if isinstance(error, MetalctlError):
        return error
    if (storage := as_storage_error(error, cache)) is not None:
        return storage
    name = reference.name
    match error:
        case GatedRepoError():
            hint = f"Accept its terms at https://huggingface.co/{name}, then give a token: --token or HF_TOKEN."
            return HubError(f"{name} is gated on Hugging Face, and this account may not read it.", hint)
        case RevisionNotFoundError():
            hint = f"Its branches and tags are at https://huggingface.co/{name}/tree/main."
            return ModelNotFoundError(f"{name} has no revision {reference.revision}.", hint)
        case RepositoryNotFoundError():
            hint = "Check its spelling. A private repository needs --token or HF_TOKEN. ModelScope's are written ms:..."
            return ModelNotFoundError(f"Hugging Face has no repository {name} that this account can see.", hint)
        case OfflineModeIsEnabled():
            return NotCachedError(
                f"{reference} is not here in full, and connections are switched off.", online(reference)
            )
        case EntryNotFoundError():
            return ModelNotFoundError(
                f"A file of {reference} is no longer on the hub: {short(error)}.", "Pull it again."
            )
        case HfHubHTTPError():
            return _answered(error, reference)
        case HFValidationError():
            return UsageError(f"{name} is no name of a repository on Hugging Face: {short(error)}.")
        case _:
            hint = "Check the connection and HF_ENDPOINT. What was fetched is kept; pull again to go on."
            return HubError(f"Hugging Face could not be reached for {reference}: {short(error)}.", hint)


def _answered(error: HfHubHTTPError, reference: Reference) -> MetalctlError:
    status = error.response.status_code
    if status == 429:
        wait = retry_after(error)
        when = "later" if wait is None else f"in {wait:.0f} seconds"
        return HubError(
            "Hugging Face limits how often this address may ask (429).", f"Try again {when}; a token helps."
        )
    if status in (401, 403):
        hint = "Give a token that may read it: --token or HF_TOKEN (huggingface.co/settings/tokens)."
        return HubError(f"Hugging Face refused access to {reference.name} ({status}).", hint)
    hint = "Try again later. What was fetched is kept; pull again to go on."
    return HubError(f"Hugging Face answered {status} for {reference}.", hint)
