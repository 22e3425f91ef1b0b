"""gTopKAllReduce along a tree.

Source: Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359), Algorithm 3. The original requires P = 2^j and loses rejected entries; this
version supports any P and records them.

    rank       0     1     2     3     4     5     6
    step 0    0+1 <- 1    2+3 <- 3    4+5 <- 5     6
    step 1   0..3 <------ 2+3        4..6 <------- 6
    step 2   0..6 <------------------ 4+5+6
    Then the result travels back along the same edges.

The result is approximate, because rejected entries do not reach later merges. Rank 0 computes it. The rank that merges
records rejected entries as dropped; the rank that sends, rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

Combine = Callable[[SparseVector, SparseVector], SparseVector]


def tree(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the global top-k of this rank's and all others' gradients."""
    result = reduce(comm, gradient, gradient.topk(k), reselecting(comm, gradient, k))
    return broadcast(comm, comm.round_and_record(result, gradient) if comm.rank == 0 else result, k)


def reselecting(comm: Communicator, gradient: Contribution, k: int) -> Combine:
    """Return a function that merges two vectors into their top-k and records the other entries as dropped."""

    def reselect(lower: SparseVector, upper: SparseVector) -> SparseVector:
        top, rejected = comm.backend.merge_topk(lower, upper, k)
        gradient.record_dropped(rejected)
        return top

    return reselect


def reduce(comm: Communicator, gradient: Contribution, own: SparseVector, combine: Combine) -> SparseVector:
    """Combine the vectors of all ranks: return the result on rank 0, and on other ranks the vector that they sent."""
    for step in range(_height(comm)):
        child = comm.rank + (1 << step)
        if child < comm.size:
            own = combine(own, comm.receive(child, step))
    if comm.rank > 0:
        own = comm.round_and_record(own, gradient)
        comm.send(own, _parent(comm), _height(comm))
    return own


def broadcast(comm: Communicator, own: SparseVector | None, max_entries: int | None = None) -> SparseVector:
    """Return rank 0's vector, with at most ``max_entries`` entries, on every rank. Ignores vectors of other ranks."""
    steps, height = log2_ceil(comm.size), _height(comm)
    if comm.rank > 0:
        own = comm.receive(_parent(comm), steps + height, max_entries)
    assert own is not None
    for step in reversed(range(height)):
        child = comm.rank + (1 << step)
        if child < comm.size:
            comm.send(own, child, steps + step)
    return own


def _height(comm: Communicator) -> int:
    """Return the number of steps in which this rank may have a child: the number of its trailing zero bits."""
    return ((comm.rank & -comm.rank).bit_length() - 1) if comm.rank else log2_ceil(comm.size)


def _parent(comm: Communicator) -> int:
    return comm.rank & (comm.rank - 1)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call."""
    k = problem.k
    links = [problem.link(costs, 1 << step, sharing=1) for step in range(log2_ceil(problem.P))]
    work = 2 * k * (costs.merge + problem.codec(costs))
    return costs.select * problem.n + sum(2 * (x.alpha + k * problem.entry_bytes * x.beta) + work for x in links)


ALGORITHM = Algorithm(
    name="tree",
    summary="global top-k by merging along a binomial tree, then broadcasting (gTop-k as published)",
    cost="2 log2(P) (alpha + k b beta)",
    result="at most k entries; approximate",
    source="Shi et al., ICDCS 2019, Algorithm 3",
    run=tree,
    predicted_time=predicted_time,
    bounded_result=True,
    automatic=True,
    cannot_count_contributors="merges partial sums without counting their contributors",
)
