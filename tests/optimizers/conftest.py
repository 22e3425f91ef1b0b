"""Let even few weights have several owners in this folder's tests."""

from __future__ import annotations

import pytest

from sparsecomm.reducer import bucket
from tests.optimizers.adapters import MIN_OWNED


@pytest.fixture(autouse=True)
def several_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_MIN_OWNED", MIN_OWNED)
