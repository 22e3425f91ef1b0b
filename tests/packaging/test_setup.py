"""What setup.py refuses, before anything is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

RUN = (
    "import runpy, sys; {before}; sys.argv = ['setup.py', 'build_ext']; runpy.run_path('setup.py', run_name='__main__')"
)


def refused(before: str = "pass", **variables: str) -> str:
    command = [sys.executable, "-c", RUN.format(before=before)]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout
    return ran.stderr


def test_an_old_python() -> None:
    assert "sparsecomm needs Python 3.10 or newer: " in refused("sys.version_info = (3, 9, 1)")


def test_a_wrapper_that_is_not_there() -> None:
    said = refused(MPICC="/no/such/mpicc")
    assert "sparsecomm: '/no/such/mpicc' was not found, with MPICC='/no/such/mpicc'." in said
    assert "MPICC= builds without MPI" in said


@pytest.mark.parametrize(
    ("header", "error"),
    [("int an_unknown_mpi;", "is neither Open MPI, nor MPICH, nor of the standard ABI"), (None, "mpi.h")],
)
def test_a_wrapper_of_no_known_mpi(header: str | None, error: str, tmp_path: Path) -> None:
    wrapper = tmp_path / "mpicc"
    wrapper.write_text(f"#!/bin/sh\necho cc -I{tmp_path} -lmpi\n")
    wrapper.chmod(0o755)
    if header is not None:
        (tmp_path / "mpi.h").write_text(header)
    said = refused(MPICC=str(wrapper), CPATH="")
    assert error in said
    assert f"the MPI of '{wrapper}'" in said
