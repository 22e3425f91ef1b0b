"""Global top-k by recursive doubling: every rank merges in every round, so there is nothing to broadcast.

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
order of index. In the fold the rank that merges takes all.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm, Link, Problem, log2_ceil
from sparsecomm.algorithms.group import Group
from sparsecomm.feedback import Gradient
from sparsecomm.sparse import SparseVector

__all__ = ["BUTTERFLY"]


def butterfly(group: Group, gradient: Gradient, k: int) -> SparseVector:
    rank, size = group.rank, group.size
    rounds = size.bit_length() - 1
    folded = size - (1 << rounds)  # pairs of neighbours that act as one
    kept = gradient.topk(k)

    if rank < 2 * folded and rank % 2 == 0:
        group.send(kept, rank + 1, 0)
        return group.receive(rank + 1, rounds + 1)
    if rank < 2 * folded:
        kept, rejected = group.ops.merge_topk(group.receive(rank - 1, 0), kept, k)
        gradient.put_back(rejected)

    place = rank // 2 if rank < 2 * folded else rank - folded
    for round in range(rounds):
        other = place ^ (1 << round)
        theirs = group.exchange(kept, 2 * other + 1 if other < folded else other + folded, round + 1)
        lower, upper = (kept, theirs) if place < other else (theirs, kept)
        kept, rejected = group.ops.merge_topk(lower, upper, k)
        members = 2 << round
        gradient.put_back(share(rejected, place % members, members))

    if rank < 2 * folded:
        group.send(kept, rank - 1, rounds + 1)
    return kept


def share(entries: SparseVector, place: int, members: int) -> SparseVector:
    """Member number ``place``'s part of entries that ``members`` ranks hold alike."""
    return entries.part(entries.nnz * place // members, entries.nnz * (place + 1) // members)


def seconds(problem: Problem, link: Link) -> float:
    rounds = log2_ceil(problem.P) + (1 if problem.P & (problem.P - 1) else 0)  # ceil counts one of the two
    return rounds * (link.alpha + problem.k * problem.entry_bytes * link.beta)


BUTTERFLY = Algorithm(
    name="butterfly",
    summary="global top-k by recursive doubling: half the rounds of the tree",
    cost="log2(P) rounds of (alpha + k b beta), rounded up; one more if P is no power of two",
    result="at most k entries, the same on all ranks; approximate",
    source="Shi et al., ICDCS 2019, with the pattern of Thakur et al., IJHPCA 2005",
    run=butterfly,
    seconds=seconds,
)
