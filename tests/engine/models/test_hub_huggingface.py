import errno
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from heard import Heard
from loopback_hub import Content, Hub, running_hub
from tiny_repositories import gguf_file, gguf_repository, mlx_repository

from metalctl.engine.errors import (
    HubError,
    IncompleteModelError,
    ModelNotFoundError,
    NotCachedError,
    StorageError,
    TagNotCachedError,
    UsageError,
)
from metalctl.engine.models.references import Reference, parse
from metalctl.engine.models.sources import hf_errors, hf_transfer, huggingface
from metalctl.engine.models.sources.huggingface import HuggingFace

MODEL = Reference("hf", "o/gguf", "Q8_0")
FILE = "tiny-Q8_0.gguf"


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    """What o/gguf holds: files of some hundred kilobytes."""
    made = gguf_repository(size=32 * 20_000)
    hub.repository("o/gguf").commit(made)
    return made


def pull(source: HuggingFace, reference: Reference, heard: Heard) -> Path:
    return source.fetch(source.plan(reference, heard), heard).path


def test_a_transfer_that_stands_still_is_noticed_and_taken_up_again(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_transfer, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.fail(f"GET .*{FILE}", stall=100_000, seconds=20, times=1)
    began = time.monotonic()
    assert pull(hf, MODEL, heard).read_bytes() == files[FILE]
    assert time.monotonic() - began < 15
    assert heard.retries
    assert any(request.headers.get("range", "").startswith("bytes=") for request in hub.requests)


def test_many_cuts_are_survived_as_long_as_bytes_arrive(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.fail(f"GET .*{FILE}", cut=50_000)
    assert pull(hf, MODEL, heard).read_bytes() == files[FILE]
    assert len(heard.retries) > hf_transfer.TRIES


def test_cuts_without_a_new_byte_end_after_some_tries(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.fail(f"GET .*{FILE}", cut=0)
    with pytest.raises(HubError, match="could not be reached"):
        pull(hf, MODEL, heard)
    assert hub.count(f"GET .*{FILE}") == hf_transfer.TRIES


def test_a_server_without_ranges_sends_everything_again(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.ranges = False
    hub.fail(f"GET .*{FILE}", cut=100_000, times=2)
    assert pull(hf, MODEL, heard).read_bytes() == files[FILE]


def test_a_server_without_ranges_that_always_cuts_is_given_up(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.ranges = False
    hub.fail(f"GET .*{FILE}", cut=100_000)
    with pytest.raises(HubError):
        pull(hf, MODEL, heard)


def test_retry_after_is_obeyed(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("GET /api", status=429, headers={"Retry-After": "7"}, times=1)
    hub.fail(f"GET .*{FILE}", status=429, headers={"Retry-After": "5"}, times=1)
    pull(hf, MODEL, heard)
    assert [round(wait * 100) for _, _, wait in heard.retries] == [7, 5]


def test_a_hub_that_asks_for_a_long_wait_is_left_alone(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.fail("GET /api", status=429, headers={"Retry-After": "900"})
    with pytest.raises(HubError) as caught:
        hf.plan(MODEL, heard)
    assert "900 seconds" in str(caught.value.hint)
    assert hub.count() == 1


def test_the_newer_header_of_limits_is_read_too(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.fail("GET /api", status=429, headers={"ratelimit": '"api";r=0;t=300'})
    with pytest.raises(HubError) as caught:
        hf.plan(MODEL, heard)
    assert "300 seconds" in str(caught.value.hint)


@pytest.mark.parametrize("status", hf_errors.RETRIED_STATUS)
def test_what_may_pass_is_tried_again(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], status: int
) -> None:
    hub.fail("GET /api", status=status, times=2)
    hub.fail("GET /o/gguf/resolve", status=status, times=2)
    hub.fail("HEAD", status=status, times=2)
    assert pull(hf, MODEL, heard).read_bytes() == files[FILE]


def test_a_gated_repository_says_where_its_terms_are(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.fail("GET /o/gguf/resolve", status=403, headers={"X-Error-Code": "GatedRepo"})
    with pytest.raises(HubError, match="gated") as caught:
        pull(hf, MODEL, heard)
    assert "https://huggingface.co/o/gguf" in str(caught.value.hint)


def test_a_hub_that_cannot_be_reached(heard: Heard, tmp_path: Path, hurried: None) -> None:
    source = HuggingFace(cache=tmp_path, endpoint="http://127.0.0.1:9")
    with pytest.raises(HubError, match="could not be reached"):
        source.plan(MODEL, heard)
    assert len(heard.retries) == hf_errors.QUESTION_TRIES - 1


def test_a_name_that_the_hub_cannot_have_is_a_usage_error(hf: HuggingFace, heard: Heard, hub: Hub) -> None:
    for call in (lambda: hf.plan(parse("hf:a/b--c"), heard), lambda: hf.find(parse("hf:a/b--c"))):
        with pytest.raises(UsageError):
            call()
    assert hub.count() == 0


def test_the_token_is_sent(hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]) -> None:
    pull(hf, MODEL, heard)
    assert {request.headers.get("authorization") for request in hub.requests} == {"Bearer hf_test"}


def test_the_token_does_not_leave_the_hub_with_a_redirect(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    with running_hub() as storage:
        storage.repository("o/gguf").commit(files)
        hub.storage = storage.url
        storage.fail(f"GET .*{FILE}", cut=200_000, times=1)
        assert pull(hf, MODEL, heard).read_bytes() == files[FILE]
    assert hub.sent == 0
    assert storage.count(r"GET .*signature") == 3
    assert not any("authorization" in request.headers for request in storage.requests)


def test_the_first_failure_stops_the_other_files(hub: Hub, hf: HuggingFace, heard: Heard) -> None:
    files = gguf_repository(size=32 * 200_000)
    hub.repository("o/gguf").commit(files)
    hub.slow = 0.02
    hub.fail("GET .*00002-of-00002", status=403)
    with pytest.raises(HubError):
        pull(hf, Reference("hf", "o/gguf", "F16"), heard)
    assert "tiny-F16-00001-of-00002.gguf" not in heard.finished
    assert hub.sent < len(files["tiny-F16-00001-of-00002.gguf"]) / 2


def test_a_full_disk_is_told_and_the_rest_kept(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    del hub.repositories["o/gguf"]
    hub.repository("o/gguf").commit({FILE: files[FILE]})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(hf_transfer.os, "fsync", full)
        with pytest.raises(StorageError, match="full"):
            pull(hf, MODEL, heard)
    with pytest.raises(IncompleteModelError):
        hf.find(MODEL)
    sent = hub.sent
    assert pull(hf, MODEL, heard).read_bytes() == files[FILE]
    assert hub.sent - sent < len(files[FILE])


def test_a_cache_that_cannot_be_written_is_told(
    hub: Hub, heard: Heard, files: dict[str, bytes], closed_folder: Path, hurried: None
) -> None:
    source = HuggingFace(cache=closed_folder / "cache", endpoint=hub.url)
    with pytest.raises(StorageError, match="cannot be written"):
        pull(source, MODEL, heard)
    assert hub.downloads == 0


def test_two_pulls_of_a_model_fetch_it_once(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.slow = 0.15
    found: list[Path] = []
    others = [HuggingFace(cache=tmp_path / "hf", endpoint=hub.url) for _ in range(3)]
    threads = [threading.Thread(target=lambda s=source: found.append(pull(s, MODEL, heard))) for source in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert found[0].read_bytes() == files[FILE]
    assert hub.count(f"GET .*{FILE}") == 1
    assert any("another process" in reason for _, reason, _ in heard.retries)


def test_the_hubs_own_library_finds_what_was_pulled(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], tmp_path: Path
) -> None:
    path = pull(hf, MODEL, heard)
    theirs = huggingface_hub.hf_hub_download("o/gguf", FILE, cache_dir=tmp_path / "hf", local_files_only=True)
    assert Path(theirs) == path
    scan = huggingface_hub.scan_cache_dir(tmp_path / "hf")
    assert not scan.warnings
    assert not scan.incomplete_files


def test_what_the_hubs_own_library_fetched_is_found_and_not_fetched_again(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], tmp_path: Path
) -> None:
    for name in (FILE, "mmproj-F16.gguf"):
        huggingface_hub.hf_hub_download("o/gguf", name, cache_dir=tmp_path / "hf", endpoint=hub.url, token=False)
    assert hf.find(MODEL).path.read_bytes() == files[FILE]
    with pytest.raises(TagNotCachedError):
        hf.find(Reference("hf", "o/gguf", "Q4_0"))
    downloads = hub.downloads
    pull(hf, MODEL, heard)
    assert hub.downloads == downloads


def test_a_snapshot_of_another_program_that_lacks_a_shard_is_incomplete(
    hub: Hub, hf: HuggingFace, tmp_path: Path
) -> None:
    hub.repository("o/mlx").commit(mlx_repository())
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        huggingface_hub.hf_hub_download("o/mlx", name, cache_dir=tmp_path / "hf", endpoint=hub.url, token=False)
    with pytest.raises(IncompleteModelError, match="model-00002-of-00002"):
        hf.find(Reference("hf", "o/mlx"))


def test_a_short_commit_finds_its_long_one_offline(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    path = pull(hf, MODEL, heard)
    commit = hub.repositories["o/gguf"].refs["main"]
    for revision in (commit, commit[:7], commit[:12]):
        assert hf.find(Reference("hf", "o/gguf", "Q8_0", revision)).path == path
    with pytest.raises(NotCachedError):
        hf.find(Reference("hf", "o/gguf", "Q8_0", "0123456"))


def test_a_download_that_only_began_is_listed_and_removed(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.fail(f"GET .*{FILE}", cut=200_000, times=1)
    hub.fail(f"GET .*{FILE}", status=403)
    with pytest.raises(HubError):
        pull(hf, MODEL, heard)
    (begun,) = hf.cached()
    assert (begun.identity.name, begun.complete, begun.size) == ("o/gguf", False, 200_000)
    assert hf.remove([begun]) == 200_000
    assert hf.cached() == []
    assert not list((tmp_path / "hf").glob("models--*"))


def test_removing_one_revision_keeps_what_the_other_shares(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    hub.repository("o/gguf").commit({**files, "README.md": b"new"}, "v2")
    first, second = MODEL, Reference("hf", "o/gguf", "Q8_0", "v2")
    pull(hf, first, heard)
    downloads = hub.downloads
    pull(hf, second, heard)
    assert hub.downloads == downloads  # the same blobs
    hf.remove([model for model in hf.cached() if model.identity == first])
    assert hf.find(second).path.read_bytes() == files[FILE]
    with pytest.raises(NotCachedError):
        hf.find(first)


@pytest.fixture
def xet(hub: Hub, tmp_path: Path) -> dict[str, bytes]:
    """o/gguf again, its large files in Xet storage: a store on disk, which the real client speaks to."""
    hf_xet: Any = pytest.importorskip("hf_xet")
    hub.cas = f"local://{tmp_path / 'cas'}"
    files = {FILE: gguf_file("Q8_0", values=32 * 30_000), "mmproj-F16.gguf": gguf_file("F16", values=64)}
    session = hf_xet.XetSession()
    contents: dict[str, bytes | Content] = {}
    for name in files:
        (tmp_path / name).write_bytes(files[name])
        with session.new_upload_commit(endpoint=hub.cas) as commit:
            upload = commit.start_upload_file(str(tmp_path / name))
        contents[name] = Content(files[name], xet_hash=upload.result().xet_info.hash)
    hub.repository("o/gguf").commit(contents)
    return files


def test_xet_storage_is_used_where_the_hub_has_it(
    hub: Hub, hf: HuggingFace, heard: Heard, xet: dict[str, bytes]
) -> None:
    assert pull(hf, MODEL, heard).read_bytes() == xet[FILE]
    assert hub.downloads == 0
    assert heard.done[FILE] == len(xet[FILE])


@pytest.mark.parametrize(("status", "said"), [(401, "gated"), (403, "gated"), (429, "429"), (503, "503"), (404, "404")])
def test_what_the_hub_refuses_of_xet_storage_is_told(
    hub: Hub, hf: HuggingFace, heard: Heard, xet: dict[str, bytes], status: int, said: str
) -> None:
    gated = {"X-Error-Code": "GatedRepo"} if status in (401, 403) else {}
    hub.fail("xet-read-token", status=status, headers=gated)
    with pytest.raises(HubError, match=said):
        pull(hf, MODEL, heard)
    assert bool(heard.retries) == (status in (429, 503))
    hub.faults.clear()
    assert pull(hf, MODEL, heard).read_bytes() == xet[FILE]


def test_one_token_serves_all_files_in_xet_storage(
    hub: Hub, hf: HuggingFace, heard: Heard, xet: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "WORKERS", 1)
    pull(hf, MODEL, heard)
    assert hub.count("xet-read-token") == 1


def test_xet_goes_on_inside_the_file_too(
    hub: Hub, hf: HuggingFace, heard: Heard, xet: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_xet = hf_transfer.Transfer._open_xet

    def watched(self: hf_transfer.Transfer, blob: hf_transfer.Blob, offset: int) -> Any:
        opened.append(offset)
        return open_xet(self, blob, offset)

    monkeypatch.setattr(hf_transfer.Transfer, "_open_xet", watched)
    digest = hub.repositories["o/gguf"].find("main")[1][FILE].sha256  # type: ignore[index]
    partial = tmp_path / "hf" / "models--o--gguf" / "blobs" / f"{digest}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(xet[FILE][:500_000])
    assert pull(hf, MODEL, heard).read_bytes() == xet[FILE]
    assert 500_000 in opened


def test_a_xet_file_that_another_repository_holds_is_linked(
    hub: Hub, hf: HuggingFace, heard: Heard, xet: dict[str, bytes], tmp_path: Path
) -> None:
    content = hub.repositories["o/gguf"].find("main")[1][FILE]  # type: ignore[index]
    hub.repository("o/copy").commit({"copy-Q8_0.gguf": content})
    theirs = huggingface_hub.hf_hub_download("o/copy", "copy-Q8_0.gguf", cache_dir=tmp_path / "hf", endpoint=hub.url)
    heard.done.clear()
    ours = pull(hf, MODEL, heard)
    if Path(theirs).resolve().parent.name == "blobs":
        pytest.skip("this version of the library has no store that repositories share")
    assert ours.resolve() == Path(theirs).resolve()
    assert FILE not in heard.done


def test_a_partial_file_of_wrong_bytes_is_thrown_away(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes], tmp_path: Path
) -> None:
    digest = Content(files[FILE]).sha256
    partial = tmp_path / "hf" / "models--o--gguf" / "blobs" / f"{digest}.incomplete"
    partial.parent.mkdir(parents=True)
    for wrong in (b"x" * 1000, b"x" * (len(files[FILE]) + 5)):
        partial.write_bytes(wrong)
        assert pull(hf, MODEL, heard).read_bytes() == files[FILE]
        hf.remove(hf.cached())
        partial.parent.mkdir(parents=True)


def test_a_file_that_vanishes_from_the_hub_is_not_found(
    hub: Hub, hf: HuggingFace, heard: Heard, files: dict[str, bytes]
) -> None:
    plan = hf.plan(MODEL, heard)
    hub.fail(f".*{FILE}", status=404, headers={"X-Error-Code": "EntryNotFound"})
    with pytest.raises(ModelNotFoundError):
        hf.fetch(plan, heard)
