"""Which rank's residual gets the values that are not in the result.

The rule: at an index without an entry in the result, each rank takes back all that it selected. At an index with an
entry, a dropped sum stays with the rank that dropped it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms import ALGORITHMS, Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.transport import simulated
from tests import data, reference
from tests.ranks import nodes_of
from tests.ranks import run as on_ranks

RANKS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17]
every_size = pytest.mark.parametrize("P", RANKS)
check = settings(max_examples=6)


class Rank(NamedTuple):
    """The state of a rank after a call."""

    result: sc.SparseVector
    residual: np.ndarray
    before: np.ndarray  # residual + x, as it is stored
    dropped: list[tuple[np.ndarray, np.ndarray]]  # entries


def reduced(xs: list[np.ndarray], residuals: list[np.ndarray], k: int, nodes: list[int], **options: Any) -> list[Rank]:
    """Make a call on simulated ranks and record what their contributions dropped."""
    noted: list[Contribution] = []
    init = Contribution.__init__

    def program(transport: simulated.SimulatedTransport) -> Rank:
        x, residual = xs[transport.rank], residuals[transport.rank].copy()
        before = (reference.widened(residual) + reference.widened(x)).astype(residual.dtype)
        result = sc.sparse_allreduce(x, k, comm=transport, residual=residual, **options)
        (gradient,) = [
            contribution
            for contribution in noted
            if contribution._residual is not None and contribution._residual.owner is residual
        ]
        dropped = [(np.array(e.indices), np.array(e.values)) for e in gradient._dropped]
        return Rank(result, residual, before, dropped)

    def noting(self: Contribution, *arguments: Any) -> None:
        init(self, *arguments)
        noted.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contribution, "__init__", noting)
        return on_ranks(len(xs), program, nodes)


def conserves(ranks: list[Rank]) -> None:
    total = sum(rank.residual.astype(np.float64) for rank in ranks) + ranks[0].result.to_dense()
    np.testing.assert_array_equal(total, sum(rank.before.astype(np.float64) for rank in ranks))


# -- the oracle -------------------------------------------------------------------------------------------------------


def residuals_by_the_rule(
    name: str, accumulated: list[np.ndarray], k: int
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Return the result, every rank's residual without dropped sums, and the total of the dropped sums.

    ``accumulated``: residual + x of every rank, integers. If the algorithm rejects nothing, every index counts as an
    index of the result.
    """
    dense = reference.dense
    selected = [dense(reference.topk(v, k), v.size) for v in accumulated]
    result = dense(reference.allreduce(name, accumulated, k, nodes_of(len(accumulated))), accumulated[0].size)
    inside = result != 0 if ALGORITHMS[name].rejects else np.ones_like(result, bool)
    residuals = [v - np.where(inside, sent, 0) for v, sent in zip(accumulated, selected, strict=True)]
    return result, residuals, np.where(inside, sum(selected) - result, 0)


@every_size
@pytest.mark.parametrize("algorithm", ["tree", "butterfly", "split", "allgather"])
def test_residuals_are_those_of_the_rule(algorithm: str, P: int) -> None:
    @check
    @given(st.data(), st.integers(1, 300), data.seeds, st.sampled_from(["float32", "float64"]))
    def run(draw: st.DataObject, n: int, seed: int, dtype: str) -> None:
        k = draw.draw(data.counts(n))
        xs = [data.integers(n, dtype, seed + rank) for rank in range(P)]
        residuals = [data.integers(n, dtype, seed + P + rank, 3) for rank in range(P)]
        accumulated = [r + x for r, x in zip(residuals, xs, strict=True)]
        result, expected, dropped = residuals_by_the_rule(algorithm, accumulated, k)
        ranks = reduced(xs, residuals, k, nodes_of(P), algorithm=algorithm, wire="plain")
        np.testing.assert_array_equal(ranks[0].result.to_dense(), result)
        more = sum(rank.residual - residual for rank, residual in zip(ranks, expected, strict=True))
        np.testing.assert_array_equal(more, dropped)
        for rank, residual in zip(ranks, expected, strict=True):
            own = np.zeros(n, rank.residual.dtype)  # the sums that this rank dropped at indices of the result
            for indices, values in rank.dropped:
                own[indices] += values
            own[result == 0] = 0
            np.testing.assert_array_equal(rank.residual, residual + own)
        if algorithm in ("split", "allgather"):
            assert not dropped.any()

    run()


@every_size
def test_owners_keep_the_sums_that_are_not_in_the_result(P: int) -> None:
    """With double, a sender keeps the values that it did not send, and an owner the sums that lost in its range."""

    @check
    @given(st.integers(16, 400), data.seeds, st.floats(0.05, 1))
    def run(n: int, seed: int, density: float) -> None:
        k = max(1, round(density * n))
        xs = [data.integers(n, "float32", seed + rank) for rank in range(P)]
        residuals = [data.integers(n, "float32", seed + P + rank, 3) for rank in range(P)]
        ranks = reduced(xs, residuals, k, [0] * P, algorithm="double", wire="plain")
        owners = min(P, max(1, k // 16))
        for owner in range(owners):
            own = slice(n * owner // owners, n * (owner + 1) // owners)
            count = k * (owner + 1) // owners - k * owner // owners
            total = ranks[owner].before[own].copy()
            for rank in (rank for i, rank in enumerate(ranks) if i != owner):
                sent = reference.dense(reference.topk(rank.before[own], count), own.stop - own.start)
                np.testing.assert_array_equal(rank.residual[own], rank.before[own] - sent)
                total += sent
            result = ranks[0].result.to_dense()[own]
            np.testing.assert_array_equal(ranks[owner].residual[own], total - result)

    run()


# -- the case that leaks in the code of gTop-k's authors --------------------------------------------------------------


@pytest.mark.parametrize("P", [4, 8])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", ["tree", "butterfly", "hierarchical", "hierarchical:tree"])
def test_an_index_dropped_in_one_subtree_that_survives_by_another(P: int, k: int, seed: int, algorithm: str) -> None:
    """Ranks 0 and 1 merge first, and index 0 loses there; the last rank brings it into the result."""
    xs = [data.integers(60, "float32", 100 * seed + rank, 3) for rank in range(P)]
    for x in xs:
        x[:3] = 0
    xs[0][0], xs[1][1:3] = 900, (1000, 1001)  # index 0 is in no top-k of ranks 0 and 1 together
    xs[-1][0] = 5000
    nodes = [rank // (P // 2) for rank in range(P)]
    residuals = [np.zeros(60, np.float32) for _ in range(P)]
    ranks = reduced(xs, residuals, k, nodes, algorithm=algorithm, wire="plain")
    assert ranks[0].result.to_dense()[0] == 5000
    assert [values[indices == 0] for rank in ranks for indices, values in rank.dropped if 0 in indices] == [900]
    assert sum(rank.residual[0] for rank in ranks) == 900
    conserves(ranks)


# -- algorithms of users ----------------------------------------------------------------------------------------------


def careless(comm: Communicator, gradient: Contribution, k: int) -> sc.SparseVector:
    """Return half of the tree's result without recording the other half as dropped."""
    total = ALGORITHMS["tree"].run(comm, gradient, k)
    return total.part(0, total.nnz // 2)


@pytest.mark.parametrize("P", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["careless", "hierarchical:careless"])
def test_entries_that_an_algorithm_loses_go_back_to_the_residual(P: int, name: str) -> None:
    ALGORITHMS["careless"] = Algorithm("careless", "", "", "", "", careless, ALGORITHMS["tree"].predicted_time)
    try:
        xs = [data.integers(200, "float32", rank) for rank in range(P)]
        residuals = [data.integers(200, "float32", P + rank) for rank in range(P)]
        conserves(reduced(xs, residuals, 30, nodes_of(P), algorithm=name))
    finally:
        del ALGORITHMS["careless"]
