"""The ranks of `tests/mpi/cases`. Files that import this module are skipped without mpirun."""

from __future__ import annotations

import os
import time

import pytest

if not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"} & set(os.environ):
    pytest.skip("needs mpirun", allow_module_level=True)

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
P, RANK = WORLD.size, WORLD.rank
ODD = 1 % P  # the rank that deviates
SECONDS = 60  # enough on a busy machine, and far below the timeout of 300

several = pytest.mark.skipif(P < 2, reason="needs two ranks")


def barrier() -> None:
    """Wait for all ranks, with a timeout, so that a rank whose test failed can report it."""
    request, began = WORLD.Ibarrier(), time.monotonic()
    while not request.Test():
        assert time.monotonic() - began < SECONDS, "the other ranks do not come"
        time.sleep(1e-4)
