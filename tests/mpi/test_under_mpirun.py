"""Run `tests/mpi/cases` on real ranks, so that plain ``pytest tests`` covers them."""

from __future__ import annotations

import re

import pytest

from tests.processes import mpirun
from tests.thinning import exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("P", [exhaustive(1), exhaustive(5), exhaustive(2), 3])
def test_cases(P: int) -> None:
    pytest_ = ["-m", "pytest", "tests/mpi/cases", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    status, said = mpirun(P, "-m", "mpi4py", *pytest_, seconds=1800)  # mpi4py ends the whole job when one rank fails
    assert status == 0, said
    assert len(re.findall(r"^\d+ passed.* in ", said, re.MULTILINE)) == P, said


@pytest.mark.slow
def test_nodes_that_are_communicators() -> None:
    status, said = mpirun(4, "-m", "mpi4py", "-m", "tests.mpi.nodes", seconds=300)
    assert status == 0, said
    assert said.count(" ok") == 4, said
