"""The exact sum of all ranks' top-k: added up by ranges of indices, then gathered.

Source: Renggli et al., "SparCML: High-performance sparse communication for machine learning", SC 2019, Section 5
(SSAR_Split_allgather), with ranges that hold equally many entries in place of ranges of equal length.

Cost: (P - 1 + 2 log2 P) alpha + between 2 (P - 1)/P k b beta, where all ranks select the same indices, and
(P - 1)(1 + 1/P) k b beta, where each selects others. The drawing is the first half of `sparsecomm.algorithms.split`.

Result: up to k P entries, the exact sum of what the ranks selected. The same on all ranks: one rank adds up each range.
Put-back: nothing is rejected; what rounding to a narrow format takes stays with the rank that sends.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.split import balanced, owners, scatter_seconds, scatter_sum
from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import ROUNDS, gather, gather_seconds
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["SSAR_SPLIT_ALLGATHER"]


def ssar_split_allgather(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    mine = gradient.topk(k)
    if comm.size == 1:
        return mine
    sums = scatter_sum(comm, gradient, mine, balanced(comm, mine, k, 0), ROUNDS)
    return comm.backend.concatenate_entries(
        gather(comm, comm.quantized(sums, gradient), 2 * ROUNDS, owners(comm.size, k))
    )


def seconds(problem: Problem, costs: Costs) -> float:
    """Of entries that are everywhere apart: the most it can be."""
    P, k = problem.P, problem.k
    if P == 1:
        return costs.select * problem.n
    moved = scatter_seconds(problem, costs) + gather_seconds(problem, costs, P * k, owners(P, k))
    return costs.select * problem.n + moved + k * (log2_ceil(P) * costs.merge + P * problem.codec(costs))


SSAR_SPLIT_ALLGATHER = Algorithm(
    name="ssar_split_allgather",
    summary="the sum of all ranks' top-k, added up by ranges of indices, then gathered (SparCML)",
    cost="(P - 1 + 2 log2(P)) alpha + from 2 (P - 1)/P to (P - 1)(1 + 1/P) k b beta",
    result="up to k P entries, the exact sum of the local top-k, the same on all ranks",
    source="Renggli et al., SC 2019",
    reselects=False,
    run=ssar_split_allgather,
    seconds=seconds,
)
