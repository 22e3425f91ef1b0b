"""Calls go by assumed costs here: what is counted, bytes and trips, is that of the algorithm alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _assumed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")
