"""Fixtures of cases on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have "auto" choose by costs that are the same in every run: here, nothing is to be a dense sum."""
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")


@pytest.fixture(autouse=True)
def together() -> Iterator[None]:
    """Start no test before all ranks have left the one before: their timeouts are short."""
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
