"""gTopKAllReduce along a tree.

Source: Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359), Algorithm 3. Theirs is for P = 2^j and loses entries; this one takes any P.

Cost: 2 ceil(log2 P) (alpha + k b beta) per rank.

    rank       0     1     2     3     4     5     6
    round 0   0+1 <- 1    2+3 <- 3    4+5 <- 5     6
    round 1  0..3 <------ 2+3        4..6 <------- 6
    round 2  0..6 <------------------ 4+5+6
    then the same boundaries backwards carry the result to everyone.

Result: k entries, approximate: what was rejected below is not seen above. The same on all ranks: one rank computes it.
Put-back: the rank that merges keeps what the merge rejects; the rank that sends keeps what rounding takes.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["TREE", "broadcast", "reduce"]


def tree(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    def reselect(lower: SparseVector, upper: SparseVector) -> SparseVector:
        kept, rejected = comm.backend.merge_topk(lower, upper, k)
        gradient.put_back(rejected)
        return kept

    kept = reduce(comm, gradient, gradient.topk(k), reselect)
    return broadcast(comm, comm.quantized(kept, gradient) if comm.rank == 0 else kept)


def reduce(
    comm: Communicator,
    gradient: Contribution,
    mine: SparseVector,
    combine: Callable[[SparseVector, SparseVector], SparseVector],
) -> SparseVector:
    """All ranks' vectors combined, at rank 0; the others return what they sent to their parents."""
    for round_no in range(_depth(comm)):
        child = comm.rank + (1 << round_no)
        if child < comm.size:
            mine = combine(mine, comm.receive(child, round_no))
    if comm.rank > 0:
        mine = comm.quantized(mine, gradient)
        comm.send(mine, _parent(comm), _depth(comm))
    return mine


def broadcast(comm: Communicator, mine: SparseVector | None) -> SparseVector:
    """Rank 0's vector, at every rank; what the others give is not looked at."""
    rounds, depth = log2_ceil(comm.size), _depth(comm)
    if comm.rank > 0:
        mine = comm.receive(_parent(comm), rounds + depth)
    assert mine is not None
    for round_no in reversed(range(depth)):
        child = comm.rank + (1 << round_no)
        if child < comm.size:
            comm.send(mine, child, rounds + round_no)
    return mine


def _depth(comm: Communicator) -> int:
    """Rounds in which a rank has children: those below its lowest set bit."""
    return ((comm.rank & -comm.rank).bit_length() - 1) if comm.rank else log2_ceil(comm.size)


def _parent(comm: Communicator) -> int:
    return comm.rank & (comm.rank - 1)


def seconds(problem: Problem, costs: Costs) -> float:
    k = problem.k
    links = [problem.link(costs, 1 << j, sharing=1) for j in range(log2_ceil(problem.P))]
    work = 2 * k * (costs.merge + problem.codec(costs))
    return costs.select * problem.n + sum(2 * (x.alpha + k * problem.entry_bytes * x.beta) + work for x in links)


TREE = Algorithm(
    name="tree",
    summary="global top-k by merging along a binomial tree, then a broadcast (gTop-k as in the paper)",
    cost="2 log2(P) alpha + 2 k b log2(P) beta",
    result="at most k entries, the same on all ranks; approximate",
    source="Shi et al., ICDCS 2019, Algorithm 3",
    reselects=True,
    run=tree,
    seconds=seconds,
)
