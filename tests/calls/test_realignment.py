"""Ranks whose calls are out of step find out at once, and continue together after `realign`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import mpirun
from tests.thinning import exhaustive

ON_RANKS = """
import os, time
import numpy as np
from mpi4py import MPI
import sparsecomm as sc
{comm}
rank, P = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
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
MPI.COMM_WORLD.Barrier()
os.environ["SPARSECOMM_TIMEOUT"] = "100"
assert fails(sc.CollectiveMismatchError, f"rank {P - 1} begins call ", "KeyboardInterrupt", "realign(comm)") < 50
MPI.COMM_WORLD.Barrier()
sc.realign(comm)
assert [call() for _ in range(3)] == 3 * [[P, P]]
if rank:  # rank 0 calls them out of their call
    assert fails(sc.CollectiveMismatchError, "waits in sparsecomm.realign()") < 50
sc.realign(comm)
assert [call() for _ in range(3)] == 3 * [[P, P]]
print("fine", flush=True)
"""


GROUP = """
import torch.distributed as dist
rank, P = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
dist.init_process_group("gloo", store=dist.FileStore({}, P), rank=rank, world_size=P)
comm = dist.group.WORLD
"""


@pytest.mark.parametrize(("P", "group"), [(2, False), (2, True), exhaustive(4, False), exhaustive(3, True)])
def test_real_ranks(P: int, group: bool, tmp_path: Path) -> None:
    comm = GROUP.format(repr(str(tmp_path / "group"))) if group else "comm = MPI.COMM_WORLD"
    status, said = mpirun(P, "-c", ON_RANKS.replace("{comm}", comm))
    assert status == 0, said
    assert said.count("fine") == P, said
