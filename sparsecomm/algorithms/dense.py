"""The whole gradient, summed along a ring: what sparse exchange competes with, and what wins at high density.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

Cost: 2 (P - 1) alpha + 2 (P - 1)/P e n beta per rank, e bytes per element.

    The gradient is cut into P segments. In P - 1 steps segment s travels once around the ring, from rank s + 1 on to
    rank s, and every rank adds its own; in P - 1 more steps the sums travel on.

    rank       0      1      2      3      4      5      6         (segment sent in step 0)
    sends     s6     s0     s1     s2     s3     s4     s5   -> to rank + 1

Result: the exact dense sum, as all its entries that are not zero; k is not used. The same on all ranks: one rank
computes each segment. Nothing is dropped; the residual becomes zero.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM"]


def dense(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' whole gradients."""
    rank, size = comm.rank, comm.size
    total = gradient.whole()
    boundaries = [len(total) * i // size for i in range(size + 1)]
    segments = [total[begin:end] for begin, end in pairwise(boundaries)]
    dst, src = (rank + 1) % size, (rank - 1) % size

    for step in range(size - 1):
        sent, summed = segments[(rank - 1 - step) % size], segments[(rank - 2 - step) % size]
        comm.backend.add(summed, comm.exchange_dense(sent, dst, src, len(summed), step))
    for step in range(size - 1):
        sent, received = segments[(rank - step) % size], segments[(rank - 1 - step) % size]
        received[:] = comm.exchange_dense(sent, dst, src, len(received), size - 1 + step)
    return comm.backend.nonzeros(total, gradient.shape)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted."""
    P, link = problem.P, replace(problem, packed=False).link(costs, sharing=1)  # the ring leaves each node once
    moved = 2 * (P - 1) * (link.alpha + problem.n / P * problem.element_bytes * link.beta)
    return 2 * costs.add * problem.n + moved


ALGORITHM = Algorithm(
    name="dense",
    summary="the whole gradient, summed along a ring",
    cost="2 (P - 1) alpha + 2 (P - 1)/P e n beta",
    result="the exact dense sum: every entry that is not zero, whatever k is",
    source="Patarasuk and Yuan, JPDC 2009",
    run=dense,
    predicted_time=predicted_time,
    rejects=False,
    automatic=True,
    between_nodes=False,
    contributors_unknown="sums whole gradients, to which all ranks contribute: op='mean' is their mean",
)
