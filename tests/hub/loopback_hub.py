"""A hub on the loopback interface that speaks the parts of Hugging Face's and ModelScope's HTTP interfaces which their
own libraries use to fetch models, counts requests and fails on command.

One `Hub` holds repositories; the same server answers in both dialects, but a test that cares starts two.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Content:
    """A file on the hub. `sparse` bytes of zeros may follow what is given."""

    def __init__(self, data: bytes, sparse: int = 0, xet_hash: str | None = None):
        self.data = data
        self.size = len(data) + sparse
        self.xet_hash = xet_hash
        # Nobody hashes gigabytes of zeros in a test; a sparse file is only ever read in part.
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.blob_id = hashlib.sha1(b"blob %d\0" % self.size + data).hexdigest()

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        yield self.data[start:stop]
        zeros = stop - max(start, len(self.data))
        while zeros > 0:
            yield bytes(min(zeros, 2**16))
            zeros -= 2**16


@dataclass
class Repository:
    """Commits by their hash, and the branches and tags that mean them."""

    commits: dict[str, dict[str, Content]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes | Content], *refs: str) -> str:
        """Add a commit and move `refs` (main and master where none are given) to it."""
        contents = {path: data if isinstance(data, Content) else Content(data) for path, data in files.items()}
        listing = "".join(f"{path}{content.sha256}" for path, content in sorted(contents.items()))
        sha = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[sha] = contents
        self.refs.update(dict.fromkeys(refs or ("main", "master"), sha))
        return sha

    def find(self, revision: str) -> tuple[str, dict[str, Content]] | None:
        sha = self.refs.get(revision, revision)
        found = [commit for commit in self.commits if commit.startswith(sha)] if len(sha) >= 7 else []
        return (found[0], self.commits[found[0]]) if found else None


@dataclass
class Fault:
    """What to do instead of answering rightly, for requests whose `METHOD path` matches, `times` times.

    `status` answers with it; `cut` closes the connection after that many bytes of the body; `stall` sends that many
    and then nothing for `seconds`; `corrupt` flips the last byte.
    """

    pattern: str
    times: int = 1_000_000
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    stall: int | None = None
    seconds: float = 30.0
    corrupt: bool = False


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query
    headers: Mapping[str, str]  # names in lower case


class Hub:
    """The server's state, shared by its threads. Use `running_hub()` to start one."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.sent = 0  # bytes of files
        self.url = ""
        self.slow: float = 0.0  # seconds to wait after each piece of a file
        self.most: int | None = None  # bytes of files to send; what goes beyond waits until this is None
        self.ranges = True
        self.storage: str | None = None  # address that large files are redirected to, as both hubs do
        self.cas: str | None = None  # address of a Xet store, for files that have a hash there
        self._lock = threading.Lock()

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def fail(self, pattern: str, **settings: Any) -> Fault:
        fault = Fault(pattern, **settings)
        self.faults.append(fault)
        return fault

    def count(self, pattern: str = "") -> int:
        """Requests so far whose `METHOD path` matches."""
        return sum(1 for request in self.requests if re.search(pattern, f"{request.method} {request.path}"))

    @property
    def downloads(self) -> int:
        return self.count(r"^GET .*(/resolve/|/repo\?)")

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, f"{request.method} {request.path}"):
                    fault.times -= 1
                    return fault
        return None

    def add_sent(self, count: int) -> None:
        with self._lock:
            self.sent += count

    @property
    def is_held(self) -> bool:
        return self.most is not None and self.sent >= self.most


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers at `hub.url` until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up in the middle of answers; that is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None: ...

    def _serve(self) -> None:
        self.fault = self.hub.fault_for(
            Request(self.command, self.path, {key.lower(): value for key, value in self.headers.items()})
        )
        if self.fault and self.fault.status:
            self._json({"error": "as told", "Message": "as told"}, self.fault.status, self.fault.headers)
            return
        url = urlsplit(self.path)
        for pattern, answer in _ROUTES:
            if match := re.fullmatch(pattern, url.path):
                answer(self, *map(unquote, match.groups()), query=parse_qs(url.query))
                return
        self._json({"error": "no such page"}, 404)

    # Hugging Face

    def hf_info(self, name: str, revision: str | None = None, query: Mapping[str, list[str]] | None = None) -> None:
        if (found := self._hf_find(name, revision or "main")) is None:
            return
        sha, files = found
        siblings = [
            {"rfilename": path, "size": content.size, "blobId": content.blob_id, **_lfs(path, content)}
            for path, content in files.items()
        ]
        card = self.hub.repositories[name].card
        self._json({"id": name, "modelId": name, "sha": sha, "siblings": siblings, "cardData": card, "tags": []})

    def hf_tree(self, name: str, revision: str, query: Mapping[str, list[str]]) -> None:
        if (found := self._hf_find(name, revision)) is None:
            return
        self._json(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": content.size,
                    "oid": content.blob_id,
                    **({"xetHash": content.xet_hash} if content.xet_hash else {}),
                    **_lfs(path, content),
                }
                for path, content in found[1].items()
            ]
        )

    def hf_file(self, name: str, revision: str, path: str, query: Mapping[str, list[str]]) -> None:
        if (found := self._hf_find(name, revision)) is None:
            return
        sha, files = found
        if path not in files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        content = files[path]
        etag = content.sha256 if _is_large(path) else content.blob_id
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha}
        if _is_large(path):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(content.size)}
        if content.xet_hash:
            route = f"{self.hub.url}/api/models/{name}/xet-read-token/{sha}"
            headers |= {"X-Xet-Hash": content.xet_hash, "X-Xet-Refresh-Route": route}
        if self.hub.storage and _is_large(path):
            self._json({}, 302, {**headers, "Location": f"{self.hub.storage}{self.path}?signature=x"})
        else:
            self._send(content, headers)

    def hf_xet_token(self, name: str, revision: str, query: Mapping[str, list[str]]) -> None:
        expiry = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": self.hub.cas or "",
            "X-Xet-Access-Token": "t",
            "X-Xet-Token-Expiration": str(expiry),
        }
        self._json({"accessToken": "t", "exp": expiry, "casUrl": self.hub.cas}, 200, headers)

    def _hf_find(self, name: str, revision: str) -> tuple[str, dict[str, Content]] | None:
        if name not in self.hub.repositories:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        found = self.hub.repositories[name].find(revision)
        if found is None:
            self._json({"error": f"Invalid rev id: {revision}"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return found

    # ModelScope

    def ms_info(self, name: str, query: Mapping[str, list[str]]) -> None:
        if name not in self.hub.repositories:
            self._ms_missing("model does not exist")
            return
        owner, _, own = name.partition("/")
        licence = self.hub.repositories[name].card.get("license")
        self._json({"Code": 200, "Success": True, "Data": {"Path": owner, "Name": own, "License": licence}})

    def ms_files(self, name: str, query: Mapping[str, list[str]]) -> None:
        if (files := self._ms_find(name, query)) is None:
            return
        entries = [
            {"Path": path, "Name": path, "Size": content.size, "Sha256": content.sha256, "Type": "blob"}
            for path, content in files.items()
        ]
        self._json({"Code": 200, "Success": True, "Data": {"Files": entries}})

    def ms_file(self, name: str, query: Mapping[str, list[str]]) -> None:
        if (files := self._ms_find(name, query)) is None:
            return
        path = query["FilePath"][0]
        if path not in files:
            self._ms_missing("file does not exist")
            return
        self._send(files[path], {})

    def _ms_find(self, name: str, query: Mapping[str, list[str]]) -> dict[str, Content] | None:
        repository = self.hub.repositories.get(name)
        found = repository.find(query.get("Revision", ["master"])[0]) if repository else None
        if found is None:
            self._ms_missing("revision does not exist" if repository else "model does not exist")
            return None
        return found[1]

    def _ms_missing(self, message: str) -> None:
        self._json({"Code": 10010205001, "Success": False, "Message": message}, 404)

    # Both

    def _json(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send(self, content: Content, headers: Mapping[str, str]) -> None:
        start, stop, partial = 0, content.size, False
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.hub.ranges else None
        if asked:
            start, partial = int(asked[1]), True
            stop = min(int(asked[2]) + 1, stop) if asked[2] else stop
            if start >= content.size:
                self._json({}, 416, {"Content-Range": f"bytes */{content.size}"})
                return
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{content.size}")
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command != "HEAD":
            self._body(content.read(start, stop), stop - start)

    def _body(self, pieces: Iterable[bytes], size: int) -> None:
        fault = self.fault or Fault("")
        limit = fault.cut if fault.cut is not None else fault.stall if fault.stall is not None else size
        left = min(limit, size)
        for piece in _small(pieces):
            piece = piece[:left]
            left -= len(piece)
            if fault.corrupt and not left and piece:
                piece = piece[:-1] + bytes([piece[-1] ^ 1])
            self.wfile.write(piece)
            self.hub.add_sent(len(piece))
            if self.hub.slow or self.hub.is_held:
                self.wfile.flush()
                time.sleep(self.hub.slow)
            while self.hub.is_held:
                time.sleep(0.01)
            if not left:
                break
        self.wfile.flush()
        if fault.stall is not None:
            time.sleep(fault.seconds)
        if fault.cut is not None or fault.stall is not None:
            self.close_connection = True
            self.connection.close()


def _small(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), 2**16):
            yield piece[start : start + 2**16]


def _is_large(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors", ".bin", ".npz"))


def _lfs(path: str, content: Content) -> dict[str, Any]:
    if not _is_large(path):
        return {}
    return {"lfs": {"sha256": content.sha256, "oid": content.sha256, "size": content.size, "pointerSize": 134}}


_NAME = r"([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (rf"/api/v1/models/{_NAME}/repo/files", _Handler.ms_files),
    (rf"/api/v1/models/{_NAME}/repo", _Handler.ms_file),
    (rf"/api/v1/models/{_NAME}", _Handler.ms_info),
    (rf"/api/models/{_NAME}/tree/([^/]+)", _Handler.hf_tree),
    (rf"/api/models/{_NAME}/revision/([^/]+)", _Handler.hf_info),
    (rf"/api/models/{_NAME}/xet-read-token/([^/]+)", _Handler.hf_xet_token),
    (rf"/api/models/{_NAME}", _Handler.hf_info),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.hf_file),
]
