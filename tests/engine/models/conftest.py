"""Sources that talk to loopback hubs, with caches of their own and short pauses."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from heard import Heard
from loopback_hub import Hub, running_hub
from modelscope_hub import HubConfig

from metalctl.engine.models.sources import base, hf_errors, hf_transfer
from metalctl.engine.models.sources.huggingface import HuggingFace
from metalctl.engine.models.sources.modelscope import ModelScope


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses before a retry last a hundredth."""
    pause = hf_errors.pause

    def short_pause(error: Exception, attempt: int) -> float | None:
        wait = pause(error, attempt)
        return None if wait is None else wait / 100

    monkeypatch.setattr(hf_errors, "pause", short_pause)
    monkeypatch.setattr(hf_transfer, "pause", short_pause)


@pytest.fixture
def hf(hub: Hub, tmp_path: Path, hurried: None) -> HuggingFace:
    return HuggingFace(cache=tmp_path / "hf", endpoint=hub.url, token="hf_test")


@pytest.fixture
def ms(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelScope:
    monkeypatch.setenv("MODELSCOPE_DOWNLOAD_INTRA_CLOUD", "false")
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_RETRY_MAX_DELAY_SECONDS", 0.02)
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.02)
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_RETRY_MAX_DELAY_SECONDS", 0.02)
    return modelscope_at(hub.url, tmp_path)


def modelscope_at(url: str, folder: Path) -> ModelScope:
    config = HubConfig(endpoint=url, cache_dir=folder / "ms", config_dir=folder / "ms-config", token="")
    return ModelScope(folder / "own", config=config)


@pytest.fixture
def closed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that nothing can be written to, with room on its disk."""
    monkeypatch.setattr(base, "free_space", lambda _: 2**40)
    if os.geteuid() != 0:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o500)
        return folder
    if not sys.platform.startswith("linux"):
        pytest.skip("root can write everywhere")
    return Path("/sys/hub")  # where not even root makes folders


@pytest.fixture(params=["hf", "ms"])
def source(request: pytest.FixtureRequest) -> Any:
    """Each hub's source in turn."""
    return request.getfixturevalue(request.param)
