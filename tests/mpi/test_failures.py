"""Jobs in which a rank dies, is interrupted or gives up; and jobs that cannot use MPI."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsecomm.cli import main
from tests.processes import LIMIT, mpirun
from tests.waiting import until

ON_RANKS = """
import os, signal, sys, time
import numpy as np
import sparsecomm as sc
def allreduce(k=10, algorithm="auto"):
    return sc.sparse_allreduce(np.ones(1000, np.float32), k, algorithm=algorithm)
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
"""

WAITING = """
allreduce()
if rank == 0:
    print("ready", flush=True)
    time.sleep(1000)
allreduce()
"""

STARTS_ANOTHER = """
import subprocess
launcher = "OMPI_", "PMIX_", "PMI_"  # as docs/guides/troubleshooting.md says
environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
other = "import numpy, sparsecomm; print(sparsecomm.sparse_allreduce(numpy.ones(9), 2))"
if rank == 0:
    print(subprocess.run([sys.executable, "-c", other], env=environment, capture_output=True, text=True).stdout)
allreduce()
"""

REFUSED = """
allreduce(k=0 if rank == 1 else 10)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_job_whose_ranks_wait(
    sign: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher discards the ranks' last output, so traces show what was interrupted."""

    def rank_0_is_missing() -> bool:
        traces = [str(file) for file in tmp_path.iterdir()]
        refused = len(traces) == 3 and main(["trace", *traces]) == 1
        return refused and "=> Look at rank 0, which did not make call" in capsys.readouterr().out

    def interrupt(job: subprocess.Popen[bytes], said: Callable[[], str]) -> None:
        until(lambda: rank_0_is_missing() or job.poll() is not None, "the ranks to wait", LIMIT)
        job.send_signal(sign)

    traced = f"import os; os.environ['SPARSECOMM_TRACE'] = '{tmp_path}'\n"
    status, said = mpirun(3, "-c", traced + ON_RANKS + WAITING, meanwhile=interrupt)
    assert status != 0, said
    assert rank_0_is_missing()


def test_a_rank_may_start_a_program_that_is_alone() -> None:
    status, said = mpirun(2, "-c", ON_RANKS + STARTS_ANOTHER)
    assert status == 0, said
    assert "SparseVector(size=9, nnz=2" in said


@pytest.mark.parametrize("by_mpi4py", [True, False])
def test_a_refused_argument_ends_the_job(by_mpi4py: bool) -> None:
    """``python -m mpi4py`` ends ranks that wait for a rank that raised; without it, they time out."""
    settings = "" if by_mpi4py else "import os; os.environ['SPARSECOMM_TIMEOUT'] = '1'\n"
    status, said = mpirun(3, *["-m", "mpi4py"] * by_mpi4py, "-c", settings + ON_RANKS + REFUSED)
    assert status != 0, said
    assert "InvalidInputError: rank 1: k=0" in said
    assert by_mpi4py or said.count("TimeoutError: rank") == 2
