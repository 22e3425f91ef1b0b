"""Calls in the background between ranks, over MPI. Every rank runs this file: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import transport
from tests import data
from tests.mpi.ranks import MPI, ODD, RANK, SECONDS, WORLD, P, several
from tests.processes import interrupt_a_wait


def bits(result: sc.SparseVector, *arrays: np.ndarray) -> list[bytes]:
    return [a.tobytes() for a in (result.indices, result.values, *arrays)]


@pytest.mark.parametrize("algorithm", list(sc.algorithms()))
@pytest.mark.parametrize(("dtype", "wire"), [("float32", "packed_int8"), ("bfloat16", "plain"), ("float64", "packed")])
def test_results_are_those_of_sparse_allreduce(algorithm: str, dtype: str, wire: str, comm: MPI.Intracomm) -> None:
    found: list[list[list[bytes]]] = []
    # The first call of `split` has ranges of its own, by which narrow values are rounded together.
    for call in (sc.sparse_allreduce, sc.sparse_allreduce, sc.isparse_allreduce):
        made = []
        for layer, n in enumerate((2000, 50, 777)):
            x = data.gradient("normal", n, dtype, 10 * layer + RANK)
            residual, out = data.gradient("normal", n, dtype, 99 + RANK), np.empty_like(x)
            options: dict[str, Any] = {"algorithm": algorithm, "wire": wire, "residual": residual, "out": out}
            made.append((call(x, 20, comm=comm, label=f"layer {layer}", **options), x, residual, out))
        found.append([bits(getattr(m, "wait", lambda m=m: m)(), *arrays) for m, *arrays in reversed(made)])
    assert found[1] == found[2]
    assert len({str(made[0][:2]) for made in WORLD.allgather(found[0])}) == 1


def test_calls_of_both_kinds_keep_the_order_of_the_program(comm: MPI.Intracomm) -> None:
    under_way = []
    for i in range(60):
        x = np.full(100, i + 1.0, np.float32)
        if (i * 7 + RANK) % 3:  # which kind it is may differ between ranks
            under_way.append((i, sc.isparse_allreduce(x, 2, comm=comm, label=str(i))))
        else:
            assert sc.sparse_allreduce(x, 2, comm=comm, label=str(i)).values.tolist() == [(i + 1) * P] * 2
    for i, handle in under_way:
        assert handle.wait(SECONDS).values.tolist() == [(i + 1) * P] * 2


@several
@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="needs MPI_THREAD_MULTIPLE")
def test_two_communicators_go_on_independently(comm: MPI.Intracomm) -> None:
    other = WORLD.Dup()
    sc.sparse_allreduce(np.ones(9, np.float32), 3, comm=comm)
    sc.sparse_allreduce(np.ones(9, np.float32), 3, comm=other)
    first = None if RANK == ODD else sc.isparse_allreduce(np.ones(9, np.float32), 3, comm=comm)
    for _ in range(5):  # while one rank has not made the call on the first one
        assert sc.isparse_allreduce(np.ones(9, np.float32), 3, comm=other).wait(SECONDS).nnz == 3
    if first is None:
        first = sc.isparse_allreduce(np.ones(9, np.float32), 3, comm=comm)
    assert first.wait(SECONDS).nnz == 3
    WORLD.Barrier()
    other.Free()


@several
def test_an_interrupt_of_the_wait_does_not_harm_the_call(comm: MPI.Intracomm) -> None:
    if not transport.transport_of(comm).threaded:
        pytest.skip("without a thread it is an interrupt of the call")
    x, residual = np.arange(9, dtype=np.float32), np.zeros(9, np.float32)
    if RANK == ODD:
        WORLD.Barrier()
    handle = sc.isparse_allreduce(x, 3, comm=comm, residual=residual)
    if RANK != ODD:
        interrupt_a_wait()
        with pytest.raises(KeyboardInterrupt):
            handle.wait(SECONDS)
        WORLD.Barrier()
    assert handle.wait(SECONDS).values.tolist() == [6 * P, 7 * P, 8 * P]
    np.testing.assert_array_equal(residual[6:], 0)


@several
@pytest.mark.parametrize("algorithm", ["butterfly", "dense", "split"])
def test_after_a_timeout_calls_under_way_are_left_on_all_ranks(
    algorithm: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sc.sparse_allreduce(np.ones(9, np.float32), 3, comm=comm)
    began = time.monotonic()
    x, residuals = np.ones(9, np.float32), [np.ones(9, np.float32) for _ in range(3)]
    if RANK != ODD:
        monkeypatch.setenv("SPARSECOMM_TIMEOUT", "0.3")
        under_way = [sc.isparse_allreduce(x, 3, comm=comm, residual=r, algorithm=algorithm) for r in residuals]
        for handle in under_way:
            with pytest.raises(sc.TransportError, match=r"waited 0.3 s|left call|did not make this call"):
                handle.wait(SECONDS)
        for residual in residuals:
            np.testing.assert_array_equal(residual, 2)
    WORLD.Barrier()
    if RANK == ODD:  # too late
        for residual in residuals:
            with pytest.raises(sc.TransportError, match="left call"):
                sc.sparse_allreduce(x, 3, comm=comm, residual=residual, algorithm=algorithm)
            np.testing.assert_array_equal(residual, 2)
    monkeypatch.delenv("SPARSECOMM_TIMEOUT", raising=False)
    assert sc.sparse_allreduce(x, 3, comm=comm).values.tolist() == [P] * 3
    assert time.monotonic() - began < SECONDS


@several
def test_other_labels_do_not_match(comm: MPI.Intracomm) -> None:
    names = ("conv1", "conv2") if RANK == ODD else ("conv2", "conv1")
    under_way = [sc.isparse_allreduce(np.ones(9, np.float32), 3, comm=comm, label=name) for name in names]
    for handle in under_way:
        with pytest.raises(sc.CollectiveMismatchError, match=r"differ in label|left call"):
            handle.wait(SECONDS)
    assert sc.isparse_allreduce(np.ones(9, np.float32), 3, comm=comm).wait(SECONDS).nnz == 3


@several
def test_freeing_a_communicator_waits_for_its_calls() -> None:
    private = WORLD.Dup()
    sc.sparse_allreduce(np.ones(9, np.float32), 3, comm=private)
    x = np.full(100_000, RANK + 1, np.float32)
    handles = [sc.isparse_allreduce(x, 1000, comm=private, algorithm="tree") for _ in range(5)]
    private.Free()
    assert all(handle.test() for handle in handles)
    assert {float(handle.wait().values.sum()) for handle in handles} == {1000 * P * (P + 1) / 2}
    with pytest.raises(sc.InvalidInputError):
        sc.isparse_allreduce(x, 1000, comm=private)
