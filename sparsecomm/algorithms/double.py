"""The largest sums of each range of indices. Error feedback on both sides: ranks and owners keep a residual.

Source: Tang et al., "DoubleSqueeze: Parallel stochastic gradient descent with double-pass error-compensated
compression", ICML 2019, with one owner per range instead of one server.

Each line below is one trip:

    scatter      each rank sends each owner its largest entries in the owner's range
                 each owner adds them to all of its own elements in its range
    gather       each owner sends its largest sums to all, and keeps the others

Ranges have equal lengths and are the same in every call. Each range has about the same share of k. Each rank selects
that number of entries in the range, and the result contains at most that number.

The sender of an entry records its rounding error as dropped. The owner's residual keeps the sums that the owner does
not send, and the next call adds to them. So an index whose gradients are small on every rank can still reach the
result, although no rank alone would select it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import ROUNDS, Communicator, Parcel, gather, gather_time, num_owners
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.ranges import scatter_time
from sparsecomm.tensors.sparse import SparseVector

_SCATTER = 0  # round numbers of the gather follow


def ranges(n: int, k: int, owners: int) -> list[tuple[int, int, int]]:
    """Return the begin, the end and the share of k of each range of n elements."""
    return [
        (n * owner // owners, n * (owner + 1) // owners, k * (owner + 1) // owners - k * owner // owners)
        for owner in range(owners)
    ]


def double(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the largest sums of all ranges."""
    if comm.size == 1:
        return gradient.topk(k)
    owner_ranges = ranges(comm.num_elements, k, num_owners(comm.size, k))
    own = comm.round_and_record(sums_of_owner(comm, gradient, owner_ranges), gradient)
    gathered = gather(comm, own, ROUNDS, [(begin, end) for begin, end, _ in owner_ranges])
    for owner, (entries, (_, _, range_k)) in enumerate(zip(gathered, owner_ranges, strict=True)):
        if entries.nnz > range_k:
            raise comm.broken(owner, f"{entries.nnz} entries instead of at most {range_k}")
    return comm.backend.concatenate_entries(gathered)


def sums_of_owner(
    comm: Communicator, gradient: Contribution, owner_ranges: Sequence[tuple[int, int, int]]
) -> SparseVector:
    """Return the largest sums of this rank's range; none if it owns no range. ``owner_ranges``: as from `ranges`."""
    owners = len(owner_ranges)
    other_owners = [owner for owner in range(owners) if owner != comm.rank]
    taken = gradient.topk_of_ranges([owner_ranges[owner] for owner in other_owners])
    parcels: dict[int, Parcel] = {
        owner: ((comm.round_and_record(entries, gradient),), ())
        for owner, entries in zip(other_owners, taken, strict=True)
    }
    sources = [rank for rank in range(comm.size) if rank != comm.rank] if comm.rank < owners else []
    count = max(range_k for _, _, range_k in owner_ranges)
    received = comm.exchange_parcels(
        parcels, sources, 1, _SCATTER, count, expected=lambda source, words: [owner_ranges[comm.rank][:2]]
    )
    if comm.rank >= owners:
        return taken[0].part(0, 0)
    addends = [vector for source in sorted(received) for vector in received[source][0]]
    begin, end, range_k = owner_ranges[comm.rank]
    return gradient.topk_of_sums(begin, end, addends, range_k)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call."""
    P, k = problem.P, problem.k
    if P == 1:
        return costs.select * problem.n
    moved = scatter_time(problem, costs) + gather_time(problem, costs, k, num_owners(P, k))
    return costs.select * problem.n + moved + k * (log2_ceil(P) * costs.merge + 2 * problem.codec(costs))


ALGORITHM = Algorithm(
    name="double",
    summary="the largest sums of each range of indices; its owner keeps the others (error feedback on both sides)",
    cost="2 alpha + 2 (P - 2) gap + 2 (P - 1)/P k b beta",
    result="at most k entries: the largest sums of each range, which include the owner's own elements",
    source="the scheme of Tang et al. (DoubleSqueeze), ICML 2019",
    run=double,
    predicted_time=predicted_time,
    bounded_result=True,
    rejects=False,
    by_chunk=False,
    runs_between_nodes=False,
    cannot_count_contributors="keeps sums between calls without counting their contributors",
)
