"""`sparse_allreduce` between ranks, over MPI. Every rank runs this file: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from tests.processes import interrupt_a_wait

ALGORITHMS = list(sc.algorithms())
SOME = ["dense", "allgather", "tree", "butterfly", "split", "hierarchical"]  # of which every pair meets

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def everyones(value: Any) -> list[Any]:
    return WORLD.allgather(value)


def bits(result: sc.SparseVector) -> tuple[Any, ...]:
    return result.size, result.indices.tobytes(), result.values.dtype, result.values.tobytes()


def works(comm: MPI.Intracomm = WORLD) -> None:
    """A call whose result is known."""
    result = sc.sparse_allreduce(np.array([0, 3, -1, 2], np.float32), 2, comm=comm, algorithm="butterfly")
    assert result.indices.tolist() == [1, 3]
    assert result.values.tolist() == [3 * comm.size, 2 * comm.size]


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@every_algorithm
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", ["normal", "few values", "NaN and infinities", "huge range"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_real_ranks_do_what_simulated_ones_do(
    algorithm: str, wire: str, dtype: str, kind: str, op: str, comm: MPI.Intracomm
) -> None:
    """To the bit, in all that they return, keep and write, and in their traffic. So they keep the promises, too."""
    if dtype == "float64" and wire not in ("auto", "plain", "packed"):
        wire = "packed"

    def program(comm: Any, rank: int) -> tuple[Any, ...]:
        residual, found = data.gradient("normal", 3000, dtype, P + rank), []
        for step in range(2):
            x = data.gradient(kind, 3000, dtype, 2 * P * step + rank)
            out = np.empty_like(x)
            options = {"algorithm": algorithm, "wire": wire, "op": op, "residual": residual, "out": out}
            result = sc.sparse_allreduce(x, 0.03, comm=comm, **options)
            found += [*bits(result), residual.tobytes(), out.tobytes()]
        return found, transport.transport_of(comm).counters

    ours = program(comm, RANK)
    assert (
        ours == simulated.run(P, lambda transport: program(transport, transport.rank), node_of_rank=[0] * P)[RANK].value
    )
    results = [found[:4] for found, _ in everyones(ours)]
    assert results == [results[0]] * P


@several
def test_links_are_measured_at_the_first_call(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What "auto" makes of them depends on what else runs: it is the same on all ranks, and loses nothing."""
    monkeypatch.delenv("SPARSECOMM_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, residual = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    result = sc.sparse_allreduce(x, 3, comm=comm, residual=residual)
    assert len(set(everyones(bits(result)))) == 1
    total = sum(everyones(residual))
    total[result.indices] += result.values
    np.testing.assert_array_equal(total, P * x)
    (source,) = set(everyones(sc.explain(100, 3, comm=comm).source))
    assert source.startswith("measured at set-up: ")


# -- communicators ----------------------------------------------------------------------------------------------------


@every_algorithm
def test_parts_of_the_world_in_another_order(algorithm: str) -> None:
    half = WORLD.Split(RANK % 2, -RANK)
    xs = [data.gradient("normal", 700, "float32", rank) for rank in half.allgather(RANK)]
    for _ in range(3):
        result = sc.sparse_allreduce(xs[half.rank], 30, comm=half, algorithm=algorithm)
        theirs = simulated.run(
            half.size,
            lambda transport: sc.sparse_allreduce(xs[transport.rank], 30, comm=transport, algorithm=algorithm),
            node_of_rank=[0] * half.size,
        )
        assert bits(result) == bits(theirs[half.rank].value)
    half.Free()


def test_communicators_interleaved(comm: MPI.Intracomm) -> None:
    half = WORLD.Split(RANK % 2)
    for i in range(20):
        for c in (comm, half, WORLD) if i % 2 else (WORLD, comm, half):
            result = sc.sparse_allreduce(np.full(10, i + 1.0, np.float32), 3, comm=c, algorithm=SOME[i % 4 + 1])
            assert result.values.tolist() == [(i + 1) * c.size] * 3
    half.Free()


def test_comm_self() -> None:
    x = data.gradient("normal", 500, "float32", RANK)
    assert bits(sc.sparse_allreduce(x, 20, comm=MPI.COMM_SELF)) == bits(sc.topk(x, 20))


@pytest.mark.skipif(P < 3, reason="needs a rank outside of a pair")
def test_bytes_of_a_freed_communicator_reach_no_other() -> None:
    """One rank leaves a call when the others have freed theirs: the identity must not go to a new one."""
    for _ in range(2):
        comm = WORLD.Dup()
        ranks = transport.transport_of(comm)
        if RANK == P - 1:
            ranks.begin(b"call", lambda theirs, rank: sc.CollectiveMismatchError("not called"))
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


# -- ranks that do not agree ------------------------------------------------------------------------------------------

ONES = np.ones(100, np.float32)
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n": ({}, {"x": np.ones(101, np.float32)}),
    "k": ({}, {"k": 6}),
    "dtype": ({}, {"x": np.ones(100)}),
    "op": ({}, {"op": "mean"}),
    "wire": ({"wire": "plain"}, {"wire": "packed_int8"}),
} | {
    f"algorithm: {ours}, {theirs}": ({"algorithm": ours}, {"algorithm": theirs})
    for ours in SOME
    for theirs in SOME
    if ours != theirs
}


@several
@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("odd", [0, P - 1])
def test_ranks_that_disagree_all_raise_and_keep_their_gradient(difference: str, odd: int) -> None:
    began = time.monotonic()
    for algorithm in SOME if ":" not in difference else SOME[:1]:
        call = {"x": ONES, "k": 5, "algorithm": algorithm} | DIFFERENCES[difference][odd == RANK]
        residual = np.arange(call["x"].size).astype(call["x"].dtype)
        with pytest.raises(sc.CollectiveMismatchError) as caught:
            sc.sparse_allreduce(**call, residual=residual)
        np.testing.assert_array_equal(residual, np.arange(residual.size) + 1)
        found = [f"calls differ in {difference.split(':')[0]}" in text for text in everyones(str(caught.value))]
        assert any(found), caught.value
        works()
    assert time.monotonic() - began < SECONDS  # not the 300 s of the timeout


@several
@every_algorithm
def test_another_order_of_calls(algorithm: str) -> None:
    for n in (10, 20) if RANK == ODD else (20, 10):
        with pytest.raises(sc.CollectiveMismatchError):
            sc.sparse_allreduce(np.ones(n, np.float32), 3, algorithm=algorithm)
    works()


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"x": np.ones(3, int)}, {"algorithm": "best"}, {"op": "max"}, {"residual": np.ones(99)}]
)
def test_a_refused_argument_names_its_rank_and_disturbs_nobody(wrong: dict[str, Any]) -> None:
    if RANK == ODD:
        with pytest.raises(sc.InvalidInputError, match=f"^rank {ODD}: "):
            sc.sparse_allreduce(**{"x": ONES, "k": 5} | wrong)
    works()


def outcome(function: Callable[[], Any]) -> BaseException | None:
    try:
        function()
    except (sc.SparseCommError, KeyboardInterrupt) as error:
        return error
    return None


@several
@every_algorithm
def test_a_rank_that_never_calls(algorithm: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    works(comm)
    error, residual = None, ONES.copy()
    if RANK != ODD:
        monkeypatch.setenv("SPARSECOMM_TIMEOUT", "0.2")
        error = outcome(lambda: sc.sparse_allreduce(ONES, 5, comm=comm, algorithm=algorithm, residual=residual))
        monkeypatch.delenv("SPARSECOMM_TIMEOUT")
        assert isinstance(error, sc.TransportError)  # its own timeout, or news of another rank's
        assert "waited 0.2 s for rank" in str(error)
        np.testing.assert_array_equal(residual, 2 * ONES)
    errors = everyones(error)
    assert any(isinstance(e, sc.TimeoutError) for e in errors)
    if P == 2:
        assert f"waited 0.2 s for rank {ODD}" in str(errors[1 - ODD])
    if RANK == ODD:  # too late
        with pytest.raises(sc.TransportError, match=r"rank \d left call 2"):
            works(comm)
    works(comm)


@several
@pytest.mark.parametrize("algorithm", ["dense", "butterfly"])
def test_ctrl_c_in_a_wait(algorithm: str, comm: MPI.Intracomm) -> None:
    works(comm)
    residual = ONES.copy()
    began = time.monotonic()
    if RANK == ODD:
        interrupt_a_wait()
    if RANK == 0:  # for which all others wait
        WORLD.recv(source=ODD)
    error = outcome(lambda: sc.sparse_allreduce(ONES, 5, comm=comm, algorithm=algorithm, residual=residual))
    if RANK == ODD:
        WORLD.send(None, 0)
    assert time.monotonic() - began < SECONDS  # not the 300 s of the timeout
    if RANK == ODD:
        assert isinstance(error, KeyboardInterrupt)
    else:
        assert type(error) is sc.TransportError
        assert f"rank {ODD} left call 2" in str(error)
        assert "KeyboardInterrupt" in str(error)
    np.testing.assert_array_equal(residual, 2 * ONES)
    works(comm)
