"""What holds for both hubs alike, through their own libraries."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heard import Heard
from loopback_hub import Hub
from tiny_repositories import SHARDS, gguf_repository, mlx_repository

from metalctl.engine.errors import (
    AmbiguousTagError,
    HubError,
    IncompleteModelError,
    ModelNotFoundError,
    NotCachedError,
    RevisionNotCachedError,
    StorageError,
    TagNotCachedError,
    TagNotFoundError,
)
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.references import Reference
from metalctl.engine.models.sources import base, huggingface
from metalctl.engine.models.sources.huggingface import HuggingFace

MLX_FILES = {"config.json", *SHARDS, "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"}


def named(source: Any, tag: str | None = None, revision: str | None = None, name: str = "o/gguf") -> Reference:
    return Reference("hf" if isinstance(source, HuggingFace) else "ms", name, tag, revision)


def pull(source: Any, reference: Reference, heard: Heard) -> Checkpoint:
    found: Checkpoint = source.fetch(source.plan(reference, heard), heard)
    return found


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on every socket is an error."""

    def block() -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a socket was opened offline")

        for name in ("socket", "create_connection", "getaddrinfo"):
            monkeypatch.setattr(socket, name, refuse)

    return block


def test_one_quantisation_is_fetched_with_its_projector_and_nothing_else(hub: Hub, source: Any, heard: Heard) -> None:
    files = gguf_repository()
    hub.repository("o/gguf").commit(files)
    found = pull(source, named(source, "Q8_0"), heard)
    assert [file.name for file in found.files] == ["tiny-Q8_0.gguf", "mmproj-F16.gguf"]
    assert found.path.read_bytes() == files["tiny-Q8_0.gguf"]
    assert found.format == "gguf"
    assert hub.downloads == 2
    assert sorted(heard.finished) == ["mmproj-F16.gguf", "tiny-Q8_0.gguf"]
    assert heard.done["tiny-Q8_0.gguf"] == len(files["tiny-Q8_0.gguf"])


def test_a_split_file_comes_whole(hub: Hub, source: Any, heard: Heard) -> None:
    files = gguf_repository()
    hub.repository("o/gguf").commit(files)
    found = pull(source, named(source, "F16"), heard)
    assert found.path.name == "tiny-F16-00001-of-00002.gguf"
    assert [file.read_bytes() for file in found.files[:2]] == [files[f"tiny-F16-0000{n}-of-00002.gguf"] for n in (1, 2)]


def test_a_folder_model_comes_without_what_it_does_not_need(hub: Hub, source: Any, heard: Heard) -> None:
    files = mlx_repository()
    hub.repository("o/mlx").commit(files)
    found = pull(source, named(source, name="o/mlx"), heard)
    assert {file.name for file in found.files} == MLX_FILES
    assert found.path.is_dir()
    assert {path.name: path.read_bytes() for path in found.files} == {name: files[name] for name in MLX_FILES}
    assert hub.downloads == len(MLX_FILES)


def test_a_plan_writes_nothing_and_tells_sizes(hub: Hub, source: Any, heard: Heard, tmp_path: Path) -> None:
    files = gguf_repository()
    hub.repository("o/gguf").commit(files)
    plan = source.plan(named(source, "Q4_0"), heard)
    assert plan.to_fetch == plan.size == len(files["tiny-Q4_0.gguf"]) + len(files["mmproj-F16.gguf"])
    assert not plan.complete
    assert not list((tmp_path / "hf").rglob("*"))
    assert not list((tmp_path / "ms").rglob("*"))
    with pytest.raises(NotCachedError):
        source.find(named(source, "Q4_0"))


def test_a_second_pull_downloads_nothing(hub: Hub, source: Any, heard: Heard) -> None:
    hub.repository("o/gguf").commit(gguf_repository())
    pull(source, named(source, "Q4_0"), heard)
    before = hub.downloads, hub.count("^HEAD")
    plan = source.plan(named(source, "Q4_0"), heard)
    assert plan.complete
    assert plan.to_fetch == 0
    source.fetch(plan, heard)
    assert (hub.downloads, hub.count("^HEAD")) == before


def test_the_revision_reaches_every_file(hub: Hub, source: Any, heard: Heard) -> None:
    repository = hub.repository("o/mlx")
    old = mlx_repository(seed=1)
    commit = repository.commit(old, "v1")
    new = mlx_repository(seed=2)
    repository.commit(new)
    pull(source, named(source, name="o/mlx"), heard)
    pinned = pull(source, named(source, revision="v1", name="o/mlx"), heard)
    assert {file.name: file.read_bytes() for file in pinned.files} == {name: old[name] for name in MLX_FILES}
    assert len({file.parent for file in pinned.files}) == 1
    newest = source.find(named(source, name="o/mlx"))
    assert {file.name: file.read_bytes() for file in newest.files} == {name: new[name] for name in MLX_FILES}
    by_commit = pull(source, named(source, revision=commit, name="o/mlx"), heard)
    assert (by_commit.path / SHARDS[0]).read_bytes() == old[SHARDS[0]]


def test_a_branch_that_moved_is_fetched_again(hub: Hub, source: Any, heard: Heard) -> None:
    repository = hub.repository("o/mlx")
    repository.commit(mlx_repository(seed=1))
    pull(source, named(source, name="o/mlx"), heard)
    new = mlx_repository(seed=2)
    repository.commit(new)
    plan = source.plan(named(source, name="o/mlx"), heard)
    assert not plan.complete
    found = source.fetch(plan, heard)
    assert {file.name: file.read_bytes() for file in found.files} == {name: new[name] for name in MLX_FILES}


def test_a_branch_that_moves_between_plan_and_fetch_is_fetched_as_it_is_then(
    hub: Hub, source: Any, heard: Heard
) -> None:
    repository = hub.repository("o/mlx")
    repository.commit(mlx_repository(seed=1))
    plan = source.plan(named(source, name="o/mlx"), heard)
    if isinstance(source, HuggingFace):
        new = mlx_repository(seed=2)
        repository.commit(new)
        found = source.fetch(plan, heard)
        assert {file.name: file.read_bytes() for file in found.files} == {name: new[name] for name in MLX_FILES}
    else:  # ModelScope's branches are planned by hash: what is not what was planned is refused
        repository.commit({**mlx_repository(seed=2), "tokenizer.json": b"[]"})
        with pytest.raises(HubError):
            source.fetch(plan, heard)
        with pytest.raises(IncompleteModelError):
            source.find(named(source, name="o/mlx"))


def test_a_moved_branch_that_was_half_fetched_does_not_look_whole(hub: Hub, source: Any, heard: Heard) -> None:
    repository = hub.repository("o/mlx")
    repository.commit(mlx_repository(seed=1))
    pull(source, named(source, name="o/mlx"), heard)
    repository.commit(mlx_repository(seed=2))
    hub.fail(rf"GET .*{SHARDS[1]}", status=403)
    with pytest.raises(HubError):
        pull(source, named(source, name="o/mlx"), heard)
    with pytest.raises(IncompleteModelError):
        source.find(named(source, name="o/mlx"))


def test_offline_finds_what_was_pulled_at_its_revision_without_a_socket(
    hub: Hub, source: Any, heard: Heard, no_sockets: Callable[[], None]
) -> None:
    repository = hub.repository("o/gguf")
    repository.commit(gguf_repository(), "v1")
    repository.commit({**gguf_repository(), "tiny-Q4_0.gguf": b"GGUF of another day"})
    hub.repository("o/mlx").commit(mlx_repository())
    wanted = [named(source, "Q4_0"), named(source, "q4_0".upper(), "v1"), named(source, name="o/mlx")]
    pulled = [pull(source, reference, heard) for reference in wanted]
    asked = len(hub.requests)
    no_sockets()
    began = time.perf_counter()
    found = [source.find(reference) for reference in wanted]
    assert (time.perf_counter() - began) / len(wanted) < 0.2
    assert found == pulled
    assert len(hub.requests) == asked


def test_offline_each_lack_is_an_error_of_its_own(
    hub: Hub, source: Any, heard: Heard, no_sockets: Callable[[], None]
) -> None:
    """Never pulled; another revision; in part; tag not among the files; tag not in the repository; tag ambiguous."""
    hub.repository("o/gguf").commit({**gguf_repository(), "other-Q4_0.gguf": b"GGUF"})
    hub.repository("o/mlx").commit(mlx_repository())
    pull(source, named(source, "Q8_0"), heard)
    hub.fail(rf"GET .*{SHARDS[0]}", status=403)
    with pytest.raises(HubError):
        pull(source, named(source, name="o/mlx"), heard)
    no_sockets()
    lacks = [
        (named(source, name="o/never"), NotCachedError, "not been pulled"),
        (named(source, "Q8_0", "v9"), RevisionNotCachedError, "not at v9"),
        (named(source, name="o/mlx"), IncompleteModelError, SHARDS[0]),
        (named(source, "F16"), TagNotCachedError, "Q8_0"),
        (named(source, "Q2_K"), TagNotFoundError, "Q2_K"),
        (named(source, "Q4_0"), AmbiguousTagError, "other-Q4_0.gguf"),
    ]
    kinds = set()
    for reference, kind, said in lacks:
        with pytest.raises(ModelNotFoundError) as caught:
            source.find(reference)
        assert type(caught.value) is kind, reference
        assert said in caught.value.message
        assert caught.value.hint
        kinds.add(caught.value.type)
    assert len(kinds) == len(lacks)


def test_a_deleted_weight_makes_the_model_incomplete(hub: Hub, source: Any, heard: Heard) -> None:
    hub.repository("o/mlx").commit(mlx_repository())
    found = pull(source, named(source, name="o/mlx"), heard)
    (found.path / SHARDS[1]).unlink()
    with pytest.raises(IncompleteModelError, match=SHARDS[1]):
        source.find(named(source, name="o/mlx"))
    again = pull(source, named(source, name="o/mlx"), heard)
    assert (again.path / SHARDS[1]).exists()


@pytest.mark.parametrize(
    ("reference", "said"),
    [(("Q8_0", None, "o/nothing"), "o/nothing"), (("Q8_0", "v7", "o/gguf"), "v7"), (("Q2_K", None, "o/gguf"), "Q2_K")],
)
def test_what_the_hub_does_not_have_is_not_found(
    hub: Hub, source: Any, heard: Heard, reference: tuple[str, str | None, str], said: str
) -> None:
    hub.repository("o/gguf").commit(gguf_repository())
    with pytest.raises(ModelNotFoundError) as caught:
        source.plan(named(source, *reference), heard)
    assert said in caught.value.message
    assert caught.value.exit_code == 3


def test_a_hub_that_is_down_is_a_hub_error_after_some_tries(hub: Hub, source: Any, heard: Heard) -> None:
    hub.fail("GET /api", status=503)
    with pytest.raises(HubError) as caught:
        source.plan(named(source), heard)
    assert hub.count() > 1
    assert "503" in caught.value.message
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access_is_a_hub_error_that_tells_of_tokens(hub: Hub, source: Any, heard: Heard, status: int) -> None:
    hub.repository("o/gguf").commit(gguf_repository())
    hub.fail("GET /api", status=status, headers={"X-Error-Code": "GatedRepo"})
    with pytest.raises(HubError) as caught:
        source.plan(named(source), heard)
    assert "token" in str(caught.value.hint).lower() or "TOKEN" in str(caught.value.hint)
    assert hub.count() == 1


def test_a_cut_in_the_middle_of_a_file_is_taken_up_where_it_was(hub: Hub, source: Any, heard: Heard) -> None:
    files = gguf_repository(size=32 * 20_000)
    size = len(files["tiny-Q8_0.gguf"])
    hub.repository("o/gguf").commit(files)
    hub.fail(r"GET .*tiny-Q8_0", cut=size // 2, times=1)
    found = pull(source, named(source, "Q8_0"), heard)
    assert found.path.read_bytes() == files["tiny-Q8_0.gguf"]
    assert hub.sent <= size + len(files["mmproj-F16.gguf"])
    assert heard.retries


def test_what_one_process_left_the_next_goes_on_with(hub: Hub, source: Any, heard: Heard) -> None:
    files = gguf_repository(size=32 * 20_000)
    size = len(files["tiny-Q8_0.gguf"])
    hub.repository("o/gguf").commit(files)
    hub.fail(r"GET .*tiny-Q8_0", cut=size // 2, times=1)
    hub.fail(r"GET .*tiny-Q8_0", status=403, times=1)
    with pytest.raises(HubError):
        pull(source, named(source, "Q8_0"), heard)
    with pytest.raises(IncompleteModelError):
        source.find(named(source, "Q8_0"))
    sent = hub.sent
    found = pull(source, named(source, "Q8_0"), heard)
    assert found.path.read_bytes() == files["tiny-Q8_0.gguf"]
    assert hub.sent - sent <= size - size // 2 + len(files["mmproj-F16.gguf"])


def test_a_file_that_arrives_corrupt_is_fetched_again(hub: Hub, source: Any, heard: Heard) -> None:
    files = gguf_repository()
    hub.repository("o/gguf").commit(files)
    hub.fail(r"GET .*tiny-Q8_0", corrupt=True, times=1)
    found = pull(source, named(source, "Q8_0"), heard)
    assert found.path.read_bytes() == files["tiny-Q8_0.gguf"]


def test_a_file_that_stays_corrupt_is_not_kept(hub: Hub, source: Any, heard: Heard, tmp_path: Path) -> None:
    hub.repository("o/gguf").commit(gguf_repository())
    hub.fail(r"GET .*tiny-Q8_0", corrupt=True)
    with pytest.raises(HubError, match="damaged"):
        pull(source, named(source, "Q8_0"), heard)
    assert not [path for path in tmp_path.rglob("*tiny-Q8_0.gguf") if path.is_file()]
    with pytest.raises(NotCachedError):
        source.find(named(source, "Q8_0"))


def test_a_small_file_is_checked_too(hub: Hub, source: Any, heard: Heard) -> None:
    files = mlx_repository()
    hub.repository("o/mlx").commit(files)
    hub.fail(r"GET .*tokenizer.json", corrupt=True, times=1)
    found = pull(source, named(source, name="o/mlx"), heard)
    assert (found.path / "tokenizer.json").read_bytes() == files["tokenizer.json"]


def test_too_little_space_is_told_before_anything_is_fetched(
    hub: Hub, source: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repository("o/gguf").commit(gguf_repository())
    monkeypatch.setattr(base, "free_space", lambda _: base.SPACE_RESERVE + 100)
    with pytest.raises(StorageError, match="needs"):
        pull(source, named(source, "Q8_0"), heard)
    assert hub.downloads == 0


def test_what_is_cached_is_listed_and_removed(hub: Hub, source: Any, heard: Heard) -> None:
    files = gguf_repository()
    hub.repository("o/gguf").commit(files)
    hub.repository("o/mlx").commit(mlx_repository(), "v1")
    pull(source, named(source, "Q8_0"), heard)
    pull(source, named(source, "F16"), heard)
    pull(source, named(source, revision="v1", name="o/mlx"), heard)
    listed = {model.identity: model for model in source.cached()}
    eight, sixteen = listed[named(source, "Q8_0")], listed[named(source, "F16")]
    mlx = listed[named(source, revision="v1", name="o/mlx")]
    assert set(listed) == {eight.identity, sixteen.identity, mlx.identity}
    assert all(model.complete for model in listed.values())
    assert (eight.quantisation, mlx.quantisation) == ("Q8_0", "4-bit")
    assert eight.size == len(files["tiny-Q8_0.gguf"]) + len(files["mmproj-F16.gguf"])

    assert source.remove([eight]) == len(files["tiny-Q8_0.gguf"])  # the projector is the other one's too
    assert not eight.path.exists()
    assert source.find(named(source, "F16")).files[-1].exists()
    source.remove([sixteen, mlx])
    assert source.cached() == []
    with pytest.raises(NotCachedError):
        source.find(named(source, "F16"))


def test_what_lacks_files_is_listed_as_incomplete(
    hub: Hub, source: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "WORKERS", 1)  # so that the files before the one that fails are here
    hub.repository("o/mlx").commit(mlx_repository())
    hub.fail(rf"GET .*{SHARDS[1]}", status=403)
    with pytest.raises(HubError):
        pull(source, named(source, name="o/mlx"), heard)
    (found,) = source.cached()
    assert not found.complete
    source.remove([found])
    assert source.cached() == []
