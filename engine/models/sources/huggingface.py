"""Models from Hugging Face, in the hub's own cache and through its own library."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    ResolvedRevision,
    constants,
    get_cached_repo_tree,
    hf_hub_download,
    hf_hub_url,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    CacheNotFound,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import CachedFileInfo, CachedRevisionInfo, HFCacheInfo, logging
from huggingface_hub.utils._cache_manager import CachedIncompleteFileInfo

from metalctl.engine.errors import (
    MetalctlError,
    NotCachedError,
)
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.references import Reference
from metalctl.engine.models.selection import Selection, gguf_models, select
from metalctl.engine.models.sources.base import (
    CachedModel,
    Plan,
    PlannedFile,
    Progress,
    RemoteFile,
    require_space,
    storage_errors,
    unwritable,
)
from metalctl.engine.models.sources.hf_errors import ask, translated
from metalctl.engine.models.sources.hf_transfer import Blob, Transfer, read_range
from metalctl.engine.models.sources.local import folder_quantisation
from metalctl.engine.models.sources.offline import incomplete, not_cached, whole_in_folder

WORKERS = 4  # files at a time


class HuggingFace:
    """Repositories on Hugging Face. `cache` and `endpoint` None: as the library reads them from the environment."""

    def __init__(self, token: str | None = None, cache: Path | None = None, endpoint: str | None = None):
        self.cache = Path(cache or constants.HF_HUB_CACHE).expanduser()
        self.api = HfApi(endpoint=endpoint, token=token, library_name="metalctl")
        logging.set_verbosity(logging.ERROR)  # retries and bars are told through Progress

    def plan(self, reference: Reference, progress: Progress) -> Plan:
        """One request: what the repository holds at the revision, and which of it is needed and missing."""
        info = self.info(reference, progress)
        there = {file.rfilename: file for file in info.siblings or ()}
        chosen = select(there, reference.tag, reference.name)
        assert info.sha is not None
        files = tuple(self._planned(reference.name, info.sha, there[path]) for path in chosen.files)
        return Plan(reference, chosen.format, self.cache, files, info.sha, chosen.notes)

    def info(self, reference: Reference, progress: Progress) -> ModelInfo:
        """What the hub says of the repository at the revision, with the size of every file."""
        return ask(
            lambda: self.api.model_info(
                reference.name, revision=reference.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            ),
            reference,
            progress,
            self.cache,
        )

    def fetch(self, plan: Plan, progress: Progress) -> Checkpoint:
        reference = plan.reference
        require_space(self.cache, plan.to_fetch or 0)
        try:
            revision = self._pin(reference, progress)
            if revision.resolved != plan.revision:  # the branch moved since the plan was made
                plan = replace(self.plan(replace(reference, revision=revision.resolved), progress), reference=reference)
            progress.start(plan)
            self._fetch_files(plan, revision, progress)
        except (HTTPError, OSError) as error:
            raise translated(error, reference, self.cache) from error
        return self.find(reference)

    def open_remote(self, plan: Plan, path: str, progress: Progress) -> RemoteFile:
        reference, size = plan.reference, next(file.size for file in plan.files if file.path == path)
        url = hf_hub_url(reference.name, path, revision=plan.revision, endpoint=self.api.endpoint)

        def fetch(start: int, stop: int) -> bytes:
            return ask(lambda: read_range(url, self.api, start, stop), reference, progress, self.cache)

        return RemoteFile(size or 0, fetch)

    def licence(self, reference: Reference, progress: Progress) -> str | None:
        card = self.info(reference, progress).card_data
        return card.license if card is not None and isinstance(card.license, str) else None

    def find(self, reference: Reference) -> Checkpoint:
        try:
            revision = self._cached_revision(reference)
            try:
                tree = get_cached_repo_tree(reference.name, revision=revision, cache_dir=self.cache)
            except CachedRepoTreeNotFoundError:
                return self._find_without_tree(reference, revision)
            return self._find_in_tree(reference, revision, [file.path for file in tree])
        except HFValidationError as error:
            raise translated(error, reference, self.cache) from error

    def cached(self) -> Sequence[CachedModel]:
        scan = self._scan()
        revisions = _model_revisions(scan)
        whole = [model for name, revision in revisions for model in listed_models(name, revision, self.cache)]
        lacking = {model.identity.name for model in whole if not model.complete}
        return [*whole, *(model for model in _begun(scan) if model.identity.name not in lacking)]

    def remove(self, models: Sequence[CachedModel]) -> int:
        """Deletes through the library, which keeps blobs that another revision still links to."""
        doomed = {model.path for model in models}
        commits: list[str] = []
        files: list[CachedFileInfo] = []
        scan = self._scan()
        for repository, revision in _model_revisions(scan):
            listed = listed_models(repository, revision, self.cache)
            if not any(model.path in doomed for model in listed):
                continue
            kept = {file for model in listed if model.path not in doomed for file in model.files}
            if kept:
                gone = {file for model in listed if model.path in doomed for file in model.files} - kept
                files.extend(file for file in revision.files if file.file_path in gone)
            else:
                commits.append(revision.commit_hash)
        strategies = [scan.delete_files(*files)] + ([scan.delete_revisions(*commits)] if commits else [])
        begun = [model for model in _begun(scan) if model.path in doomed]
        staying = {model.identity.name for model in self.cached() if model.path not in doomed}
        with storage_errors(self.cache):
            for strategy in strategies:
                strategy.execute()
            for model in begun:
                _remove_begun(model, alone=model.identity.name not in staying)
        return sum(int(strategy.expected_freed_size) for strategy in strategies) + sum(model.size for model in begun)

    def _planned(self, name: str, commit: str, file: RepoSibling) -> PlannedFile:
        cached = try_to_load_from_cache(name, file.rfilename, cache_dir=self.cache, revision=commit)
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        return PlannedFile(file.rfilename, file.size, isinstance(cached, str), digest)

    def _pin(self, reference: Reference, progress: Progress) -> ResolvedRevision:
        """Write down which commit the revision is and what it holds: from here on, what is missing is known offline."""
        revision = ask(
            lambda: self.api.resolve_revision(reference.name, revision=reference.revision, cache_dir=self.cache),
            reference,
            progress,
            self.cache,
        )
        self._download(snapshot_download, revision, reference, progress, allow_patterns=[])
        if not (self.cache / repo_folder_name(repo_id=reference.name, repo_type="model")).is_dir():
            raise unwritable(self.cache)  # of which the library only warns
        return revision

    def _download(
        self,
        download: Callable[..., Any],
        revision: ResolvedRevision,
        reference: Reference,
        progress: Progress,
        **settings: Any,
    ) -> Any:
        """Call one of the library's download functions on the repository, silently and with retries."""
        return ask(
            lambda: download(
                reference.name,
                revision=revision,
                cache_dir=self.cache,
                endpoint=self.api.endpoint,
                token=self.api.token,
                tqdm_class=_NoBar,
                **settings,
            ),
            reference,
            progress,
            self.cache,
        )

    def _fetch_files(self, plan: Plan, revision: ResolvedRevision, progress: Progress) -> None:
        name = plan.reference.name
        tree = {file.path: file for file in get_cached_repo_tree(name, revision=revision, cache_dir=self.cache)}
        folder = repo_folder_name(repo_id=name, repo_type="model")
        locks = self.cache / ".locks" / folder
        transfer = Transfer(self.api, name, revision.resolved, self.cache / folder, locks, progress)

        def library(path: str, **settings: Any) -> Any:
            return self._download(hf_hub_download, revision, plan.reference, progress, filename=path, **settings)

        def fetch(file: PlannedFile) -> None:
            xet_hash = None if constants.HF_HUB_DISABLE_XET else tree[file.path].xet_hash
            assert file.size is not None and file.digest is not None
            # Xet files that another repository holds lie in a store which the library links from.
            if not xet_hash or not library(file.path, dry_run=True).is_cached:
                transfer.fetch(Blob(file.path, file.size, file.digest, xet_hash))
            library(file.path)
            progress.finish(file.path)

        _in_parallel(fetch, [file for file in plan.files if not file.cached], transfer.cancel)

    def _snapshot(self, name: str, commit: str) -> Path:
        return self.cache / repo_folder_name(repo_id=name, repo_type="model") / "snapshots" / commit

    def _cached_revision(self, reference: Reference) -> ResolvedRevision:
        try:
            return self.api.resolve_revision(
                reference.name, revision=reference.revision, cache_dir=self.cache, local_files_only=True
            )
        except RevisionResolutionError:
            commit = self._long_commit(reference)
            if commit is None:
                raise self._not_cached(reference) from None
            return ResolvedRevision(commit, reference.revision, reference.name)

    def _long_commit(self, reference: Reference) -> str | None:
        """The cached commit that a short one stands for."""
        short = (reference.revision or "").lower()
        found = [
            commit for commit in self._cached_commits(reference.name) if len(short) >= 7 and commit.startswith(short)
        ]
        return found[0] if len(found) == 1 else None

    def _find_in_tree(self, reference: Reference, revision: ResolvedRevision, paths: list[str]) -> Checkpoint:
        chosen = select(paths, reference.tag, reference.name)
        try:
            folder = self._local_snapshot(reference, revision, [escape(path) for path in chosen.files])
        except LocalEntryNotFoundError as error:  # or its IncompleteSnapshotError
            folder = self._snapshot(reference.name, revision.resolved)
            missing = [path for path in chosen.files if not (folder / path).exists()]
            raise incomplete(reference, chosen, folder, missing) from error
        files = tuple(folder / path for path in chosen.files)
        path = files[0] if chosen.format == "gguf" else folder
        return Checkpoint(str(reference), chosen.format, path, files, "hf", revision.resolved)

    def _find_without_tree(self, reference: Reference, revision: ResolvedRevision) -> Checkpoint:
        """For what another program fetched file by file: the files that are here are all that is known."""
        try:
            folder = self._local_snapshot(reference, revision, None)
        except LocalEntryNotFoundError as error:
            raise self._not_cached(reference) from error
        return whole_in_folder(folder, reference, "hf", revision.resolved)

    def _local_snapshot(self, reference: Reference, revision: ResolvedRevision, patterns: list[str] | None) -> Path:
        found = snapshot_download(
            reference.name, revision=revision, cache_dir=self.cache, local_files_only=True, allow_patterns=patterns
        )
        return Path(found)

    def _not_cached(self, reference: Reference) -> NotCachedError:
        commits = self._cached_commits(reference.name).items()
        return not_cached(
            reference, [f"{'/'.join(sorted(refs))} ({commit[:12]})" if refs else commit for commit, refs in commits]
        )

    def _cached_commits(self, name: str) -> dict[str, frozenset[str]]:
        """Commits of a repository in the cache, with the branches and tags that are known to mean them."""
        repositories = [repository for repository in self._scan().repos if repository.repo_id == name]
        return {revision.commit_hash: revision.refs for repo in repositories for revision in repo.revisions}

    def _scan(self) -> HFCacheInfo:
        try:
            return scan_cache_dir(self.cache)
        except CacheNotFound:
            return HFCacheInfo(0, frozenset(), frozenset(), [], self.cache)


def listed_models(name: str, revision: CachedRevisionInfo, cache: Path) -> list[CachedModel]:
    """The models of one cached revision: each GGUF one, and the folder's own where it has weights."""
    files = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
    branch = min(revision.refs, default=revision.commit_hash)
    at = None if constants.DEFAULT_REVISION in revision.refs else branch
    expected = _expected(name, revision.commit_hash, cache) or list(files)
    models = []
    for tag in [model.label for model in gguf_models(files)] + ([None] if "config.json" in expected else []):
        reference = Reference("hf", name, tag, at)
        try:
            chosen = select(expected, tag, name)
        except MetalctlError:
            continue  # the configuration of something that is no model, or an ambiguous rest of one
        here = [files[path] for path in chosen.files if path in files]
        if here and (tag or chosen.format == "mlx"):
            models.append(_listed(reference, revision, chosen, here))
    return models


def _listed(
    reference: Reference, revision: CachedRevisionInfo, chosen: Selection, here: Sequence[CachedFileInfo]
) -> CachedModel:
    snapshot = revision.snapshot_path
    return CachedModel(
        reference,
        "hf",
        chosen.format,
        chosen.tag if chosen.format == "gguf" else folder_quantisation(snapshot),
        sum(file.size_on_disk for file in here),
        max(file.blob_last_accessed for file in here),
        snapshot / chosen.weights[0] if chosen.format == "gguf" else snapshot,
        revision.commit_hash,
        len(here) == len(chosen.files),
        tuple(file.file_path for file in here),
    )


def _begun(scan: HFCacheInfo) -> list[CachedModel]:
    """Downloads that stopped in the middle of a file, one entry for each repository."""
    folders: dict[Path, list[CachedIncompleteFileInfo]] = {}
    for file in scan.incomplete_files:
        folders.setdefault(file.file_path.parent.parent, []).append(file)
    models = []
    for folder, files in sorted(folders.items()):
        kind, _, name = folder.name.partition("--")
        if kind == "models":
            reference = Reference("hf", name.replace("--", "/"))
            size = sum(file.size_on_disk for file in files)
            paths = tuple(file.file_path for file in files)
            used = max(path.stat().st_mtime for path in paths)
            models.append(CachedModel(reference, "hf", None, None, size, used, folder, None, False, paths))
    return models


def _remove_begun(model: CachedModel, alone: bool) -> None:
    """Delete unfinished files, and with the last model of a repository all that was fetched for it."""
    for file in model.files:
        file.unlink(missing_ok=True)
    if alone:
        shutil.rmtree(model.path, ignore_errors=True)


def _expected(name: str, commit: str, cache: Path) -> list[str] | None:
    try:
        return [file.path for file in get_cached_repo_tree(name, revision=commit, cache_dir=cache)]
    except CachedRepoTreeNotFoundError:
        return None


def _model_revisions(scan: HFCacheInfo) -> list[tuple[str, CachedRevisionInfo]]:
    repositories = sorted((repo for repo in scan.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return [(repo.repo_id, revision) for repo in repositories for revision in repo.revisions]


def _in_parallel(
    fetch: Callable[[PlannedFile], None], files: Sequence[PlannedFile], cancel: Callable[[], None]
) -> None:
    """Fetch files side by side; the first failure, or Ctrl-C, stops the others at their next bytes."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(fetch, file) for file in files]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            cancel()
            pool.shutdown(wait=False, cancel_futures=True)  # leaving the block waits for those that run
            raise


class _NoBar:
    """Stands where the library wants a progress bar of its own."""

    n = 0
    total = 0

    def __init__(self, *_: object, **__: object): ...
    def __enter__(self) -> "_NoBar":
        return self

    def __exit__(self, *_: object) -> None: ...
    def update(self, _: float = 1) -> None: ...
    def refresh(self) -> None: ...
    def close(self) -> None: ...
    def set_description(self, _: str) -> None: ...
    def set_description_str(self, _: str) -> None: ...
    def set_postfix_str(self, _: str, refresh: bool = False) -> None: ...
