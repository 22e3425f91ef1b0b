"""Fixtures for cases on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give "auto" the same costs in every run, by which dense sums never win."""
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")


@pytest.fixture(autouse=True)
def together() -> Iterator[None]:
    """Start each test only when all ranks have left the previous one, since timeouts are short."""
    from tests.mpi.ranks import barrier

    yield
    barrier()


@pytest.fixture
def comm() -> Iterator[Any]:
    from tests.mpi.ranks import MPI, WORLD, barrier

    private = WORLD.Dup()
    yield private
    barrier()
    if private != MPI.COMM_NULL:
        private.Free()


@pytest.fixture
def timeout(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda seconds: monkeypatch.setenv("SPARSECOMM_TIMEOUT", str(seconds))
