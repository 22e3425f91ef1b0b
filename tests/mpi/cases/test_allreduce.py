"""Calls between ranks, over MPI, blocking and in the background. Every rank runs it: see `test_under_mpirun.py`."""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.transport import simulated
from sparsecomm.wire import WIRES
from tests import data
from tests.mpi.ranks import MPI, ODD, RANK, SECONDS, WORLD, P, barrier, several

ONES = np.ones(100, np.float32)


def works(comm: MPI.Intracomm = WORLD) -> None:
    result = sc.sparse_allreduce(np.array([0, 3, -1, 2], np.float32), 2, comm=comm, algorithm="butterfly")
    assert result.indices.tolist() == [1, 3]
    assert result.values.tolist() == [3 * comm.size, 2 * comm.size]


@pytest.mark.covering(2)
@pytest.mark.parametrize("algorithm", list(sc.algorithms()))
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", ["normal", "few values", "NaN and infinities", "huge range"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_real_ranks_do_what_simulated_ones_do(
    algorithm: str, wire: str, dtype: str, kind: str, op: str, comm: MPI.Intracomm
) -> None:
    """Results, residuals, outputs and traffic are equal bit for bit."""
    if dtype == "float64" and wire not in ("auto", "plain", "packed"):
        wire = "packed"

    def program(comm: Any, rank: int) -> tuple[Any, ...]:
        residual, outputs = data.gradient("normal", 3000, dtype, P + rank), []
        for step in range(2):
            x = data.gradient(kind, 3000, dtype, 2 * P * step + rank)
            out = np.empty_like(x)
            options = {"algorithm": algorithm, "wire": wire, "op": op, "residual": residual, "out": out}
            result = sc.sparse_allreduce(x, 0.03, comm=comm, **options)
            outputs += [result.size, result.values.dtype]
            outputs += [array.tobytes() for array in (result.indices, result.values, out, residual)]
        return outputs, transport.transport_of(comm).counters

    on_mpi = program(comm, RANK)
    on_simulated = simulated.run(P, lambda transport: program(transport, transport.rank), node_of_rank=[0] * P)
    assert on_mpi == on_simulated[RANK].value
    results = [outputs[:5] for outputs, _ in WORLD.allgather(on_mpi)]
    assert results == [results[0]] * P


@pytest.mark.skipif(P < 3, reason="needs a rank outside of a pair")
def test_bytes_of_a_freed_communicator_reach_no_other() -> None:
    """One rank leaves a call after the others have freed the communicator. No new one may get its identity."""
    for _ in range(2):
        comm = WORLD.Dup()
        ranks = transport.transport_of(comm)
        if RANK == P - 1:
            ranks.begin(b"call", lambda content, rank: sc.CollectiveMismatchError("not called"))
            time.sleep(0.05)
            ranks.isend(np.zeros(2_000_000, np.uint8), 0)
            ranks.abort(KeyError("on purpose"))
        comm.Free()
        if RANK < 2:
            pair = WORLD.Create_group(WORLD.group.Incl([0, 1]))
            transport.transport_of(pair)
            time.sleep(0.1)
            works(pair)
            pair.Free()
        barrier()


def resources() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes of memory": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "communicators"), [(4000, False), (200, True)])
def test_calls_and_communicators_leave_nothing_behind(count: int, communicators: bool) -> None:
    algorithms = "split", "butterfly", "allgather", "tree", "dense"
    x = np.random.default_rng(RANK).standard_normal(200).astype(np.float32)
    residual, out, before = np.zeros_like(x), np.empty_like(x), dict[str, int]()
    for i in range(count):
        if i == count // 2:
            before = resources()
        comm = WORLD.Dup() if communicators else WORLD
        options = {"algorithm": algorithms[i % 5], "wire": ("plain", "packed")[i % 2], "residual": residual}
        sc.isparse_allreduce(x, 5, comm=comm, out=out, **options).wait()
        if communicators:
            comm.Free()
    for kind, number in resources().items():
        assert number - before[kind] <= (2**20 if "bytes" in kind else 0), kind


# -- calls in the background ------------------------------------------------------------------------------------------


@several
@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="needs MPI_THREAD_MULTIPLE")
def test_two_communicators_go_on_independently(comm: MPI.Intracomm) -> None:
    other = WORLD.Dup()
    for communicator in (comm, other):
        sc.sparse_allreduce(ONES, 3, comm=communicator)
    first = None if RANK == ODD else sc.isparse_allreduce(ONES, 3, comm=comm)
    for _ in range(5):  # one rank has not yet made the call on the first communicator
        assert sc.isparse_allreduce(ONES, 3, comm=other).wait(SECONDS).nnz == 3
    first = first or sc.isparse_allreduce(ONES, 3, comm=comm)
    assert first.wait(SECONDS).nnz == 3
    barrier()
    other.Free()


@several
def test_freeing_a_communicator_waits_for_its_calls() -> None:
    private = WORLD.Dup()
    works(private)
    x = np.full(100_000, RANK + 1, np.float32)
    handles = [sc.isparse_allreduce(x, 1000, comm=private, algorithm="tree") for _ in range(5)]
    private.Free()
    assert all(handle.test() for handle in handles)
    assert {float(handle.wait().values.sum()) for handle in handles} == {1000 * P * (P + 1) / 2}
    with pytest.raises(sc.InvalidInputError):
        sc.isparse_allreduce(x, 1000, comm=private)
