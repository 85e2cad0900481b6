"""What every source of models offers, and the records that it deals in."""

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from metalctl.engine.errors import StorageError
from metalctl.engine.models.checkpoint import Checkpoint, Format
from metalctl.engine.models.references import Reference, Source

REPORT_EVERY = 2**19  # bytes between two calls of `Progress.update`
SPACE_RESERVE = 256 * 2**20  # bytes of a disk that a download leaves free


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that a model needs. `size` in bytes, None where the source tells it only while fetching.

    `digest` is the hash that the source names it by: a sha256, or git's blob id.
    """

    path: str
    size: int | None
    cached: bool
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What fetching a model will do; nothing has been written yet."""

    reference: Reference
    format: Format
    folder: Path  # on whose disk the files will lie
    files: tuple[PlannedFile, ...]
    revision: str | None = None  # the commit
    notes: tuple[str, ...] = ()
    listing: tuple[PlannedFile, ...] = ()  # all that the revision holds, where the source needs to remember that

    @property
    def size(self) -> int | None:
        """Bytes of all files, None if the source does not tell."""
        return _total([file.size for file in self.files])

    @property
    def to_fetch(self) -> int | None:
        """Bytes that are not here yet."""
        return _total([file.size for file in self.files if not file.cached])

    @property
    def complete(self) -> bool:
        return all(file.cached for file in self.files)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this machine, as `list` shows it. Times in seconds since 1970, sizes in bytes on disk."""

    identity: Reference
    source: Source
    format: Format | None  # None: too little is here to tell
    quantisation: str | None
    size: int
    last_used: float | None
    path: Path
    revision: str | None
    complete: bool
    files: tuple[Path, ...]
    reference: str = ""  # as a user may write it; filled in where the default source is known


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on a hub, read by ranges. `fetch(start, stop)` returns those bytes and raises HubError."""

    size: int
    fetch: Callable[[int, int], bytes]

    def read(self, offset: int, length: int) -> bytes:
        return self.fetch(offset, min(offset + length, self.size)) if length and offset < self.size else b""


class Progress(Protocol):
    """Told what happens to files while they are fetched. Calls may come from several threads."""

    def start(self, plan: Plan) -> None:
        """The files of `plan` that are not cached are fetched next."""

    def update(self, path: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes of a file are here; `done` can fall when a file must begin again."""

    def retry(self, path: str, reason: str, wait: float) -> None:
        """Fetching `path` failed for `reason` and is tried again after `wait` seconds."""

    def finish(self, path: str) -> None:
        """The file is complete and checked."""


class Silent:
    """A Progress that nobody looks at."""

    def start(self, plan: Plan) -> None: ...
    def update(self, path: str, done: int, total: int | None) -> None: ...
    def retry(self, path: str, reason: str, wait: float) -> None: ...
    def finish(self, path: str) -> None: ...


class ModelSource(Protocol):
    """A place that models come from."""

    def plan(self, reference: Reference, progress: Progress) -> Plan:
        """Ask the source what it has, and write nothing. Raises ModelNotFoundError or HubError."""

    def fetch(self, plan: Plan, progress: Progress) -> Checkpoint:
        """Fetch what `plan` says and is not here. Raises HubError or StorageError; what is left behind never looks
        complete, and the next fetch goes on from it where it can."""

    def open_remote(self, plan: Plan, path: str, progress: Progress) -> RemoteFile:
        """A planned file for reading parts of it where it is, without keeping anything."""

    def licence(self, reference: Reference, progress: Progress) -> str | None:
        """What the source says the model may be used for."""

    def find(self, reference: Reference) -> Checkpoint:
        """The model from what is on this machine, without any connection. Raises NotCachedError or a subclass."""

    def cached(self) -> Sequence[CachedModel]:
        """Every model of this source on this machine."""

    def remove(self, models: Sequence[CachedModel]) -> int:
        """Delete models and return the bytes freed; files that other models share stay."""


def require_space(folder: Path, needed: int) -> None:
    """Raise StorageError unless `needed` bytes and a reserve fit on the disk of `folder`."""
    free = free_space(folder)
    if needed + SPACE_RESERVE > free:
        message = f"The download needs {_gigabytes(needed)} and {folder} has {_gigabytes(free)} free."
        raise StorageError(message, "Free some space (`metalctl list` and `metalctl rm` help), or move the cache.")


def free_space(folder: Path) -> int:
    """Bytes free on the disk that `folder` is on, or will be on once it is made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn the disk's errors inside the block into StorageError; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if (translated := as_storage_error(error, folder)) is None:
            raise
        raise translated from error


def as_storage_error(error: BaseException | None, folder: Path) -> StorageError | None:
    """The StorageError for an error of the disk anywhere in the chain of `error`; None if there is none."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT):
            return StorageError(f"The disk of {folder} is full.", "Free some space; the next pull goes on from there.")
        if number in (errno.EROFS, errno.EACCES, errno.EPERM):
            return unwritable(folder)
        error = error.__cause__ or error.__context__
    return None


def unwritable(folder: Path) -> StorageError:
    return StorageError(f"{folder} cannot be written to.", "Make it writable, or move the cache elsewhere.")


def _total(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
