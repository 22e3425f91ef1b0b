"""gTopKAllReduce along a tree.

Source: Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359), Algorithm 3. Theirs is for P = 2^j and loses entries; this one takes any P.

Cost: 2 ceil(log2 P) (alpha + k b beta) per rank.

    rank       0     1     2     3     4     5     6
    step 0    0+1 <- 1    2+3 <- 3    4+5 <- 5     6
    step 1   0..3 <------ 2+3        4..6 <------- 6
    step 2   0..6 <------------------ 4+5+6
    then the same edges backwards carry the result to everyone.

Result: k entries, approximate: what was rejected below is not seen above. The same on all ranks: one rank computes it.
Dropped: by the rank that merges, what the merge rejects; by the rank that sends, what quantizing takes.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM", "broadcast", "reduce", "reselecting"]

Combine = Callable[[SparseVector, SparseVector], SparseVector]


def tree(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the global top-k of this rank's and all others' gradients."""
    kept = reduce(comm, gradient, gradient.topk(k), reselecting(comm, gradient, k))
    return broadcast(comm, comm.quantized(kept, gradient) if comm.rank == 0 else kept, k)


def reselecting(comm: Communicator, gradient: Contribution, k: int) -> Combine:
    """Return what merges two vectors into their top-k, and records the others as dropped."""

    def reselect(lower: SparseVector, upper: SparseVector) -> SparseVector:
        kept, rejected = comm.backend.merge_topk(lower, upper, k)
        gradient.drop(rejected)
        return kept

    return reselect


def reduce(comm: Communicator, gradient: Contribution, mine: SparseVector, combine: Combine) -> SparseVector:
    """Return all ranks' vectors combined at rank 0, and at the others what they sent to their parents."""
    for step in range(_height(comm)):
        child = comm.rank + (1 << step)
        if child < comm.size:
            mine = combine(mine, comm.receive(child, step))
    if comm.rank > 0:
        mine = comm.quantized(mine, gradient)
        comm.send(mine, _parent(comm), _height(comm))
    return mine


def broadcast(comm: Communicator, mine: SparseVector | None, max_entries: int | None = None) -> SparseVector:
    """Return rank 0's vector, of at most ``max_entries``, at every rank; what the others give is not looked at."""
    steps, height = log2_ceil(comm.size), _height(comm)
    if comm.rank > 0:
        mine = comm.receive(_parent(comm), steps + height, max_entries)
    assert mine is not None
    for step in reversed(range(height)):
        child = comm.rank + (1 << step)
        if child < comm.size:
            comm.send(mine, child, steps + step)
    return mine


def _height(comm: Communicator) -> int:
    """Return in how many steps a rank has children: those below its lowest set bit."""
    return ((comm.rank & -comm.rank).bit_length() - 1) if comm.rank else log2_ceil(comm.size)


def _parent(comm: Communicator) -> int:
    return comm.rank & (comm.rank - 1)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted."""
    k = problem.k
    links = [problem.link(costs, 1 << step, sharing=1) for step in range(log2_ceil(problem.P))]
    work = 2 * k * (costs.merge + problem.codec(costs))
    return costs.select * problem.n + sum(2 * (x.alpha + k * problem.entry_bytes * x.beta) + work for x in links)


ALGORITHM = Algorithm(
    name="tree",
    summary="global top-k by merging along a binomial tree, then a broadcast (gTop-k as in the paper)",
    cost="2 log2(P) (alpha + k b beta)",
    result="at most k entries; approximate",
    source="Shi et al., ICDCS 2019, Algorithm 3",
    run=tree,
    predicted_time=predicted_time,
    reselects=True,
    automatic=True,
    contributors_unknown="merges sums of several ranks, which do not say of how many",
)
