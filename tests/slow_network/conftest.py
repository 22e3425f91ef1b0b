from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests see what their own runs leave, whatever else runs on the machine. Open MPI needs a short path."""
    with tempfile.TemporaryDirectory(prefix="sn", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder for the relay, which is compiled for these tests: its path marks their processes."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
