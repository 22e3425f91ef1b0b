"""The exact sum of all ranks' top-k, which becomes dense on the way where that is shorter.

Source: Renggli et al., "SparCML: High-performance sparse communication for machine learning", SC 2019, Section 5
(DSAR_Split_allgather): added up by ranges of indices, then the ranges are gathered dense. Here the ranks look first:
if all sums together are shorter as entries, they are gathered as entries.

Cost: (P - 1 + 2 log2 P) alpha + k b beta + at most (P - 1)/P e n beta, e bytes per element; for the ring of the dense
half P - 1 - log2 P alpha more. The ranges are of equal length, so that they need no agreement.

Result: up to k P entries, the exact sum of what the ranks selected. The same on all ranks: one rank adds up each range.
Dropped: what quantizing to a narrow format takes, which stays with the rank that sends. Nothing is rejected.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.split import scatter
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.contributors import averaged, averaged_and_quantized
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import ROUNDS, gather, gather_time, gather_words, links_by_step, sum_in_pairs
from sparsecomm.primitives.ring import gather_segments
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM"]


def dsar_split_allgather(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' top-k."""
    mine, rank, size = gradient.topk(k), comm.rank, comm.size
    if size == 1:
        return mine
    boundaries = [mine.size * i // size for i in range(size + 1)]
    pieces = scatter(comm, gradient, mine, boundaries, 0)
    sums = sum_in_pairs(comm, pieces)
    nnz = sum(count for (count,) in gather_words(comm, [sums.nnz], 1 * ROUNDS))
    if comm.bytes_per_entry(nnz) * nnz < mine.values.itemsize * mine.size:
        sums = averaged_and_quantized(comm, gradient, sums, pieces)
        return comm.backend.concatenate_entries(gather(comm, sums, 2 * ROUNDS))
    sums = averaged(comm, sums, pieces)
    mine_dense = comm.backend.densify_range(sums, boundaries[rank], boundaries[rank + 1])
    segments = gather_segments(comm, mine_dense, boundaries, 3 * ROUNDS)
    return comm.backend.nonzeros(comm.backend.concatenate(segments), gradient.shape)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted for entries that are everywhere apart: an upper bound."""
    P, n, k, link = problem.P, problem.n, problem.k, problem.link(costs)
    if P == 1:
        return costs.select * n
    rounds = links_by_step(problem, costs)
    agreed = sum(x.alpha for x in rounds) + 8 * P * rounds[-1].beta
    start = (P - 1) * (link.alpha + k / P * problem.entry_bytes * link.beta) + agreed
    if P * k * problem.entry_bytes < n * problem.element_bytes:
        end = gather_time(problem, costs, P * k)
    else:
        ring = problem.link(costs, sharing=1)
        end = (P - 1) * (ring.alpha + n / P * problem.element_bytes * ring.beta)
    return costs.select * n + start + end + k * (log2_ceil(P) * costs.merge + P * problem.codec(costs))


ALGORITHM = Algorithm(
    name="dsar_split_allgather",
    summary="the sum of all ranks' top-k by ranges of indices, gathered dense where that is shorter (SparCML)",
    cost="(P - 1 + 2 log2(P)) alpha + k b beta + at most (P - 1)/P e n beta",
    result="up to k P entries, the exact sum of the local top-k",
    source="Renggli et al., SC 2019",
    run=dsar_split_allgather,
    predicted_time=predicted_time,
    rejects=False,
    contributors_unknown="",
)
