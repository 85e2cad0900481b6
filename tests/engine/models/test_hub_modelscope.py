import errno
from pathlib import Path
from typing import Any

import pytest
from heard import Heard
from loopback_hub import Hub
from tiny_repositories import SHARDS, gguf_repository, mlx_repository

from metalctl.engine.errors import HubError, IncompleteModelError, NotCachedError, RevisionNotCachedError, StorageError
from metalctl.engine.models.references import Reference
from metalctl.engine.models.sources.modelscope import ModelScope

MODEL = Reference("ms", "o/gguf", "Q8_0")
FILE = "tiny-Q8_0.gguf"


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    made = gguf_repository(size=32 * 20_000)
    hub.repository("o/gguf").commit(made)
    return made


def pull(source: ModelScope, reference: Reference, heard: Heard) -> Path:
    return source.fetch(source.plan(reference, heard), heard).path


def test_retries_of_the_library_are_told(hub: Hub, ms: ModelScope, heard: Heard, files: dict[str, bytes]) -> None:
    hub.fail(f"GET .*{FILE}", cut=100_000, times=1)
    hub.fail(f"GET .*{FILE}", status=429, headers={"Retry-After": "1"}, times=1)
    assert pull(ms, MODEL, heard).read_bytes() == files[FILE]
    assert [path for path, _, _ in heard.retries] == [FILE, FILE]


def test_a_limit_that_stays_is_a_hub_error(hub: Hub, ms: ModelScope, heard: Heard, files: dict[str, bytes]) -> None:
    hub.fail("GET /api", status=429)
    with pytest.raises(HubError, match="429"):
        ms.plan(MODEL, heard)


def test_a_full_disk_is_told_and_nothing_looks_complete(
    hub: Hub, ms: ModelScope, heard: Heard, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("modelscope_hub._download.open", full, raising=False)
        with pytest.raises(StorageError, match="full"):
            pull(ms, MODEL, heard)
    with pytest.raises(NotCachedError):
        ms.find(MODEL)
    assert pull(ms, MODEL, heard).read_bytes() == files[FILE]


@pytest.mark.parametrize("closed", ["the hub's", "our own"])
def test_a_cache_that_cannot_be_written_is_told(
    hub: Hub, ms: ModelScope, heard: Heard, files: dict[str, bytes], closed_folder: Path, closed: str
) -> None:
    if closed == "our own":
        ms.records = closed_folder / "own"
    else:
        ms.api._config.cache_dir = closed_folder / "cache"
    with pytest.raises(StorageError, match="cannot be written"):
        pull(ms, MODEL, heard)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, heard: Heard, ms: ModelScope, hub: Hub) -> None:
    ms.api.legacy._endpoint = "http://127.0.0.1:9"
    with pytest.raises(HubError, match="could not be reached") as caught:
        ms.plan(MODEL, heard)
    assert "MODELSCOPE_ENDPOINT" in str(caught.value.hint)


def test_what_the_hubs_own_library_fetched_is_found_and_not_fetched_again(
    hub: Hub, ms: ModelScope, heard: Heard, tmp_path: Path
) -> None:
    files = mlx_repository()
    hub.repository("o/mlx").commit(files)
    ms.api.download_repo("o/mlx", "model", revision="master")
    reference = Reference("ms", "o/mlx")
    assert (ms.find(reference).path / SHARDS[0]).read_bytes() == files[SHARDS[0]]
    downloads = hub.downloads
    pull(ms, reference, heard)
    assert hub.downloads == downloads


def test_a_snapshot_of_another_program_that_lacks_a_shard_is_incomplete(hub: Hub, ms: ModelScope) -> None:
    hub.repository("o/mlx").commit(mlx_repository())
    ms.api.download_repo("o/mlx", "model", revision="master", ignore_patterns=[SHARDS[1]])
    with pytest.raises(IncompleteModelError, match=SHARDS[1]):
        ms.find(Reference("ms", "o/mlx"))


def test_a_cache_of_the_old_layout_serves_the_default_revision_only(hub: Hub, ms: ModelScope, tmp_path: Path) -> None:
    folder = tmp_path / "ms" / "models" / "o" / "m___1"
    folder.mkdir(parents=True)
    for name, data in mlx_repository().items():
        (folder / name).write_bytes(data)
    assert ms.find(Reference("ms", "o/m.1")).path == folder
    with pytest.raises(NotCachedError):
        ms.find(Reference("ms", "o/m.1", None, "v1"))


def test_a_revision_with_a_slash_is_kept(hub: Hub, ms: ModelScope, heard: Heard) -> None:
    hub.repository("o/mlx").commit(mlx_repository(), "feature/x")
    reference = Reference("ms", "o/mlx", None, "feature/x")
    path = pull(ms, reference, heard)
    assert ms.find(reference).path == path
    with pytest.raises(RevisionNotCachedError, match="feature/x"):
        ms.find(Reference("ms", "o/mlx"))
    assert [model.identity for model in ms.cached()] == [reference]
    ms.remove(ms.cached())
    assert ms.cached() == []


def test_a_removed_repository_leaves_no_folder(hub: Hub, ms: ModelScope, heard: Heard, tmp_path: Path) -> None:
    hub.repository("o/mlx").commit(mlx_repository())
    pull(ms, Reference("ms", "o/mlx"), heard)
    ms.remove(ms.cached())
    assert not list((tmp_path / "ms" / "models").iterdir())
