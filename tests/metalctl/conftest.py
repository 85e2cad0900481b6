"""Every test of the command line has folders of its own, and an environment without settings."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where metalctl keeps things during this test: config.toml and state/ lie in it."""
    folder = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith("METALCTL_") or name in ("NO_COLOR", "FORCE_COLOR", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name)
    (folder / "config.toml").touch()
    monkeypatch.setenv("METALCTL_CONFIG", str(folder / "config.toml"))
    monkeypatch.setenv("METALCTL_STATE", str(folder / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    return folder
