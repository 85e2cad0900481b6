"""Models from ModelScope, in the hub's own cache and through its own library. Nothing here ever asks another hub.

The library resumes and checks files by itself, but keeps no list of what a revision holds, and its snapshot folders are
named after branches, whose files change. So a small record in metalctl's own cache says what each revision is to hold,
and which files of it were fetched and checked; offline it tells a whole model from a part of one.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from modelscope_hub import HubApi, HubConfig, ProgressCallback
from modelscope_hub.errors import CacheNotFound
from modelscope_hub.errors import HubError as LibraryError

from metalctl.engine.errors import MetalctlError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.references import DEFAULT_BRANCH, Reference
from metalctl.engine.models.selection import gguf_models, select
from metalctl.engine.models.sources.base import (
    REPORT_EVERY,
    CachedModel,
    Plan,
    PlannedFile,
    Progress,
    RemoteFile,
    require_space,
    storage_errors,
)
from metalctl.engine.models.sources.local import folder_quantisation, two_levels
from metalctl.engine.models.sources.ms_errors import short, translated
from metalctl.engine.models.sources.offline import incomplete, not_cached, whole_in_folder

MODEL = "model"
MASTER = DEFAULT_BRANCH["ms"]
TRIES = 2  # without a new byte; each has the library's own five inside
UNFINISHED = (".incomplete", ".parallel_tmp")


class ModelScope:
    """Repositories on ModelScope. `config` None: as the library reads it from the environment and its own files."""

    def __init__(self, own_cache: Path, token: str | None = None, config: HubConfig | None = None):
        config = config or HubConfig(token=token)
        self.cache = Path(config.cache_dir)
        self.records = own_cache / "modelscope"
        self.api = HubApi(config=config, user_agent="metalctl")
        for handler in logging.getLogger("modelscope_hub").handlers:
            handler.setLevel(logging.CRITICAL)  # what a user is to know of is told through Progress

    def plan(self, reference: Reference, progress: Progress) -> Plan:
        revision = reference.revision or MASTER
        with self._errors(reference, progress):
            listed = self.api.list_repo_files(reference.name, MODEL, revision=revision)
        here, record = self._snapshot(reference.name, revision), self._record(reference.name, revision)
        listing = {
            file.path: PlannedFile(file.path, file.size, record.vouches(here, file.path, file.sha256), file.sha256)
            for file in listed
            if not file.is_dir
        }
        chosen = select(listing, reference.tag, reference.name)
        files = tuple(listing[path] for path in chosen.files)
        return Plan(reference, chosen.format, self.cache, files, revision, chosen.notes, tuple(listing.values()))

    def fetch(self, plan: Plan, progress: Progress) -> Checkpoint:
        reference, revision = plan.reference, plan.reference.revision or MASTER
        require_space(self.cache, plan.to_fetch or 0)
        progress.start(plan)
        record = self._record(reference.name, revision)
        record.expect(plan.listing)
        missing = [file for file in plan.files if not file.cached]
        self._download(reference, revision, missing, progress)
        record.vouch(missing)
        for file in missing:
            progress.finish(file.path)
        return self.find(reference)

    def open_remote(self, plan: Plan, path: str, progress: Progress) -> RemoteFile:
        reference, size = plan.reference, next(file.size for file in plan.files if file.path == path)

        def fetch(start: int, stop: int) -> bytes:
            headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            with self._errors(reference, progress):
                answer = self.api.legacy.download_stream(
                    reference.name, MODEL, path, reference.revision or MASTER, headers=headers
                )
                with answer:
                    if answer.status_code != 206 and start:
                        raise ConnectionError("the hub does not serve parts of files")
                    data: bytes = answer.raw.read(stop - start)
            return data

        return RemoteFile(size or 0, fetch)

    def licence(self, reference: Reference, progress: Progress) -> str | None:
        with self._errors(reference, progress):
            found: str | None = self.api.get_repo(reference.name, MODEL).license
        return found

    def find(self, reference: Reference) -> Checkpoint:
        revision = reference.revision or MASTER
        try:
            folder = Path(self.api.download_repo(reference.name, MODEL, revision=revision, local_files_only=True))
        except CacheNotFound as error:
            raise self._not_cached(reference) from error
        if reference.revision and folder != self._snapshot(reference.name, revision):
            raise self._not_cached(reference)  # the layout of old versions of the library, which tells no revision
        record = self._record(reference.name, revision)
        if not record.expected:
            return whole_in_folder(folder, reference, "ms", revision)
        chosen = select(record.expected, reference.tag, reference.name)
        missing = [path for path in chosen.files if not record.vouches(folder, path, record.expected[path])]
        if missing:
            raise incomplete(reference, chosen, folder, missing)
        files = tuple(folder / path for path in chosen.files)
        path = files[0] if chosen.format == "gguf" else folder
        return Checkpoint(str(reference), chosen.format, path, files, "ms", revision)

    def cached(self) -> Sequence[CachedModel]:
        models: list[CachedModel] = []
        for repository in self.api.scan_cache(self.cache).repos:
            if repository.repo_type == MODEL:
                for revision in self._revisions(repository.repo_id):
                    models.extend(self._listed(repository.repo_id, revision))
        return sorted(models, key=lambda model: str(model.identity))

    def remove(self, models: Sequence[CachedModel]) -> int:
        before = {model.path: model for model in self.cached()}
        kept = {file for path, model in before.items() if path not in {m.path for m in models} for file in model.files}
        freed = 0
        with storage_errors(self.cache):
            for model in models:
                for file in set(model.files) - kept:
                    freed += file.stat().st_size
                    file.unlink()
                snapshot = self._snapshot(model.identity.name, model.revision or MASTER)
                if not any(_belongs(file, snapshot) for file in kept):
                    freed += _discard(snapshot)
        return freed

    def _download(self, reference: Reference, revision: str, files: Sequence[PlannedFile], progress: Progress) -> None:
        """Through failures, as long as each try brings something: the library gives a file one hour in all."""
        counter = _counting(progress)
        entries = [{"Path": file.path, "Size": file.size, "Sha256": file.digest} for file in files]
        fruitless = 0
        while entries:
            before = counter.arrived()
            try:
                with self._errors(reference, progress):
                    self.api.download_repo(
                        reference.name, MODEL, revision=revision, file_list=entries, progress_callbacks=[counter]
                    )
                return
            except MetalctlError as error:
                fruitless = 0 if counter.arrived() > before else fruitless + 1
                if fruitless >= TRIES or not _passing(error.__cause__):
                    raise
                progress.retry(str(reference), short(error), 0)

    @contextmanager
    def _errors(self, reference: Reference, progress: Progress) -> Iterator[None]:
        """Turn the library's errors into ours, and its warnings about retries into calls of `progress`."""
        logger, handler = logging.getLogger("modelscope_hub.download"), _Retries(progress)
        logger.addHandler(handler)
        try:
            yield
        except (LibraryError, OSError) as error:
            raise translated(error, reference, self.cache) from error
        finally:
            logger.removeHandler(handler)

    def _not_cached(self, reference: Reference) -> MetalctlError:
        return not_cached(reference, self._revisions(reference.name))

    def _revisions(self, name: str) -> list[str]:
        """Revisions of which something is here. One with a slash is a folder in a folder, and known by its record."""
        snapshots = self._snapshot(name, "x").parent
        recorded = {unquote(path.stem) for path in (self.records / name.replace("/", "--")).glob("*.json")}
        found = {revision for revision in recorded if _has_entries(snapshots / revision)}
        outer = {revision.split("/")[0] for revision in found}
        others = {entry.name for entry in snapshots.iterdir()} if snapshots.is_dir() else set()
        return sorted(found | {other for other in others - outer if _has_entries(snapshots / other)})

    def _snapshot(self, name: str, revision: str) -> Path:
        return self.cache / "models" / name.replace("/", "--") / "snapshots" / revision

    def _record(self, name: str, revision: str) -> "_Record":
        return _Record(self.records / name.replace("/", "--") / f"{quote(revision, safe='')}.json")

    def _listed(self, name: str, revision: str) -> list[CachedModel]:
        snapshot = self._snapshot(name, revision)
        paths = [path.relative_to(snapshot).as_posix() for path in two_levels(snapshot)]
        paths = [path for path in paths if not path.endswith(UNFINISHED)]
        record = self._record(name, revision)
        expected = record.expected or paths
        tags = [model.label for model in gguf_models(paths)] + ([None] if "config.json" in expected else [])
        models = []
        for tag in tags:
            reference = Reference("ms", name, tag, None if revision == MASTER else revision)
            try:
                chosen = select(expected, tag, name)
            except MetalctlError:
                continue
            here = tuple(snapshot / path for path in chosen.files if path in paths)
            if not here or (tag is None and chosen.format == "gguf"):
                continue
            whole = all(record.vouches(snapshot, path, record.expected.get(path)) for path in chosen.files)
            models.append(
                CachedModel(
                    reference,
                    "ms",
                    chosen.format,
                    chosen.tag if chosen.format == "gguf" else folder_quantisation(snapshot),
                    sum(file.stat().st_size for file in here),
                    max(file.stat().st_atime for file in here),
                    here[0] if chosen.format == "gguf" else snapshot,
                    revision,
                    len(here) == len(chosen.files) and (whole or not record.expected),
                    here,
                )
            )
        return models


class _Record:
    """What a revision is to hold, by path with its hash, and which of it was fetched and checked."""

    def __init__(self, path: Path):
        self._path = path
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.expected: dict[str, str | None] = content.get("expected", {})
        self._fetched: dict[str, str | None] = content.get("fetched", {})

    def vouches(self, snapshot: Path, path: str, digest: str | None) -> bool:
        """Whether the file in `snapshot` is the one with `digest`."""
        return path in self._fetched and self._fetched[path] == digest and (snapshot / path).is_file()

    def expect(self, listing: Sequence[PlannedFile]) -> None:
        self.expected = {file.path: file.digest for file in listing}
        self._write()

    def vouch(self, files: Sequence[PlannedFile]) -> None:
        self._fetched |= {file.path: file.digest for file in files}
        self._write()

    def _write(self) -> None:
        with storage_errors(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"expected": self.expected, "fetched": self._fetched}, file, indent=1)
            os.replace(temporary, self._path)


class _Retries(logging.Handler):
    """Hears the library's warnings about a file that it tries again."""

    def __init__(self, progress: Progress):
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 3 and "retrying" in record.msg:
            path, reason, wait = record.args
            self._progress.retry(str(path), str(reason), float(str(wait)))


class _Counter(ProgressCallback):  # type: ignore[misc]
    """The library makes one for each file from a class; the subclass that `_counting` makes knows whom to tell."""

    progress: Progress
    furthest: dict[str, int]

    def __init__(self, filename: str, file_size: int):
        super().__init__(filename, file_size)
        self._done = self._told = 0

    def update(self, size: int) -> None:
        self._done += size
        self.furthest[self.filename] = max(self._done, self.furthest.get(self.filename, 0))
        if abs(self._done - self._told) >= REPORT_EVERY or self._done == self.file_size:
            self._told = self._done
            self.progress.update(self.filename, self._done, self.file_size)

    @classmethod
    def arrived(cls) -> int:
        """Bytes that have been here of all files, at the most."""
        return sum(cls.furthest.values())


def _counting(progress: Progress) -> type[_Counter]:
    return type("_Counting", (_Counter,), {"progress": progress, "furthest": {}})


def _passing(error: BaseException | None) -> bool:
    """Whether what the library gave up on may go better at once: its own limits of time and of retries."""
    failed: Mapping[str, BaseException] = getattr(error, "failed_files", None) or {}
    return all(isinstance(cause, ConnectionError | TimeoutError) for cause in failed.values() or (error,))


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _discard(snapshot: Path) -> int:
    """Delete a snapshot that no model is left in, and its repository's folder with the last of them."""
    size = sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file())
    shutil.rmtree(snapshot)
    for folder in (snapshot.parent, snapshot.parent.parent):
        if not any(folder.iterdir()):
            folder.rmdir()
    return size


def _belongs(file: Path, folder: Path) -> bool:
    return folder in file.parents
