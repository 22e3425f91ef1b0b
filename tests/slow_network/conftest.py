from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tests see only the leftovers of their own runs. Open MPI needs a short path."""
    with tempfile.TemporaryDirectory(prefix="sn", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder for the compiled relay; its path identifies the processes of these tests."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
