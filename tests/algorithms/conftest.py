"""Calls use assumed costs here, so that no measurement of links adds bytes and trips to those of an algorithm."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _assumed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")
