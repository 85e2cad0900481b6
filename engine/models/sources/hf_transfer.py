"""One file from Hugging Face into its cache, resumed where an earlier attempt stopped.

The hub's library fetches each file into a temporary one of its own and drops it when it fails, so a cut at 90 % costs
everything. Here the bytes go to `blobs/<etag>.incomplete`, where the next attempt, also of another process, goes on.
The finished file is checked against its hash and moved to `blobs/<etag>`, which is the documented layout of the cache;
linking it into the snapshot is left to the library. Both of the hub's transports can start at an offset: plain HTTP
and Xet.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from filelock import Timeout
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status

from metalctl.engine.errors import HubError
from metalctl.engine.models.sources.base import REPORT_EVERY, Progress
from metalctl.engine.models.sources.hf_errors import pause, short

TRIES = 6  # in a row without a single new byte
CHECK_TRIES = 2
TOKEN_RESERVE = 60  # seconds that a token must still be good for


@dataclass(frozen=True, slots=True)
class Blob:
    """A file to fetch. `etag` is its name in the cache: the sha256 of a large file, git's blob id of a small one."""

    path: str
    size: int
    etag: str
    xet_hash: str | None = None


class Cancelled(Exception):
    """Another file failed, or the user interrupted: stop without a word."""


@dataclass(frozen=True)
class Transfer:
    """Fetches files of one commit of one repository."""

    api: HfApi
    repository: str
    commit: str
    folder: Path  # the repository's folder in the cache
    locks: Path
    progress: Progress
    cancelled: Event = field(default_factory=Event)
    _access: dict[str, Any] = field(default_factory=dict)  # to Xet storage, as the hub answered last
    _streams: set[Any] = field(default_factory=set)  # of Xet, which may wait for bytes longer than anyone likes

    def cancel(self) -> None:
        """Stop all that `fetch` does in other threads; it raises Cancelled there."""
        self.cancelled.set()
        for stream in tuple(self._streams):
            stream.cancel()

    def fetch(self, blob: Blob) -> Path:
        """The file in `blobs`, checked. Raises HubError if it stays broken, and what the transport raises."""
        target = self.folder / "blobs" / blob.etag
        with self._lock(blob):
            if not target.exists():  # another process may have fetched it while this one waited
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fetch_checked(blob, target)
        return target

    def _fetch_checked(self, blob: Blob, target: Path) -> None:
        partial = target.with_name(f"{blob.etag}.incomplete")
        for _ in range(CHECK_TRIES):
            try:
                with partial.open("ab+", buffering=2**20) as file:
                    digest = self._receive(blob, file)
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                if partial.exists() and not partial.stat().st_size and blob.size:
                    partial.unlink()
            if digest == blob.etag:
                partial.replace(target)
                return
            partial.unlink()
            self.progress.retry(blob.path, "what arrived is not the file: its hash differs", 0)
        hint = "Something between here and the hub changes files, perhaps a proxy or a mirror."
        raise HubError(f"{blob.path} of {self.repository} arrived damaged {CHECK_TRIES} times; it was not kept.", hint)

    def _receive(self, blob: Blob, file: BinaryIO) -> str:
        """Append to `file` until it has all bytes, through failures that may pass. Returns the hash of it all."""
        digest = _Digest(blob)
        file.seek(0)
        while block := file.read(2**22):
            digest.update(block)
        failures, furthest = 0, digest.size
        while digest.size != blob.size:
            try:
                self._append(blob, file, digest)
                if digest.size == blob.size:
                    break
                raise ConnectionError(f"{digest.size} bytes of {blob.path} arrived, not {blob.size}")
            except (HTTPError, OSError) as error:
                advanced = furthest < digest.size < blob.size
                failures = 0 if advanced else failures + 1
                wait = pause(error, failures)
                if wait is None or failures >= TRIES:
                    raise
                furthest = max(furthest, digest.size) if advanced else furthest
                self.progress.retry(blob.path, short(error), wait)
                if self.cancelled.wait(wait):
                    raise Cancelled from error
        return digest.hexdigest()

    def _append(self, blob: Blob, file: BinaryIO, digest: "_Digest") -> None:
        if digest.size > blob.size:
            _restart(file, digest)
        with self._open(blob, digest.size) as (offset, chunks):
            if offset != digest.size:  # the server sends it all again
                _restart(file, digest)
            reported = digest.size
            self.progress.update(blob.path, digest.size, blob.size)
            for chunk in chunks:
                if self.cancelled.is_set():
                    raise Cancelled
                file.write(chunk)
                digest.update(chunk)
                if digest.size - reported >= REPORT_EVERY:
                    reported = digest.size
                    self.progress.update(blob.path, reported, blob.size)
        file.flush()
        self.progress.update(blob.path, digest.size, blob.size)

    def _open(self, blob: Blob, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """The bytes of the file from `offset` (or from 0, where a server cannot do that), with where they start."""
        return self._open_xet(blob, offset) if blob.xet_hash else self._open_http(blob, offset)

    @contextmanager
    def _open_http(self, blob: Blob, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        headers = {**build_hf_headers(token=self.api.token), "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        url = hf_hub_url(self.repository, blob.path, revision=self.commit, endpoint=self.api.endpoint)
        # The timeout is for every read: a transfer that stands still is noticed and taken up again.
        with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            yield offset if response.status_code == 206 else 0, response.iter_bytes()

    @contextmanager
    def _open_xet(self, blob: Blob, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        from hf_xet import XetFileInfo

        stream: Any = None
        try:
            group = _xet_session().new_download_stream_group(**self._xet_access())
            stream = group.download_stream(XetFileInfo(blob.xet_hash, blob.size), start=offset or None)
            self._streams.add(stream)
            yield offset, iter(stream)
        except RuntimeError as error:  # how the Rust library says whatever has no exception of its own in Python
            raise ConnectionError(f"Xet storage: {error}") from error
        except (PermissionError, FileNotFoundError) as error:
            if error.errno is not None:  # of this machine's disk
                raise
            raise HubError(f"The hub's storage does not give {blob.path} of {self.repository}: {error}") from error
        finally:
            if stream is not None:
                self._streams.discard(stream)
                stream.cancel()

    def _xet_access(self) -> dict[str, Any]:
        """Where the storage is and the token for it, asked of the hub once an hour or so. Raises what the hub answers;
        the storage's own client would not tell a refusal from a broken connection."""
        headers = build_hf_headers(token=self.api.token)
        url = f"{self.api.endpoint}/api/models/{self.repository}/xet-read-token/{self.commit}"
        if self._access.get("exp", 0) < time.time() + TOKEN_RESERVE:
            answer = get_session().get(url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT)
            hf_raise_for_status(answer)
            self._access.update(answer.json())
        return {
            "endpoint": self._access["casUrl"],
            "token": self._access["accessToken"],
            "token_expiry_unix_secs": self._access["exp"],
            "token_refresh_url": url,
            "token_refresh_headers": headers,
            "custom_headers": {key: value for key, value in headers.items() if key.lower() != "authorization"},
        }

    @contextmanager
    def _lock(self, blob: Blob) -> Iterator[None]:
        """The library's own lock for this file, so that other programs wait for metalctl and the other way round."""
        self.locks.mkdir(parents=True, exist_ok=True)
        told = False
        while True:
            try:
                with WeakFileLock(self.locks / f"{blob.etag}.lock", timeout=1):
                    yield
                    return
            except Timeout:
                if self.cancelled.is_set():
                    raise Cancelled from None
                if not told:
                    self.progress.retry(blob.path, "another process is fetching this file", 1)
                    told = True


def read_range(url: str, api: HfApi, start: int, stop: int) -> bytes:
    """The bytes from `start` to before `stop` of the file at `url`. Raises ConnectionError for any other answer."""
    headers = {**build_hf_headers(token=api.token), "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
    with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and start:
            raise ConnectionError("the hub does not serve parts of files")
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= stop - start:
                break
    if len(data) < stop - start:
        raise ConnectionError(f"{len(data)} bytes arrived, not {stop - start}")
    return bytes(data[: stop - start])


@cache
def _xet_session() -> Any:
    from hf_xet import XetSession

    return XetSession()


class _Digest:
    """The running hash that the hub names a file by, with the number of bytes seen."""

    def __init__(self, blob: Blob):
        self._blob = blob
        self.restart()

    def restart(self) -> None:
        large = len(self._blob.etag) == 64
        self._hash = hashlib.sha256() if large else hashlib.sha1(f"blob {self._blob.size}\0".encode())
        self.size = 0

    def update(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _restart(file: BinaryIO, digest: _Digest) -> None:
    file.seek(0)
    file.truncate()
    digest.restart()
