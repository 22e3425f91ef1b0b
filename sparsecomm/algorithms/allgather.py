"""Top-k S-SGD: every rank gathers all ranks' top-k and adds them up.

Source: Lin et al., "Deep Gradient Compression", ICLR 2018; gathered at once, or as in Bruck et al., IEEE TPDS 1997.

`sparsecomm.primitives.communicator` has a drawing. All ranks add in the same order. Each rank records its own rounding
errors as dropped. Nothing is rejected.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator, gather, gather_time
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector


def allgather(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' top-k."""
    sums, counts = comm.sums(gather(comm, comm.round_and_record(gradient.topk(k), gradient), 0))
    return sums if counts is None else comm.backend.means(sums, counts.values)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call."""
    P, k = problem.P, problem.k
    work = P * k * (log2_ceil(P) * costs.merge + problem.codec(costs))
    return costs.select * problem.n + gather_time(problem, costs, P * k) + work


ALGORITHM = Algorithm(
    name="allgather",
    summary="the sum of all ranks' top-k: every rank gathers all entries and adds them up (Top-k S-SGD)",
    cost="alpha + (P - 2) gap + (P - 1) k b beta, or log2(P) alpha + (P - 1) k b beta",
    result="up to k P entries, the exact sum of the local top-k",
    source="Lin et al., ICLR 2018; Bruck et al., IEEE TPDS 1997",
    run=allgather,
    predicted_time=predicted_time,
    rejects=False,
    cannot_count_contributors="",
)
