"""The exact sum of all ranks' top-k: each range of indices is added up by one rank, then all ranges are gathered.

Source: Renggli et al., "SparCML: High-performance sparse communication for machine learning", SC 2019, Section 5
(SSAR_Split_allgather). After the first call, ranges hold about equal numbers of entries: see
`sparsecomm.primitives.ranges`.

The fewest bytes are sent if all ranks select the same indices. One more trip is needed if the ranks' ranges differ.
The rank that sends records rounding errors as dropped. Nothing is rejected.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import ROUNDS, Communicator, gather, gather_time, num_owners
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.ranges import owned_ranges, rebalance, scatter, scatter_time
from sparsecomm.tensors.sparse import SparseVector


def ssar_split_allgather(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' top-k."""
    own = gradient.topk(k)
    if comm.size == 1:
        return own
    pieces, _ = scatter(comm, gradient, own, k)
    gathered = gather(comm, comm.averaged(*comm.sums(pieces), gradient), ROUNDS, owned_ranges(comm, k))
    rebalance(comm, [entries.nnz for entries in gathered])
    return comm.backend.concatenate_entries(gathered)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call if all ranks select different indices: an upper bound."""
    P, k = problem.P, problem.k
    if P == 1:
        return costs.select * problem.n
    moved = scatter_time(problem, costs) + gather_time(problem, costs, P * k, num_owners(P, k))
    return costs.select * problem.n + moved + k * (log2_ceil(P) * costs.merge + P * problem.codec(costs))


ALGORITHM = Algorithm(
    name="ssar_split_allgather",
    summary="the sum of all ranks' top-k: each rank adds up a range of indices, then all gather the sums (SparCML)",
    cost="2 alpha + 2 (P - 2) gap + 2 (P - 1)/P to (P - 1)(1 + 1/P) times k b beta",
    result="up to k P entries, the exact sum of the local top-k",
    source="Renggli et al., SC 2019",
    run=ssar_split_allgather,
    predicted_time=predicted_time,
    rejects=False,
    cannot_count_contributors="",
)
