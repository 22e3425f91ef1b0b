"""Ranks whose calls are out of step find out at once, and continue together after `realign`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.processes import mpirun
from tests.ranks import run
from tests.thinning import exhaustive

several = pytest.mark.parametrize("P", [2, 3, 4, 7])


def call(transport: Any) -> list[float]:
    return sc.sparse_allreduce(
        np.ones(10, np.float32), 2, comm=transport, algorithm="butterfly", wire="plain"
    ).values.tolist()


def skip(transport: simulated.SimulatedTransport) -> None:
    """Make a call that is interrupted while its arguments are checked."""

    class Interrupting:
        def __dlpack_device__(self) -> Any:
            raise KeyboardInterrupt

        __dlpack__ = __dlpack_device__

    with pytest.raises(KeyboardInterrupt):
        sc.sparse_allreduce(Interrupting(), 2, comm=transport)


class Barrier:
    """A barrier of simulated ranks outside the library, as programs have."""

    def __init__(self) -> None:
        self.here: list[simulated.SimulatedTransport] = []

    def wait(self, transport: simulated.SimulatedTransport) -> None:
        if len(self.here) + 1 < transport.size:
            self.here.append(transport)
            transport._world.scheduler.sleep()
        else:
            here, self.here = self.here, []
            for other in here:
                transport._world.scheduler.wake(other.rank, transport.seconds)


@several
@pytest.mark.parametrize("realigned", [True, False])
def test_a_call_that_one_rank_skipped(P: int, realigned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks time out. Then all ranks make the next call."""
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")  # so that calls are counted from the first sum on
    barrier = Barrier()

    def program(transport: simulated.SimulatedTransport) -> Any:
        assert call(transport) == [P, P]
        if transport.rank == P - 1:
            skip(transport)
        else:
            with pytest.raises(sc.TransportError):
                call(transport)
        said = []
        for _ in range(2):
            barrier.wait(transport)
            if realigned:
                sc.realign(transport)
                assert [call(transport) for _ in range(3)] == 3 * [[P, P]]
            else:
                with pytest.raises(sc.CollectiveMismatchError) as caught:
                    call(transport)
                said.append(str(caught.value))
        if not realigned:
            barrier.wait(transport)
            sc.realign(transport)
            assert call(transport) == [P, P]
        return said

    for rank, said in enumerate(run(P, program)):
        for number, text in enumerate(said, 2):
            assert f"rank {P - 1} begins call {number}, which rank" in text
            assert "KeyboardInterrupt" in text
            assert "realign(comm)" in text
            assert rank == P - 1 or f"rank {rank} is in call {number + 1}" in text


@several
def test_a_rank_that_does_not_realign(P: int) -> None:
    """The next attempt is a later round on some ranks."""

    barrier = Barrier()

    def program(transport: simulated.SimulatedTransport) -> Any:
        if transport.rank < P - 1:
            with pytest.raises(sc.TimeoutError):
                sc.realign(transport)
        barrier.wait(transport)
        sc.realign(transport)
        return call(transport)

    assert run(P, program) == P * [[P, P]]


# -- real ranks -------------------------------------------------------------------------------------------------------

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
def fails(kind):
    began = time.monotonic()
    try: call()
    except kind as error: assert "realign" in str(error) or kind is sc.TransportError, error
    else: raise AssertionError
    return time.monotonic() - began
assert call() == [P, P]
os.environ["SPARSECOMM_TIMEOUT"] = "1"
skip() if rank == P - 1 else fails(sc.TransportError)
MPI.COMM_WORLD.Barrier()
os.environ["SPARSECOMM_TIMEOUT"] = "100"
assert fails(sc.CollectiveMismatchError) < 50
MPI.COMM_WORLD.Barrier()
if rank:  # rank 0 calls them out of their call
    assert fails(sc.CollectiveMismatchError) < 50
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


@pytest.mark.mpi
@pytest.mark.parametrize(("P", "group"), [(2, False), (2, True), exhaustive(4, False), exhaustive(3, True)])
def test_real_ranks(P: int, group: bool, tmp_path: Path) -> None:
    comm = GROUP.format(repr(str(tmp_path / "group"))) if group else "comm = MPI.COMM_WORLD"
    status, said = mpirun(P, "-c", ON_RANKS.replace("{comm}", comm))
    assert status == 0, said
    assert said.count("fine") == P, said
