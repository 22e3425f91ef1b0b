"""Ranks whose calls are out of step find out at once, and continue together after `realign`."""

from __future__ import annotations

import pytest

from tests.processes import mpirun
from tests.thinning import exhaustive

ON_RANKS = """
import os, time
import numpy as np
import sparsecomm as sc
from sparsecomm.transport import control
control._SKIPPED_WAIT = 60  # reports may come late
{comm}
def call():
    return sc.sparse_allreduce(np.ones(10, np.float32), 2, comm=comm, algorithm="butterfly").values.tolist()
class Bad:
    def __dlpack_device__(self): raise KeyboardInterrupt
    __dlpack__ = __dlpack_device__
def skip():
    try: sc.sparse_allreduce(Bad(), 2, comm=comm)
    except KeyboardInterrupt: pass
def fails(kind, *parts):
    began = time.monotonic()
    try: call()
    except kind as error: said = str(error)
    else: raise AssertionError
    for part in parts:
        assert part in said, said
    return time.monotonic() - began
assert call() == [P, P]
os.environ["SPARSECOMM_TIMEOUT"] = "1"
skip() if rank == P - 1 else fails(sc.TransportError)
barrier()
os.environ["SPARSECOMM_TIMEOUT"] = "100"
assert fails(sc.CollectiveMismatchError, f"rank {P - 1} begins call ", "KeyboardInterrupt", "realign(comm)") < 50
barrier()
sc.realign(comm)
assert [call() for _ in range(3)] == 3 * [[P, P]]
if rank:  # rank 0 calls them out of their call
    assert fails(sc.CollectiveMismatchError, "waits in sparsecomm.realign()") < 50
sc.realign(comm)
assert [call() for _ in range(3)] == 3 * [[P, P]]
print("fine", flush=True)
"""


WORLD = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, P, barrier = comm.rank, comm.size, comm.Barrier
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
comm = dist.group.WORLD
rank, P, barrier = comm.rank(), comm.size(), dist.barrier
"""


@pytest.mark.parametrize(("P", "group"), [(2, False), (2, True), exhaustive(4, False), exhaustive(3, True)])
def test_real_ranks(P: int, group: bool, request: pytest.FixtureRequest) -> None:
    program = ON_RANKS.replace("{comm}", GROUP if group else WORLD)
    if group:
        pytest.importorskip("torch.distributed")
        status, said = request.getfixturevalue("forks")("-c", program, ranks=P)
    else:
        status, said = mpirun(P, "-c", program)
    assert status == 0, said
    assert said.count("fine") == P, said
