"""Global top-k by recursive doubling: every rank merges in every step, so no broadcast follows.

Source: the merge is that of gTop-k (Shi et al., ICDCS 2019, Section III); the pattern is recursive doubling (Thakur,
Rabenseifner, Gropp, IJHPCA 2005, Section 4.3), after a fold (`sparsecomm.primitives.fold`) if P is not a power of two.

Cost: floor(log2 P) steps of (alpha + k b beta) per rank; two more if P is not a power of two.

    rank       0     1     2     3     4     5     6
    fold       0 -> 0+1    2 -> 2+3    4 -> 4+5    6
    step 0          0..3 <---> 0..3        4..6 <--> 4..6
    step 1          0..6 <---------------> 0..6
                           0..6 <-----------------> 0..6
    unfold   0..6 <- 1   0..6 <- 3   0..6 <- 5

Result: k entries, approximate. The same on all ranks: all ranks of a group add in the same order (lower ranks first)
and reject the same entries. If P is a power of two, it equals the tree's, bit for bit.
Dropped: in step j, groups of 2^(j+1) ranks compute the same merge. Each rank records an equal shard of the rejected
entries, in the order of indices, and of the rounding errors before the next step. In the fold, the rank that merges
records all.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM", "recursive_doubling"]

Combine = Callable[[SparseVector, SparseVector, int, int], SparseVector]


def butterfly(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the global top-k of this rank's and all others' gradients."""

    def reselect(lower: SparseVector, upper: SparseVector, shard: int, num_shards: int) -> SparseVector:
        kept, rejected = comm.backend.merge_topk(lower, upper, k)
        if 2 * num_shards <= comm.size:  # entries rejected by the last merge have no index of the result
            gradient.drop(rejected.shard(shard, num_shards))
        return kept

    return recursive_doubling(comm, gradient, gradient.topk(k), reselect, k)


def recursive_doubling(
    comm: Communicator, gradient: Contribution, own: SparseVector, combine: Combine, max_entries: int | None = None
) -> SparseVector:
    """Return the combined vectors of all ranks, with at most ``max_entries`` entries.

    ``combine(lower, upper, shard, num_shards)`` combines two vectors. ``num_shards`` ranks compute the same
    combination; this rank is number ``shard`` of them.
    """
    fold = comm.fold
    unfold = fold.steps + 1
    if fold.hands_over:
        comm.send(comm.quantized(own, gradient), fold.partner, 0)
        return comm.receive(fold.partner, unfold, max_entries)
    if fold.partner >= 0:
        own = combine(comm.receive(fold.partner, 0), own, 0, 1)

    for step, peer in enumerate(fold.peers):
        mask = 1 << step  # and the number of ranks that hold the same entries
        own = comm.quantized(own, gradient, fold.newrank % mask, mask)
        theirs = comm.exchange(own, peer, peer, step + 1)
        lower, upper = (theirs, own) if fold.newrank & mask else (own, theirs)
        own = combine(lower, upper, fold.newrank % (2 * mask), 2 * mask)

    if fold.rem:
        own = comm.quantized(own, gradient, fold.newrank, 1 << fold.steps)
    if fold.partner >= 0:
        comm.send(own, fold.partner, unfold)
    return own


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call."""
    P, k = problem.P, problem.k
    distances = [1 << j for j in range(log2_ceil(P))] + ([1] if P & (P - 1) else [])  # ceil counts one of the two
    links = [problem.link(costs, distance) for distance in distances]
    work = k * (2 * costs.merge + problem.codec(costs))
    return costs.select * problem.n + sum(link.alpha + k * problem.entry_bytes * link.beta + work for link in links)


ALGORITHM = Algorithm(
    name="butterfly",
    summary="global top-k by recursive doubling: half the steps of `tree`",
    cost="ceil(log2(P)) (alpha + k b beta), plus one step if P is not a power of two",
    result="at most k entries; approximate",
    source="Shi et al., ICDCS 2019, with the pattern of Thakur et al., IJHPCA 2005",
    run=butterfly,
    predicted_time=predicted_time,
    reselects=True,
    automatic=True,
    contributors_unknown="merges partial sums without counting their contributors",
)
