"""Algorithms that users register."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.transport import simulated
from sparsecomm.tuning import choice
from tests import data
from tests.ranks import run


def chain(comm: Communicator, gradient: Contribution, k: int) -> sc.SparseVector:
    """Return the sum of all ranks' top-k: rank 0 sends to rank 1, and so on, and the last one sends it back."""
    mine, last = gradient.topk(k), comm.size - 1
    if comm.rank:
        mine = comm.backend.merge(comm.receive(comm.rank - 1, 0), mine)
    if comm.rank < last:
        comm.send(mine, comm.rank + 1, 0)
        mine = comm.receive(comm.rank + 1, 1)
    if comm.rank:
        comm.send(mine, comm.rank - 1, 1)
    return mine


def predicted_time(problem: Problem, costs: Costs) -> float:
    return 2 * problem.P * costs.link.alpha


CHAIN = sc.Algorithm("chain", "a chain", "2 P alpha", "the exact sum", "none", chain, predicted_time)


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = set(ALGORITHMS)
    yield
    for name in set(ALGORITHMS) - before:
        del ALGORITHMS[name]
    choice._candidates.cache_clear()


def summed(P: int, name: str, **options: object) -> tuple[list[np.ndarray], np.ndarray]:
    """Return every rank's dense result and the sum of the gradients; no two ranks have an index in common."""
    xs = [np.where(np.arange(60) % P == rank, data.integers(60, "float32", rank), 0) for rank in range(P)]

    def program(transport: simulated.SimulatedTransport) -> np.ndarray:
        return sc.sparse_allreduce(xs[transport.rank], 60, comm=transport, algorithm=name, **options).to_dense()

    return run(P, program, [rank // 2 for rank in range(P)]), np.sum(xs, axis=0)


def candidates(P: int) -> list[str]:
    """Return the algorithms that "auto" chooses from, the fastest first."""
    explained = run(P, lambda transport: sc.explain(10**6, 0.01, comm=transport), range(P))
    return [candidate.algorithm.name for candidate in explained[0].candidates]


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("name", ["chain", "hierarchical:chain"])
@pytest.mark.parametrize("wire", ["auto", "plain"])
def test_an_algorithm_of_a_user_runs_by_its_name(P: int, name: str, wire: str) -> None:
    sc.register_algorithm(CHAIN)
    assert sc.algorithms()["chain"] is CHAIN
    results, total = summed(P, name, wire=wire)
    for result in results:
        np.testing.assert_array_equal(result, total)


@pytest.mark.parametrize("automatic", [False, True])
def test_auto_chooses_an_automatic_algorithm(automatic: bool) -> None:
    assert "chain" not in candidates(2)
    sc.register_algorithm(replace(CHAIN, automatic=automatic))
    assert (candidates(2)[0] == "chain") == automatic


@pytest.mark.parametrize("wire", ["auto", "plain"])
def test_an_unsupported_problem_is_refused_and_auto_chooses_another(wire: str) -> None:
    def odd(problem: Problem) -> str:
        return "needs an even number of ranks" if problem.P % 2 else ""

    sc.register_algorithm(replace(CHAIN, automatic=True, unsupported=odd))
    assert len(summed(2, "chain", wire=wire)[0]) == 2
    with pytest.raises(sc.InvalidInputError, match="algorithm='chain' needs an even number of ranks; choose another"):
        summed(3, "chain", wire=wire)
    assert "chain" not in candidates(3)


def test_counting_contributors_must_be_declared() -> None:
    sc.register_algorithm(replace(CHAIN, automatic=True))
    with pytest.raises(sc.InvalidInputError, match="does not declare that it counts contributors"):
        summed(2, "chain", op="mean_of_contributors")
    assert len(summed(2, "auto", op="mean_of_contributors")[0]) == 2


@pytest.mark.parametrize("name", ["butterfly", "auto", "", "a:b", "grün", 7, "two\nlines"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(sc.InvalidInputError, match="name"):
        sc.register_algorithm(replace(CHAIN, name=name))
    assert "chain" not in sc.algorithms()


def test_a_function_is_refused() -> None:
    with pytest.raises(sc.InvalidInputError, match=r"got function; expected a sparsecomm\.Algorithm"):
        sc.register_algorithm(chain)  # type: ignore[arg-type]
