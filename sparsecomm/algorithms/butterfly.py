"""Global top-k by recursive doubling: every rank merges in every step, so there is nothing to broadcast.

Source: the merge is that of gTop-k (Shi et al., ICDCS 2019, Section III); the pattern is recursive doubling (Thakur,
Rabenseifner, Gropp, IJHPCA 2005, Section 4.3), after the fold (`sparsecomm.primitives.fold`) where P is no power of
two.

Cost: floor(log2 P) steps of (alpha + k b beta) per rank; two more when P is no power of two.

    rank       0     1     2     3     4     5     6
    fold       0 -> 0+1    2 -> 2+3    4 -> 4+5    6
    step 0          0..3 <---> 0..3        4..6 <--> 4..6
    step 1          0..6 <---------------> 0..6
                           0..6 <-----------------> 0..6
    unfold   0..6 <- 1   0..6 <- 3   0..6 <- 5

Result: k entries, approximate. The same on all ranks: all ranks of a group add in the same order (lower ranks first)
and reject the same entries. For P a power of two it is the tree's, bit for bit.
Dropped: a group of 2^(j+1) ranks computes the same merge in step j; each records an equal shard of what it rejects, in
order of index, and of what quantizing to a narrow format takes before the next. In the fold the rank that merges
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
        if 2 * num_shards <= comm.size:  # what the last merge rejects is at no index of the result
            gradient.drop(rejected.shard(shard, num_shards))
        return kept

    return recursive_doubling(comm, gradient, gradient.topk(k), reselect, k)


def recursive_doubling(
    comm: Communicator, gradient: Contribution, mine: SparseVector, combine: Combine, max_entries: int | None = None
) -> SparseVector:
    """Return the vectors of all ranks, combined: at most ``max_entries``.

    ``combine(lower, upper, shard, num_shards)`` returns the two vectors as one. ``num_shards`` ranks compute the same;
    this one is number ``shard`` of them.
    """
    fold = comm.fold
    unfold = fold.steps + 1
    if fold.hands_over:
        comm.send(comm.quantized(mine, gradient), fold.partner, 0)
        return comm.receive(fold.partner, unfold, max_entries)
    if fold.partner >= 0:
        mine = combine(comm.receive(fold.partner, 0), mine, 0, 1)

    for step, peer in enumerate(fold.peers):
        mask = 1 << step  # and the number of ranks that hold the same entries
        mine = comm.quantized(mine, gradient, fold.newrank % mask, mask)
        theirs = comm.exchange(mine, peer, peer, step + 1)
        lower, upper = (theirs, mine) if fold.newrank & mask else (mine, theirs)
        mine = combine(lower, upper, fold.newrank % (2 * mask), 2 * mask)

    if fold.rem:
        mine = comm.quantized(mine, gradient, fold.newrank, 1 << fold.steps)
    if fold.partner >= 0:
        comm.send(mine, fold.partner, unfold)
    return mine


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted."""
    P, k = problem.P, problem.k
    distances = [1 << j for j in range(log2_ceil(P))] + ([1] if P & (P - 1) else [])  # ceil counts one of the two
    links = [problem.link(costs, distance) for distance in distances]
    work = k * (2 * costs.merge + problem.codec(costs))
    return costs.select * problem.n + sum(link.alpha + k * problem.entry_bytes * link.beta + work for link in links)


ALGORITHM = Algorithm(
    name="butterfly",
    summary="global top-k by recursive doubling: half the steps of the tree",
    cost="log2(P) (alpha + k b beta), rounded up; one step more if P is no power of two",
    result="at most k entries; approximate",
    source="Shi et al., ICDCS 2019, with the pattern of Thakur et al., IJHPCA 2005",
    run=butterfly,
    predicted_time=predicted_time,
    reselects=True,
    automatic=True,
    contributors_unknown="merges sums of several ranks, which do not say of how many",
)
