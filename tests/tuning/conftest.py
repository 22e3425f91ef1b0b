"""Hide the machine's profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsecomm.tuning import profile


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("SPARSECOMM_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    profile._costs_for.cache_clear()
    yield
    profile._costs_for.cache_clear()
