"""Top-k S-SGD: everyone gathers everyone's top-k and adds them up.

Source: Lin et al., "Deep Gradient Compression", ICLR 2018; gathered at once, or as by Bruck et al., IEEE TPDS 1997.

Cost: alpha + (P - 2) gap + (P - 1) k b beta per rank, each rank sending to all others at once; where gaps cost more
than trips, ceil(log2 P) alpha + (P - 1) k b beta. The drawing of that is in `sparsecomm.primitives.gather`.

Result: up to k P entries, the exact sum of what the ranks selected. The same on all ranks: all add in order of rank.
Dropped: what quantizing to a narrow format takes from a rank's entries, which stays with it. Nothing is rejected.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.contributors import averaged
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import gather, gather_time
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM"]


def allgather(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' top-k."""
    vectors = gather(comm, comm.quantized(gradient.topk(k), gradient), 0)
    return averaged(comm, vectors)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted."""
    P, k = problem.P, problem.k
    work = P * k * (log2_ceil(P) * costs.merge + problem.codec(costs))
    return costs.select * problem.n + gather_time(problem, costs, P * k) + work


ALGORITHM = Algorithm(
    name="allgather",
    summary="the sum of all ranks' top-k, gathered and added by everyone (Top-k S-SGD)",
    cost="alpha + (P - 2) gap + (P - 1) k b beta, or log2(P) alpha without gaps",
    result="up to k P entries, the exact sum of the local top-k",
    source="Lin et al., ICLR 2018; Bruck et al., IEEE TPDS 1997",
    run=allgather,
    predicted_time=predicted_time,
    rejects=False,
    contributors_unknown="",
)
