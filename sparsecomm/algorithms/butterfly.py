"""Global top-k by recursive doubling: every rank merges in every round_no, so there is nothing to broadcast.

Source: the merge is that of gTop-k (Shi et al., ICDCS 2019, Section III); the pattern is recursive doubling (Thakur,
Rabenseifner, Gropp, IJHPCA 2005, Section 4.3), with the ranks beyond a power of two folded into their neighbours.

Cost: floor(log2 P) rounds of (alpha + k b beta) per rank; two more when P is no power of two.

    rank       0     1     2     3     4     5     6
    fold       0 -> 0+1    2 -> 2+3    4 -> 4+5    6
    round 0         0..3 <---> 0..3        4..6 <--> 4..6
    round 1         0..6 <---------------> 0..6
                           0..6 <-----------------> 0..6
    unfold   0..6 <- 1   0..6 <- 3   0..6 <- 5

Result: k entries, approximate. The same on all ranks: all ranks of a group add in the same order (lower ranks first)
and reject the same entries. For P a power of two it is the tree's, bit for bit.
Put-back: a group of 2^(j+1) ranks computes the same merge in round j; each takes an equal share of what it rejects, in
order of index, and of what rounding to a narrow format takes before the next. In the fold the rank that merges takes
all.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["BUTTERFLY", "doubling"]

Combine = Callable[[SparseVector, SparseVector, int, int], SparseVector]


def butterfly(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    def reselect(lower: SparseVector, upper: SparseVector, place: int, members: int) -> SparseVector:
        kept, rejected = comm.backend.merge_topk(lower, upper, k)
        gradient.put_back(rejected.shard(place, members))
        return kept

    return doubling(comm, gradient, gradient.topk(k), reselect)


def doubling(comm: Communicator, gradient: Contribution, mine: SparseVector, combine: Combine) -> SparseVector:
    """Combine the vectors of all ranks by recursive doubling.

    ``combine(lower, upper, place, members)``: the two vectors as one; ``members`` ranks do that, this one is number
    ``place`` of them.
    """
    rank, size = comm.rank, comm.size
    rounds = size.bit_length() - 1
    folded = size - (1 << rounds)  # pairs of neighbours that act as one

    if rank < 2 * folded and rank % 2 == 0:
        comm.send(comm.quantized(mine, gradient), rank + 1, 0)
        return comm.receive(rank + 1, rounds + 1)
    if rank < 2 * folded:
        mine = combine(comm.receive(rank - 1, 0), mine, 0, 1)

    place = rank // 2 if rank < 2 * folded else rank - folded
    for round_no in range(rounds):
        alike = 1 << round_no  # ranks that hold the same entries
        mine = comm.quantized(mine, gradient, place % alike, alike)
        other = place ^ alike
        peer = 2 * other + 1 if other < folded else other + folded
        theirs = comm.exchange(mine, peer, peer, round_no + 1)
        lower, upper = (mine, theirs) if place < other else (theirs, mine)
        mine = combine(lower, upper, place % (2 * alike), 2 * alike)

    if folded:
        mine = comm.quantized(mine, gradient, place, 1 << rounds)
    if rank < 2 * folded:
        comm.send(mine, rank - 1, rounds + 1)
    return mine


def seconds(problem: Problem, costs: Costs) -> float:
    P, k = problem.P, problem.k
    distances = [1 << j for j in range(log2_ceil(P))] + ([1] if P & (P - 1) else [])  # ceil counts one of the two
    links = [problem.link(costs, distance) for distance in distances]
    work = k * (2 * costs.merge + problem.codec(costs))
    return costs.select * problem.n + sum(link.alpha + k * problem.entry_bytes * link.beta + work for link in links)


BUTTERFLY = Algorithm(
    name="butterfly",
    summary="global top-k by recursive doubling: half the rounds of the tree",
    cost="log2(P) rounds of (alpha + k b beta), rounded up; one more if P is no power of two",
    result="at most k entries, the same on all ranks; approximate",
    source="Shi et al., ICDCS 2019, with the pattern of Thakur et al., IJHPCA 2005",
    reselects=True,
    run=butterfly,
    seconds=seconds,
)
