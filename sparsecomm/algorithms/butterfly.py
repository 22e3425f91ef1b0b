"""Global top-k by recursive doubling: every rank merges in every step, so no broadcast follows.

Source: ranks merge as in gTop-k (Shi et al., ICDCS 2019, Section III), in the pattern of recursive doubling (Thakur,
Rabenseifner, Gropp, IJHPCA 2005, Section 4.3). If P is not a power of two, a fold comes first: with P = 2^steps + rem,
the first 2 rem ranks form pairs of neighbours, and the odd rank of each pair takes part for both.

    rank       0     1     2     3     4     5     6
    fold       0 -> 0+1    2 -> 2+3    4 -> 4+5    6
    step 0          0..3 <---> 0..3        4..6 <--> 4..6
    step 1          0..6 <---------------> 0..6
                           0..6 <-----------------> 0..6
    unfold   0..6 <- 1   0..6 <- 3   0..6 <- 5

Result: k entries, approximate. It is equal on all ranks, because all ranks of a group add in the same order (lower
ranks first) and reject the same entries. If P is a power of two, it equals the tree's result, bit for bit.
Dropped: in step j, groups of 2^(j+1) ranks compute the same merge. Each rank records an equal shard of the rejected
entries, and of the rounding errors before the next step. In the fold, the rank that merges records all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

Combine = Callable[[SparseVector, SparseVector, int, int], SparseVector]


@dataclass(frozen=True, slots=True)
class Fold:
    """A rank's role in the fold and in recursive doubling. The names are MPICH's."""

    rem: int  # number of pairs
    newrank: int  # this rank's number among the 2^steps ranks that take part; -1 for the even rank of a pair
    partner: int  # the other rank of its pair, to which the even rank sends, and which returns the result; -1: none
    peers: tuple[int, ...] = ()  # for each step, the rank to exchange with, whose new rank differs in the step's bit

    @classmethod
    @cache
    def of(cls, rank: int, size: int) -> Fold:
        steps = size.bit_length() - 1
        rem = size - (1 << steps)
        if rank < 2 * rem and rank % 2 == 0:
            return cls(rem, -1, rank + 1)
        newrank, partner = (rank - rem, -1) if rank >= 2 * rem else (rank // 2, rank - 1)
        others = [newrank ^ (1 << step) for step in range(steps)]
        peers = tuple(2 * other + 1 if other < rem else other + rem for other in others)
        return cls(rem, newrank, partner, peers)


def butterfly(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the global top-k of this rank's and all others' gradients."""

    def reselect(lower: SparseVector, upper: SparseVector, shard: int, num_shards: int) -> SparseVector:
        top, rejected = comm.backend.merge_topk(lower, upper, k)
        if 2 * num_shards <= comm.size:  # in the last step, commit returns the entries that the result lacks
            gradient.record_dropped(rejected.shard(shard, num_shards))
        return top

    return recursive_doubling(comm, gradient, gradient.topk(k), reselect, k)


def recursive_doubling(
    comm: Communicator, gradient: Contribution, own: SparseVector, combine: Combine, max_entries: int | None = None
) -> SparseVector:
    """Return the combined vectors of all ranks, with at most ``max_entries`` entries.

    ``combine(lower, upper, shard, num_shards)`` combines two vectors. ``num_shards`` ranks compute the same
    combination, and this rank is number ``shard`` among them.
    """
    fold = Fold.of(comm.rank, comm.size)
    unfold = comm.size.bit_length()  # the round after the fold and the steps
    if fold.newrank < 0:
        comm.send(comm.round_and_record(own, gradient), fold.partner, 0)
        return comm.receive(fold.partner, unfold, max_entries)
    if fold.partner >= 0:
        own = combine(comm.receive(fold.partner, 0), own, 0, 1)

    for step, peer in enumerate(fold.peers):
        mask = 1 << step  # also the number of ranks with the same entries
        own = comm.round_and_record(own, gradient, fold.newrank % mask, mask)
        received = comm.exchange(own, peer, peer, step + 1)
        lower, upper = (received, own) if fold.newrank & mask else (own, received)
        own = combine(lower, upper, fold.newrank % (2 * mask), 2 * mask)

    if fold.rem:
        own = comm.round_and_record(own, gradient, fold.newrank, 1 << len(fold.peers))
    if fold.partner >= 0:
        comm.send(own, fold.partner, unfold)
    return own


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call."""
    P, k = problem.P, problem.k
    # If P is not a power of two, fold and unfold are two more steps; log2_ceil already counts one of them.
    distances = [1 << j for j in range(log2_ceil(P))] + ([1] if P & (P - 1) else [])
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
    bounded_result=True,
    automatic=True,
    cannot_count_contributors="merges partial sums without counting their contributors",
)
