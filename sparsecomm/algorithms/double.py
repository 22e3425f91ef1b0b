"""The first sums of ranges whose owners keep the rest: error feedback on both sides.

Source: Tang et al., "DoubleSqueeze: Parallel stochastic gradient descent with double-pass error-compensated
compression", ICML 2019, with one owner for each range in place of a server for all.

Cost: 2 (alpha + (P - 2) gap) + 2 (P - 1)/P k b beta per rank, both ways. Each line below is one trip:

    scatter      each rank sends each owner its first entries of that one's range
                 each owner adds them to all that it has in its range itself
    gather       each owner sends to all the first of its sums, and keeps the others

Ranges are equally long, and the same in every call. Each has its part of k, in a selection as in the result.

Result: at most k entries, of each range the first sums. The same on all ranks: one rank adds up each range, and all
receive what it sends. Dropped: what quantizing to a narrow format takes, by the rank that sends. Sums that do not win
need no way back: they stay in the residual of their owner, who adds to them in the next call. So entries that all ranks
hold a little of reach the result, which no rank alone would select; and a range in which little happens has its share.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.split import num_owners, scatter_time
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator, Parcel
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import ROUNDS, gather, gather_time
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM", "ranges"]

_SCATTER = 0  # round numbers of the gather follow


def ranges(n: int, k: int, owners: int) -> list[tuple[int, int, int]]:
    """Return where each range of n elements begins and ends, and its part of k."""
    return [
        (n * owner // owners, n * (owner + 1) // owners, k * (owner + 1) // owners - k * owner // owners)
        for owner in range(owners)
    ]


def double(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the first sums of all ranges."""
    if comm.size == 1:
        return gradient.topk(k)
    owners = num_owners(comm.size, k)
    parts = ranges(comm.num_elements, k, owners)
    of_others = [owner for owner in range(owners) if owner != comm.rank]
    taken = gradient.topk_of_ranges([parts[owner] for owner in of_others])
    parcels: dict[int, Parcel] = {
        owner: ((comm.quantized(entries, gradient),), ()) for owner, entries in zip(of_others, taken, strict=True)
    }
    sources = [rank for rank in range(comm.size) if rank != comm.rank] if comm.rank < owners else []
    within = [(begin, end) for begin, end, _ in parts]
    found = comm.exchange_parcels(
        parcels, sources, 1, _SCATTER, k // owners + 1, range_of=lambda source, words: within[comm.rank]
    )
    if comm.rank < owners:
        received = [vector for source in sorted(found) for vector in found[source][0]]
        mine = comm.quantized(gradient.first_sums(*parts[comm.rank][:2], received, parts[comm.rank][2]), gradient)
    else:
        mine = comm.backend.empty_like(taken[0])
    everyones = gather(comm, mine, ROUNDS, within)
    for owner, (entries, (_, _, part)) in enumerate(zip(everyones, parts, strict=True)):
        if entries.nnz > part:
            raise comm.broken(owner, f"{entries.nnz} entries instead of at most {part}")
    return comm.backend.concatenate_entries(everyones)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted."""
    P, k = problem.P, problem.k
    if P == 1:
        return costs.select * problem.n
    moved = scatter_time(problem, costs) + gather_time(problem, costs, k, num_owners(P, k))
    return costs.select * problem.n + moved + k * (log2_ceil(P) * costs.merge + 2 * problem.codec(costs))


ALGORITHM = Algorithm(
    name="double",
    summary="the first sums of every range of indices, whose owner keeps the others (error feedback on both sides)",
    cost="2 alpha + 2 (P - 2) gap + 2 (P - 1)/P k b beta",
    result="at most k entries: of each range the first sums of what ranks send and what its owner has",
    source="the scheme of Tang et al. (DoubleSqueeze), ICML 2019",
    run=double,
    predicted_time=predicted_time,
    reselects=True,
    rejects=False,
    by_chunk=False,
    between_nodes=False,
    contributors_unknown="keeps sums from call to call, which do not say of how many ranks",
)
