"""Who takes back what the result does not hold.

The rule: what a rank selected goes back to it, whole, where the result has no entry. What was dropped where it has one
stays with the rank that dropped it.
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
from sparsecomm.wire import WIRES
from tests import data, reference
from tests.ranks import nodes_of
from tests.ranks import run as on_ranks
from tests.thinning import exhaustive

RANKS = [*range(1, 18)]
MORE = [exhaustive(31), exhaustive(32), exhaustive(33)]
TAKING_BACK = [
    *(name for name, algorithm in ALGORITHMS.items() if algorithm.bounded_result and algorithm.rejects),
    "hierarchical:tree",
    "split:2",
]

every_size = pytest.mark.parametrize("P", [*RANKS, *MORE])
check = settings(max_examples=6)


class Rank(NamedTuple):
    """What a rank ends with."""

    result: sc.SparseVector
    residual: np.ndarray
    before: np.ndarray  # residual + x, as it is stored
    selected: np.ndarray  # indices
    dropped: list[tuple[np.ndarray, np.ndarray]]  # entries


def reduced(xs: list[np.ndarray], residuals: list[np.ndarray], k: int, nodes: list[int], **options: Any) -> list[Rank]:
    """Make a call on simulated ranks whose contributions note what goes through them."""
    noted: list[Contribution] = []
    init = Contribution.__init__

    def program(transport: simulated.SimulatedTransport) -> Rank:
        x, residual = xs[transport.rank], residuals[transport.rank].copy()
        before = (reference.widened(residual) + reference.widened(x)).astype(residual.dtype)
        result = sc.sparse_allreduce(x, k, comm=transport, residual=residual, **options)
        (gradient,) = [its for its in noted if its._residual is not None and its._residual.owner is residual]
        selected = np.zeros(0, np.int32) if gradient.taken is None else gradient.taken.indices
        dropped = [(np.array(e.indices), np.array(e.values)) for e in gradient._dropped]
        return Rank(result, residual, before, selected, dropped)

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
    """The result, every rank's residual, and the sum over ranks of what was dropped where the result has entries.

    ``accumulated``: residual + x of every rank, whole numbers. The residuals are without what was dropped. If
    nothing is rejected, the result has every index, also where its sum is zero.
    """
    dense = reference.dense
    selected = [dense(reference.topk(v, k), v.size) for v in accumulated]
    result = dense(reference.allreduce(name, accumulated, k, nodes_of(len(accumulated))), accumulated[0].size)
    inside = result != 0 if ALGORITHMS[name].rejects else np.ones_like(result, bool)
    residuals = [v - np.where(inside, its, 0) for v, its in zip(accumulated, selected, strict=True)]
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
        result, kept, lost = residuals_by_the_rule(algorithm, accumulated, k)
        ranks = reduced(xs, residuals, k, nodes_of(P), algorithm=algorithm, wire="plain")
        np.testing.assert_array_equal(ranks[0].result.to_dense(), result)
        held_back = sum(rank.residual - its for rank, its in zip(ranks, kept, strict=True))
        np.testing.assert_array_equal(held_back, lost)
        for rank, its in zip(ranks, kept, strict=True):
            own = np.zeros(n, rank.residual.dtype)  # of what it has dropped, what stands where the result has entries
            for indices, values in rank.dropped:
                own[indices] += values
            own[result == 0] = 0  # allgather drops nothing
            np.testing.assert_array_equal(rank.residual, its + own)
        if algorithm in ("split", "allgather"):
            assert not lost.any()

    run()


# -- outside the result -----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@every_size
@pytest.mark.parametrize("algorithm", TAKING_BACK)
@pytest.mark.parametrize("wire", WIRES)
def test_outside_the_result_every_rank_has_all_that_it_had(algorithm: str, P: int, wire: str) -> None:
    """Whatever the numbers: exactly residual + x, of what the rank selected and of what it did not."""
    for dtype, residual_dtype in (("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")):
        for kind, seed in (("normal", 1), ("few values", 2), ("huge range", 3)):
            if kind == "huge range" and dtype == "float16":
                continue
            xs = [data.gradient(kind, 300, dtype, 10 * seed + rank) for rank in range(P)]
            residuals = [data.gradient(kind, 300, residual_dtype, 1000 * seed + rank) for rank in range(P)]
            for k in (1, 20, 150):
                ranks = reduced(xs, residuals, k, nodes_of(P), algorithm=algorithm, wire=wire)
                outside = np.ones(300, bool)
                outside[ranks[0].result.indices] = False
                for rank in ranks:
                    assert data.same_bits(rank.residual[outside], rank.before[outside])


@pytest.mark.covering(1)
@every_size
@pytest.mark.parametrize("wire", WIRES)
def test_owners_keep_what_is_not_among_the_first(P: int, wire: str) -> None:
    """With double: who sends has what it did not send, and what rounding took; who owns has the other sums as well."""

    @check
    @given(st.integers(16, 400), data.seeds, st.floats(0.05, 1))
    def run(n: int, seed: int, density: float) -> None:
        k = max(1, round(density * n))
        xs = [data.integers(n, "float32", seed + rank) for rank in range(P)]
        residuals = [data.integers(n, "float32", seed + P + rank, 3) for rank in range(P)]
        ranks = reduced(xs, residuals, k, [0] * P, algorithm="double", wire=wire)
        owners = min(P, max(1, k // 16))
        total = np.zeros(n, np.float32)
        for rank, its in enumerate(ranks):
            sent = np.zeros(n, np.float32)
            sent[its.selected] = its.before[its.selected]
            for owner in range(owners):
                own = slice(n * owner // owners, n * (owner + 1) // owners)
                count = k * (owner + 1) // owners - k * owner // owners
                if rank == owner:
                    total[own] += its.before[own]
                    assert P == 1 or not sent[own].any()
                    continue
                np.testing.assert_array_equal(
                    sent[own], reference.dense(reference.topk(its.before[own], count), own.stop - own.start)
                )
                left = its.before[own] - sent[own]
                rounding = its.residual[own] - left
                assert not rounding[sent[own] == 0].any()
                total[own] += sent[own] - rounding
        for owner in range(owners):
            own = slice(n * owner // owners, n * (owner + 1) // owners)
            result = ranks[0].result.to_dense()[own]
            np.testing.assert_array_equal(ranks[owner].residual[own], total[own] - result)
        conserves(ranks)

    run()


def test_the_rule_is_about_something() -> None:
    """In the test above ranks take entries back, and keep some of what they dropped."""
    xs = [data.gradient("normal", 300, "float32", rank) for rank in range(8)]
    ranks = reduced(xs, [np.zeros(300, np.float32)] * 8, 20, [0] * 8, algorithm="butterfly")
    result = ranks[0].result.indices
    assert all(len(np.setdiff1d(rank.selected, result)) > 3 for rank in ranks)
    assert any(np.isin(indices, result).any() for rank in ranks for indices, _ in rank.dropped)


# -- the two cases that leak in the code of gTop-k's authors ----------------------------------------------------------


def apart(P: int, n: int) -> list[np.ndarray]:
    """Gradients of which each rank selects two entries of its own: large where the rank's number is."""
    xs = [np.zeros(n, np.float32) for _ in range(P)]
    for rank, x in enumerate(xs):
        x[[10 + 2 * rank, 11 + 2 * rank]] = 100 + 10 * rank, 101 + 10 * rank
    return xs


def merging(P: int, nodes: list[int]) -> list[str]:
    return ["tree", "butterfly", "hierarchical", "hierarchical:tree"] if len(set(nodes)) > 1 else ["tree", "butterfly"]


@pytest.mark.parametrize("P", [4, 8])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("noise", range(4))
@pytest.mark.parametrize("nodes", ["one", "two"])
def test_an_index_dropped_in_one_subtree_that_survives_by_another(P: int, k: int, noise: int, nodes: str) -> None:
    """Ranks 0 and 1 merge first, and index 0 loses there; the last rank brings it into the result."""
    xs = [data.integers(60, "float32", 100 * noise + rank, 3) for rank in range(P)] if noise else apart(P, 60)
    for x in xs:
        x[:3] = 0
    xs[0][0], xs[1][1:3] = 900, (1000, 1001)  # index 0 is in no top-k of ranks 0 and 1 together
    xs[-1][0] = 5000
    node_of_rank = [rank // (P // 2) for rank in range(P)] if nodes == "two" else [0] * P
    for algorithm in merging(P, node_of_rank):
        residuals = [np.zeros(60, np.float32) for _ in range(P)]
        ranks = reduced(xs, residuals, k, node_of_rank, algorithm=algorithm, wire="plain")
        assert ranks[0].result.to_dense()[0] == 5000
        dropped = [values[indices == 0] for rank in ranks for indices, values in rank.dropped if 0 in indices]
        assert dropped == [900], algorithm  # the case is there
        assert sum(rank.residual[0] for rank in ranks) == 900
        conserves(ranks)


# -- algorithms of users ----------------------------------------------------------------------------------------------


def careless(comm: Communicator, gradient: Contribution, k: int) -> sc.SparseVector:
    """Return half of what the tree finds, and say nothing of the other half."""
    found = ALGORITHMS["tree"].run(comm, gradient, k)
    return found.part(0, found.nnz // 2)


@pytest.mark.parametrize("P", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["careless", "hierarchical:careless"])
def test_what_an_algorithm_leaves_out_of_its_result_goes_back(P: int, name: str) -> None:
    ALGORITHMS["careless"] = Algorithm("careless", "", "", "", "", careless, ALGORITHMS["tree"].predicted_time)
    try:
        xs = [data.integers(200, "float32", rank) for rank in range(P)]
        residuals = [data.integers(200, "float32", P + rank) for rank in range(P)]
        conserves(reduced(xs, residuals, 30, nodes_of(P), algorithm=name))
    finally:
        del ALGORITHMS["careless"]
