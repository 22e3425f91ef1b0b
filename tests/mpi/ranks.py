"""The ranks that `tests/mpi/cases` run on. Files that import this are skipped where nobody has started ranks."""

from __future__ import annotations

import os
import time

import pytest

if not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"} & set(os.environ):
    pytest.skip("needs mpirun", allow_module_level=True)

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
P, RANK = WORLD.size, WORLD.rank
ODD = 1 % P  # the rank that does something else
SECONDS = 60  # also beside programs that take all cores; far from the 300 of the timeout

several = pytest.mark.skipif(P < 2, reason="needs two ranks")


def barrier() -> None:
    """Wait for all ranks, but not for ever, so that one on which a test has failed gets to say so."""
    request, began = WORLD.Ibarrier(), time.monotonic()
    while not request.Test():
        assert time.monotonic() - began < SECONDS, "the other ranks do not come"
        time.sleep(1e-4)
